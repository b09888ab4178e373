#include "attention/select/block_statistics.h"

#include <algorithm>
#include <vector>

namespace sb {
namespace {

// Mean, then (with `moments`) variance, of `count` keys.
void fill_part(const float* keys, int64_t count, int64_t stride, int d, bool moments, float* mean) {
  const float inverse = 1.0f / static_cast<float>(count);
  std::fill_n(mean, moments ? 2 * d : d, 0.0f);
  for (int64_t t = 0; t < count; ++t) {
    for (int c = 0; c < d; ++c) mean[c] += keys[t * stride + c];
  }
  for (int c = 0; c < d; ++c) mean[c] *= inverse;
  if (!moments) return;
  // Two passes: the difference of large squares would lose the variance of keys with a common offset.
  float* squares = mean + d;
  for (int64_t t = 0; t < count; ++t) {
    for (int c = 0; c < d; ++c) {
      const float difference = keys[t * stride + c] - mean[c];
      squares[c] += difference * difference;
    }
  }
  for (int c = 0; c < d; ++c) squares[c] *= inverse;
}

}  // namespace

void BlockStatistics::fill(const Exec& exec, const AttentionShape& shape, const BlockScoring& scoring, const float* k,
                           int64_t tokens, float* rows) {
  const int d = shape.head_dim, parts = scoring.parts();
  const int64_t blocks = (tokens + scoring.block - 1) / scoring.block;
  const int64_t width = scoring.row_width(d), stride = int64_t{shape.kv_heads} * d;
  exec.pool->parallel_for(blocks * shape.kv_heads, 4, [&](int64_t first, int64_t last, int) {
    std::vector<float> row(width);
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item / blocks, block = item % blocks;
      float* out = rows + item * scoring.block_floats(d);
      for (int part = 0; part < parts; ++part) {
        const int64_t begin = block * scoring.block + part * scoring.part;
        const int64_t count = std::min<int64_t>(tokens - begin, scoring.part);
        if (count > 0) {
          fill_part(k + begin * stride + head * d, count, stride, d, scoring.moments(), row.data());
        } else {
          std::fill(row.begin(), row.end(), 0.0f);
        }
        for (int64_t c = 0; c < width; ++c) out[c * parts + part] = row[c];
      }
    }
  });
}

void fill_query_row(const BlockScoring& scoring, const float* q, int head_dim, float scale, float* row) {
  for (int c = 0; c < head_dim; ++c) row[c] = q[c] * scale;
  if (!scoring.moments()) return;
  const float half = 0.5f * scale * scale;
  for (int c = 0; c < head_dim; ++c) row[head_dim + c] = half * q[c] * q[c];
}

}  // namespace sb
