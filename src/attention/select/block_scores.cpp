#include "attention/select/block_scores.h"

#include "attention/select/kernels/block_scores_kernels.h"
#include "attention/select/kernels/part_scores_kernels.h"
#include "attention/select/kernels/plane_scores_kernels.h"
#include "core/cpu_isa.h"
#include "device/blas.h"

namespace sb {

BlockScorer::BlockScorer(const AttentionShape& shape, const BlockScoring& scoring, const float* q,
                         const float* statistics, int64_t blocks, int64_t first_token, const LayerPlanes* planes)
    : shape_(shape),
      scoring_(scoring),
      q_(q),
      statistics_(statistics),
      blocks_(blocks),
      first_token_(first_token),
      planes_(planes) {
  check_planes(scoring, shape, planes);
}

const float* BlockScorer::token_masses(int head, int64_t begin, int64_t end, int64_t count) {
  const int scores_a_token = scoring_.planes() ? 1 : shape_.group();
  scores_.resize((end - begin) * scores_a_token * count);
  masses_.resize((end - begin) * count);
  if (scoring_.planes()) {
    score_planes(head, begin, end, count);
  } else {
    score_statistics(head, begin, end, count);
  }
  const auto relative = cpu_isa() == CpuIsa::avx512 ? avx512::relative_masses : avx2::relative_masses;
  relative(scores_.data(), end - begin, scores_a_token, count, masses_.data());
  return masses_.data();
}

void BlockScorer::score_planes(int head, int64_t begin, int64_t end, int64_t count) {
  const int64_t rows = end - begin, channels = scoring_.channels;
  queries_.resize(rows * channels);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = begin - first_token_ + row;
    fill_mean_query(shape_, *planes_, head, q_ + token * shape_.heads * shape_.head_dim,
                    queries_.data() + row * channels);
  }
  const bool wide = cpu_isa() == CpuIsa::avx512;
  scratch_.resize((wide ? avx512::plane_scratch_floats : avx2::plane_scratch_floats)(rows, scoring_.block, channels));
  const auto score = wide ? avx512::score_planes : avx2::score_planes;
  score(statistics_ + head * blocks_ * scoring_.block_floats(shape_.head_dim), count, scoring_.block, channels,
        queries_.data(), rows, scores_.data(), scratch_.data());
}

void BlockScorer::score_statistics(int head, int64_t begin, int64_t end, int64_t count) {
  const int group = shape_.group(), d = shape_.head_dim;
  const int64_t width = scoring_.row_width(d), rows = (end - begin) * group;
  queries_.resize(rows * width);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = begin - first_token_ + row / group, query_head = int64_t{head} * group + row % group;
    fill_query_row(scoring_, q_ + (token * shape_.heads + query_head) * d, d, shape_.scale,
                   queries_.data() + row * width);
  }
  score_rows(head, rows, count);
}

void BlockScorer::score_rows(int head, int64_t rows, int64_t count) {
  const int parts = scoring_.parts();
  const int64_t width = scoring_.row_width(shape_.head_dim);
  const float* statistics = statistics_ + head * blocks_ * width * parts;
  if (parts == 1) {
    return sgemm({.transpose_b = true,
                  .m = rows,
                  .n = count,
                  .k = width,
                  .a = queries_.data(),
                  .lda = width,
                  .b = statistics,
                  .ldb = width,
                  .c = scores_.data(),
                  .ldc = count});
  }
  const bool wide = cpu_isa() == CpuIsa::avx512;
  scratch_.resize((wide ? avx512::part_scratch_floats : avx2::part_scratch_floats)(rows, parts, width));
  const auto score = wide ? avx512::score_parts : avx2::score_parts;
  score(statistics, count, parts, width, queries_.data(), rows, scores_.data(), scratch_.data());
}

const float* BlockScorer::tile_masses(int head, const SequenceTiles& tiles, int64_t first_tile, int64_t last_tile,
                                      int64_t count) {
  const int64_t begin = tiles.begin(first_tile);
  const float* tokens = token_masses(head, begin, tiles.end(last_tile - 1), count);
  tile_masses_.resize((last_tile - first_tile) * count);
  const auto sum = cpu_isa() == CpuIsa::avx512 ? avx512::sum_masses : avx2::sum_masses;
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    sum(tokens + (tiles.begin(tile) - begin) * count, tiles.rows(tile), count,
        tile_masses_.data() + (tile - first_tile) * count);
  }
  return tile_masses_.data();
}

}  // namespace sb
