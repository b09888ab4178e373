#include "attention/select/block_scores.h"

#include "attention/select/block_scores_kernels.h"
#include "attention/select/part_scores_kernels.h"
#include "core/cpu_isa.h"
#include "device/blas.h"

namespace sb {

BlockScorer::BlockScorer(const AttentionShape& shape, const BlockScoring& scoring, const float* q,
                         const float* statistics, int64_t blocks, int64_t first_token)
    : shape_(shape), scoring_(scoring), q_(q), statistics_(statistics), blocks_(blocks), first_token_(first_token) {}

const float* BlockScorer::token_masses(int head, int64_t begin, int64_t end, int64_t count) {
  const int group = shape_.group(), d = shape_.head_dim;
  const int64_t width = scoring_.row_width(d), rows = (end - begin) * group;
  queries_.resize(rows * width);
  scores_.resize(rows * count);
  masses_.resize((end - begin) * count);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t token = begin - first_token_ + row / group, query_head = int64_t{head} * group + row % group;
    fill_query_row(scoring_, q_ + (token * shape_.heads + query_head) * d, d, shape_.scale,
                   queries_.data() + row * width);
  }
  score_blocks(head, rows, count);
  const auto relative = cpu_isa() == CpuIsa::avx512 ? avx512::relative_masses : avx2::relative_masses;
  relative(scores_.data(), end - begin, group, count, masses_.data());
  return masses_.data();
}

void BlockScorer::score_blocks(int head, int64_t rows, int64_t count) {
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
  part_scratch_.resize((wide ? avx512::part_scratch_floats : avx2::part_scratch_floats)(rows, parts, width));
  const auto score = wide ? avx512::score_parts : avx2::score_parts;
  score(statistics, count, parts, width, queries_.data(), rows, scores_.data(), part_scratch_.data());
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
