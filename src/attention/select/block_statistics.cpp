#include "attention/select/block_statistics.h"

#include <algorithm>
#include <vector>

#include "attention/select/kernels/plane_scores_kernels.h"
#include "core/cpu_isa.h"
#include "core/errors.h"

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

void fill_parts(const BlockScoring& scoring, int d, const float* keys, int64_t tokens, int64_t stride,
                std::vector<float>& row, float* out) {
  const int parts = scoring.parts();
  row.resize(scoring.row_width(d));
  for (int part = 0; part < parts; ++part) {
    const int64_t begin = int64_t{part} * scoring.part, count = std::min<int64_t>(tokens - begin, scoring.part);
    if (count > 0) {
      fill_part(keys + begin * stride, count, stride, d, scoring.moments(), row.data());
    } else {
      std::fill(row.begin(), row.end(), 0.0f);
    }
    for (int64_t c = 0; c < std::ssize(row); ++c) out[c * parts + part] = row[c];
  }
}

void gather_channels(int block, std::span<const int32_t> channels, const float* keys, int64_t tokens, int64_t stride,
                     std::vector<float>& gathered, float* out) {
  gathered.resize(channels.size() * static_cast<size_t>(block));
  for (int64_t t = 0; t < block; ++t) {
    const float* key = keys + std::min(t, tokens - 1) * stride;
    for (size_t c = 0; c < channels.size(); ++c) gathered[c * block + t] = key[channels[c]];
  }
  const auto pack = cpu_isa() == CpuIsa::avx512 ? avx512::pack_plane_keys : avx2::pack_plane_keys;
  pack(gathered.data(), std::ssize(channels), block, out);
}

}  // namespace

void check_planes(const BlockScoring& scoring, const AttentionShape& shape, const LayerPlanes* planes) {
  if (!scoring.planes()) return;
  SB_CHECK(planes != nullptr, "scores by planes without any planes");
  SB_CHECK(planes->kv_heads == shape.kv_heads && planes->channels == scoring.channels,
           "planes of {} kv heads and {} channels for {} and {}", planes->kv_heads, planes->channels, shape.kv_heads,
           scoring.channels);
}

void BlockStatistics::fill(const Exec& exec, const AttentionShape& shape, const BlockScoring& scoring, const float* k,
                           int64_t tokens, float* rows, const LayerPlanes* planes) {
  check_planes(scoring, shape, planes);
  const int d = shape.head_dim;
  const int64_t blocks = (tokens + scoring.block - 1) / scoring.block, stride = int64_t{shape.kv_heads} * d;
  exec.pool->parallel_for(blocks * shape.kv_heads, 4, [&](int64_t first, int64_t last, int) {
    std::vector<float> buffer;
    for (int64_t item = first; item < last; ++item) {
      const int64_t head = item / blocks, begin = item % blocks * scoring.block;
      const float* keys = k + begin * stride + head * d;
      float* out = rows + item * scoring.block_floats(d);
      if (scoring.planes()) {
        gather_channels(scoring.block, planes->of(static_cast<int>(head)), keys, tokens - begin, stride, buffer, out);
      } else {
        fill_parts(scoring, d, keys, tokens - begin, stride, buffer, out);
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

void fill_mean_query(const AttentionShape& shape, const LayerPlanes& planes, int kv_head, const float* q, float* row) {
  const int group = shape.group(), d = shape.head_dim;
  const std::span<const int32_t> channels = planes.of(kv_head);
  const float* head = q + int64_t{kv_head} * group * d;
  for (size_t c = 0; c < channels.size(); ++c) row[c] = head[channels[c]];
  for (int h = 1; h < group; ++h) {
    head += d;
    for (size_t c = 0; c < channels.size(); ++c) row[c] += head[channels[c]];
  }
  const float scale = planes.scale[kv_head] / static_cast<float>(group);
  for (size_t c = 0; c < channels.size(); ++c) row[c] *= scale;
}

}  // namespace sb
