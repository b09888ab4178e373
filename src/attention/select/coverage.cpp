#include "attention/select/coverage.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/select/block_scores.h"
#include "device/blas.h"

namespace sb {
namespace {

// Softmax of a row of unscaled products in place, in fp32 with an fp64 sum.
void softmax(float* row, int64_t count, float scale) {
  const float top = *std::max_element(row, row + count);
  double sum = 0;
  for (int64_t m = 0; m < count; ++m) {
    row[m] = std::exp(scale * (row[m] - top));
    sum += row[m];
  }
  const float inverse = static_cast<float>(1.0 / sum);
  for (int64_t m = 0; m < count; ++m) row[m] *= inverse;
}

SampledToken measure_token(const AttentionShape& shape, const SequenceTiles& tiles, const CoverageRequest& request,
                           const std::vector<int64_t>& grid, int64_t token, int kv_head, BlockScorer& scorer) {
  const int group = shape.group(), d = shape.head_dim;
  const int64_t keys = token + 1, tile = token / tiles.query_block, seen_blocks = token / tiles.block + 1;
  const BlockIndex::Sequence& sequence = request.index->sequences()[request.sequence];
  std::vector<float> probabilities(group * keys);
  const KeyPage whole[] = {{0, 0}};
  const std::span<const KeyPage> pages = request.pages.empty() ? whole : request.pages;
  for (size_t i = 0; i < pages.size() && pages[i].begin < keys; ++i) {
    const int64_t end = std::min(i + 1 < pages.size() ? pages[i + 1].begin : keys, keys);
    sgemm({.transpose_b = true,
           .m = group,
           .n = end - pages[i].begin,
           .k = d,
           .a = request.q + ((token - request.begin) * shape.heads + int64_t{kv_head} * group) * d,
           .lda = d,
           .b = request.k + (pages[i].row * shape.kv_heads + kv_head) * d,
           .ldb = int64_t{shape.kv_heads} * d,
           .c = probabilities.data() + pages[i].begin,
           .ldc = keys});
  }
  std::vector<double> block_mass(group * seen_blocks), column_mass(group, 0.0);
  for (int h = 0; h < group; ++h) {
    float* p = probabilities.data() + h * keys;
    softmax(p, keys, shape.scale);
    for (int64_t j = 0; j < seen_blocks; ++j)
      block_mass[h * seen_blocks + j] =
          std::accumulate(p + j * tiles.block, p + std::min(keys, (j + 1) * tiles.block), 0.0);
    if (sequence.dense) continue;
    const int list_head = request.index->shape().list_heads == shape.heads ? kv_head * group + h : kv_head;
    const BlockIndex::Row list = request.index->row(BlockIndex::row_id(sequence, list_head, static_cast<int>(tile)));
    for (const int32_t column : list.columns) column_mass[h] += column <= token ? p[column] : 0.0;
  }
  const int64_t competing = tiles.competing(tile);
  const float* scores = competing == 0 ? nullptr : scorer.token_masses(kv_head, token, token + 1, competing);
  return judge_token(shape, tiles, *request.index, request.sequence, grid, token, kv_head,
                     {block_mass.data(), column_mass.data(), scores});
}

}  // namespace

SampledToken judge_token(const AttentionShape& shape, const SequenceTiles& tiles, const BlockIndex& index,
                         int sequence_id, std::span<const int64_t> grid, int64_t token, int kv_head,
                         const TokenMasses& masses) {
  const int group = shape.group();
  const int64_t tile = token / tiles.query_block, row = token - tiles.begin(tile);
  const int64_t competing = tiles.competing(tile), seen_blocks = token / tiles.block + 1;
  const BlockIndex::Sequence& sequence = index.sequences()[sequence_id];
  // The order in which this token would take blocks: forced and own ones first, then by its scores.
  std::vector<int64_t> order;
  for (int64_t j = 0; j < competing; ++j) {
    if (!tiles.forced(tile, j)) order.push_back(j);
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return masses.scores[a] > masses.scores[b]; });

  SampledToken result;
  result.curve.assign(grid.size(), 0.0);
  for (int h = 0; h < group; ++h) {
    const double* block_mass = masses.blocks + h * seen_blocks;
    if (sequence.dense) {
      result.held += 1.0;
    } else {
      const int list_head = index.shape().list_heads == shape.heads ? kv_head * group + h : kv_head;
      const BlockIndex::Row list = index.row(BlockIndex::row_id(sequence, list_head, static_cast<int>(tile)));
      for (size_t i = 0; i < list.blocks.size(); ++i) {
        if (list.first[i] <= row && list.blocks[i] < seen_blocks) result.held += block_mass[list.blocks[i]];
      }
      result.held += masses.columns[h];
    }
    double mass = 1.0;  // all but the ranked blocks are forced or the token's own
    for (const int64_t j : order) mass -= block_mass[j];
    const int64_t given = seen_blocks - static_cast<int64_t>(order.size());
    size_t taken = 0;
    for (size_t i = 0; i < grid.size(); ++i) {
      const int64_t room = grid[i] / tiles.block - given;
      while (taken < order.size() && static_cast<int64_t>(taken) < room) mass += block_mass[order[taken++]];
      result.curve[i] += mass;
    }
  }
  return result;
}

CoverageSample measure_coverage(const Exec& exec, const AttentionShape& shape, const SequenceTiles& tiles,
                                const CoverageRequest& request) {
  const std::vector<int64_t> grid = coverage_grid(tiles.tokens, tiles.block);
  const int64_t rows = std::min<int64_t>(request.rows, tiles.tokens);
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t token = sampled_token(i, rows, tiles.tokens);
    if (request.begin <= token && (request.end < 0 || token < request.end)) tokens.push_back(token);
  }
  const int64_t items = std::ssize(tokens) * shape.kv_heads;
  std::vector<SampledToken> sampled(items);
  exec.pool->parallel_for(items, 1, [&](int64_t item, int64_t, int) {
    const int64_t token = tokens[item / shape.kv_heads];
    BlockScorer scorer(shape, request.scoring, request.q, request.statistics, tiles.blocks(), request.begin,
                       request.planes);
    sampled[item] = measure_token(shape, tiles, request, grid, token, static_cast<int>(item % shape.kv_heads), scorer);
  });
  CoverageSample total;
  total.rows = std::ssize(tokens);
  total.curve.assign(grid.size(), 0.0);
  const double scale = items == 0 ? 0.0 : 1.0 / static_cast<double>(rows * shape.heads);
  for (const SampledToken& one : sampled) {
    total.held += one.held * scale;
    for (size_t i = 0; i < grid.size(); ++i) total.curve[i] += one.curve[i] * scale;
  }
  return total;
}

}  // namespace sb
