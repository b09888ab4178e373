#pragma once

#include <cstdint>

// Scores of key blocks by their parts, compiled once per instruction set: the product of queries with parts, folded to
// one number a block while it lies in the first-level cache. Where the processor multiplies bf16 twice as fast (AVX-512
// with BF16), both operands are rounded to it.
#define SB_DECLARE_PART_SCORE_KERNELS                                                                                  \
  int64_t part_scratch_floats(int64_t rows, int parts, int64_t width);                                                 \
  /* statistics [blocks, width, parts], queries [rows, width] → scores [rows, blocks]: log Σ_parts exp(product). */ \
  void score_parts(const float* statistics, int64_t blocks, int parts, int64_t width, const float* queries,            \
                   int64_t rows, float* scores, float* scratch);

namespace sb::avx2 {
SB_DECLARE_PART_SCORE_KERNELS
}
namespace sb::avx512 {
SB_DECLARE_PART_SCORE_KERNELS
}
#undef SB_DECLARE_PART_SCORE_KERNELS
