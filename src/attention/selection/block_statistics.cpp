#include "attention/selection/block_statistics.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace sb {

void BlockStatistics::fill(const Exec& exec, const AttentionShape& shape, BlockScore score, const float* k,
                           int64_t tokens, int block, float* rows) {
  const int d = shape.head_dim;
  const int64_t width = row_width(score, d), blocks = (tokens + block - 1) / block;
  const int64_t token_stride = int64_t{shape.kv_heads} * d;
  exec.pool->parallel_for(blocks * shape.kv_heads, 4, [&](int64_t first, int64_t last, int) {
    std::vector<float> squares(d);
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item / blocks, j = item % blocks;
      const int64_t begin = j * block, end = std::min<int64_t>(tokens, begin + block);
      const float inverse = 1.0f / static_cast<float>(end - begin);
      const float* keys = k + begin * token_stride + head * d;
      float* mean = rows + item * width;
      std::fill_n(mean, d, 0.0f);
      for (int64_t t = 0; t < end - begin; ++t) {
        for (int c = 0; c < d; ++c) mean[c] += keys[t * token_stride + c];
      }
      for (int c = 0; c < d; ++c) mean[c] *= inverse;
      if (score == BlockScore::mean) continue;
      // Two passes: the difference of large squares would lose the variance of keys with a common offset.
      std::fill(squares.begin(), squares.end(), 0.0f);
      for (int64_t t = 0; t < end - begin; ++t) {
        for (int c = 0; c < d; ++c) {
          const float difference = keys[t * token_stride + c] - mean[c];
          squares[c] += difference * difference;
        }
      }
      for (int c = 0; c < d; ++c) mean[d + c] = squares[c] * inverse;
    }
  });
}

void fill_query_row(BlockScore score, const float* q, int head_dim, float scale, float* row) {
  for (int c = 0; c < head_dim; ++c) row[c] = q[c] * scale;
  if (score == BlockScore::mean) return;
  const float half = 0.5f * scale * scale;
  for (int c = 0; c < head_dim; ++c) row[head_dim + c] = half * q[c] * q[c];
}

}  // namespace sb
