#pragma once

#include <cstdint>
#include <vector>

#include "attention/attention.h"
#include "attention/select/block_statistics.h"

// New tokens on a GPU: keys and values stay in its memory. A build without CUDA has no_cuda.cpp in place of the
// kernels.
namespace sb::cuda {

// The newest token of a sequence against its cached keys and values.
struct DecodeParams {
  AttentionShape shape{};
  TensorView q, out;   // its row, [1, heads, d]
  TensorView k, v;     // [capacity, kv_heads, d]
  int64_t tokens = 0;  // that the cache holds, this one included
  int block = 0;       // tokens of a key block
  // Which blocks it sees, in device memory: under kv head h, lists[h · (room + 1)] is their number and they follow.
  // Null: all.
  const int32_t* lists = nullptr;
  int64_t room = 0;  // blocks of the capacity
};
int64_t decode_scratch_bytes(const AttentionShape& shape, int64_t room);
void decode_attention(const Exec& exec, const DecodeParams& params);

// What the blocks of these keys [blocks · block, kv_heads, d] are judged by, as BlockStatistics::fill has it:
// [kv_heads, blocks, block_floats]. Only that (by planes the selected channels of the keys) comes to the host; waits
// for it.
std::vector<float> block_statistics(const Exec& exec, const AttentionShape& shape, const BlockScoring& scoring,
                                    TensorView keys, const LayerPlanes* planes);
int64_t block_statistics_scratch_bytes(const AttentionShape& shape, const BlockScoring& scoring, int64_t blocks);

}  // namespace sb::cuda
