#pragma once

// Shared by the launchers: tensor maps and error checks. CUDA files only.

#include <cuda.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/launch/params.h"

namespace sb::gpu {

int multiprocessors();

// A packed bf16 tensor [tokens, heads, d], read in boxes of 64 columns × `box_heads` × `box_tokens`, 128-byte swizzled;
// tokens past the end read as zeros.
CUtensorMap packed_map(const void* data, int64_t tokens, int heads, int d, int box_heads, int box_tokens);

// A packed fp32 tensor [tokens, heads, d], added to in boxes of 32 columns × one head × 64 tokens, 128-byte swizzled.
CUtensorMap sums_map(const void* data, int64_t tokens, int heads, int d);

// Copied rows of gathered columns, read 128 at a time.
CUtensorMap gathered_map(const void* data, const GatheredColumns& gathered, int d);

// Calls launch(head dimension, whether there are gathered columns, whether key blocks have 64 tokens), constants all.
template <typename Launch>
void for_kind(const Shape& shape, const Tiling& tiling, const GatheredColumns& gathered, Launch launch) {
  const auto with = [](bool value, auto body) { value ? body(std::true_type{}) : body(std::false_type{}); };
  with(shape.head_dim == 128, [&](auto wide) {
    with(gathered.piece_count > 0, [&](auto columns) {
      with(tiling.block == kBlock / 2,
           [&](auto halves) { launch(std::integral_constant < int, wide() ? 128 : 64 > {}, columns, halves); });
    });
  });
}

// Where subtile 0 lies in these: behind the room before it.
inline float* first_statistics(const BackwardParams& p) {
  return p.statistics + 2 * kSubtileRows;
}
inline float* first_dq_sum(const BackwardParams& p) {
  return p.dq_sum == nullptr ? nullptr : p.dq_sum + kSubtileRows * p.shape.head_dim;
}

void check_shape(const Shape& shape, const Tiling& tiling, const GatheredColumns& gathered);

}  // namespace sb::gpu
