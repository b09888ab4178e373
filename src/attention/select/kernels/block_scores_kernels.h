#pragma once

#include <cstdint>

// Vector loops of the block scores, compiled once per instruction set.
#define SB_DECLARE_BLOCK_SCORE_KERNELS                                                                                  \
  /* scores [tokens · group, count] → masses [tokens, count]: max over the group of (score - log Σ_j exp score). */ \
  void relative_masses(const float* scores, int64_t tokens, int group, int64_t count, float* masses);                   \
  /* log Σ_rows exp, column by column: masses [rows, count] → out [count]. */                                        \
  void sum_masses(const float* masses, int rows, int64_t count, float* out);

namespace sb::avx2 {
SB_DECLARE_BLOCK_SCORE_KERNELS
}
namespace sb::avx512 {
SB_DECLARE_BLOCK_SCORE_KERNELS
}
#undef SB_DECLARE_BLOCK_SCORE_KERNELS
