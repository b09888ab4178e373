#pragma once

#include <cstdint>

// Scores of key blocks by their largest key, compiled once per instruction set. Keys and queries are rounded to bf16 on
// every processor, so that all select alike; where it multiplies bf16 (AVX-512 with BF16) that is the faster way.
#define SB_DECLARE_PLANE_SCORE_KERNELS                                                                             \
  /* keys [channels, count] → pairs of neighbouring channels as bf16 [channels / 2, count]. */                   \
  void pack_plane_keys(const float* keys, int64_t channels, int64_t count, float* pairs);                          \
  int64_t plane_scratch_floats(int64_t rows, int block, int64_t channels);                                         \
  /* keys [blocks, channels / 2, block] as packed, queries [rows, channels] → scores [rows, blocks]: the largest \
     product. */                                                                                                   \
  void score_planes(const float* keys, int64_t blocks, int block, int64_t channels, const float* queries,          \
                    int64_t rows, float* scores, float* scratch);

namespace sb::avx2 {
SB_DECLARE_PLANE_SCORE_KERNELS
}
namespace sb::avx512 {
SB_DECLARE_PLANE_SCORE_KERNELS
}
#undef SB_DECLARE_PLANE_SCORE_KERNELS
