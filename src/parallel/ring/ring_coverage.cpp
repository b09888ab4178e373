// True coverage where several ranks share the sequences: sampled queries go to all ranks, each weighs the keys it
// holds.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/select/block_scores.h"
#include "device/blas.h"
#include "parallel/ring/ring_selection.h"

namespace sb {

std::vector<CoverageSample> RingSelection::measure(const Exec& exec, Communicator& group, int layer,
                                                   const AttentionShape& shape, const ContextLayout& layout,
                                                   std::span<const int32_t> budgets, const float* q, const float* k,
                                                   const BlockIndex& index, int rows) {
  const LayerPlanes* planes = step_.planes(layer, shape);
  const SelectionConfig& config = selector_.config();
  std::vector<uint8_t> wanted(layout.sequences());
  int64_t blocks = 0, most = 0;
  for (int s = 0; s < layout.sequences(); ++s) {
    wanted[s] = layout.length(s) > 0;
    blocks += layout.blocks(s);
  }
  for (int r = 0; r < layout.ranks(); ++r) {
    int64_t held = 0;
    for (int s = 0; s < layout.sequences(); ++s) held += std::ssize(layout.held(r, s));
    most = std::max(most, held);
  }
  const BlockScoring scoring(config);
  const auto bytes = [&](int64_t count) {
    return Arena::rounded(BlockStatistics::floats(scoring, shape, count) * static_cast<int64_t>(sizeof(float)));
  };
  Arena memory("coverage", bytes(blocks) + layout.sequences() * Arena::kAlignment + bytes(most * layout.ranks()));
  Exec own = exec;
  own.scratch = &memory;
  const std::vector<const float*> statistics = gather_statistics(own, group, shape, layout, wanted, k, planes);
  const std::vector<int32_t> local = layout.local_cu_seqlens(group.rank());
  std::vector<CoverageSample> samples(layout.sequences());
  for (int s = 0; s < layout.sequences(); ++s) {
    if (!wanted[s]) continue;
    SelectionRequest request;
    request.shape = shape;
    request.tiles = sequence_tiles(config, layout.length(s), budgets.empty() ? config.budget : budgets[s]);
    request.q = q + int64_t{local[s]} * shape.heads * shape.head_dim;
    request.k = k + int64_t{local[s]} * shape.kv_heads * shape.head_dim;
    request.statistics = statistics[s];
    request.planes = planes;
    request.held_blocks = layout.held(group.rank(), s);
    samples[s] = measure_sequence(own, group, request, layout, s, index, rows);
  }
  return samples;
}

int64_t RingSelection::measure_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks, int rows) const {
  if (rows == 0) return 0;
  const SelectionConfig& config = selector_.config();
  const int64_t all = max_tokens * ranks, blocks = all / config.block + 1;
  // Statistics as they came and in order; of one sequence the positions, products and masses, and listed columns.
  const int64_t statistics = 2 * BlockStatistics::floats(BlockScoring(config), shape, blocks) * int64_t{sizeof(float)};
  const int64_t listed = config.pattern == SelectionPattern::vertical_slash ? shape.heads * all : 0;
  return statistics + max_tokens * int64_t{sizeof(int64_t)} +
         int64_t{rows} * shape.heads *
             (max_tokens * int64_t{sizeof(float)} + blocks * int64_t{sizeof(double)} +
              shape.head_dim * int64_t{sizeof(float)}) +
         listed;
}

namespace {

// What the keys held here weigh under the sampled queries.
struct HeldMasses {
  std::vector<float> map;                // [head, row, key], by the row's largest
  std::vector<double> sums, block_mass;  // [head, row] and [head, row, block], of all ranks
};

// `position`: of every key held here; `seen`: how many of them a row sees.
HeldMasses held_masses(const Exec& exec, Communicator& group, const SelectionRequest& request,
                       std::span<const float> queries, std::span<const int64_t> position,
                       std::span<const int64_t> seen) {
  const AttentionShape& shape = request.shape;
  const int64_t rows = std::ssize(seen), held = std::ssize(position), heads = shape.heads, d = shape.head_dim;
  const int64_t blocks = request.tiles.blocks(), block = request.tiles.block;
  std::vector<float> map(rows * heads * held), top(rows * heads, -std::numeric_limits<float>::infinity());
  std::vector<double> sums(rows * heads, 0.0), block_mass(rows * heads * blocks, 0.0);
  exec.pool->parallel_for(heads, 1, [&](int64_t head, int64_t, int) {
    if (rows == 0 || held == 0) return;
    sgemm({.transpose_b = true,
           .m = rows,
           .n = held,
           .k = d,
           .a = queries.data() + head * d,
           .lda = heads * d,
           .b = request.k + head / shape.group() * d,
           .ldb = int64_t{shape.kv_heads} * d,
           .c = map.data() + head * rows * held,
           .ldc = held});
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t m = 0; m < seen[r]; ++m)
        top[head * rows + r] = std::max(top[head * rows + r], map[(head * rows + r) * held + m]);
  });
  group.all_reduce(std::span<float>(top), ReduceOp::max);
  exec.pool->parallel_for(heads, 1, [&](int64_t head, int64_t, int) {
    for (int64_t r = 0; r < rows; ++r) {
      float* row = map.data() + (head * rows + r) * held;
      for (int64_t m = 0; m < seen[r]; ++m) {
        row[m] = std::exp(shape.scale * (row[m] - top[head * rows + r]));
        sums[head * rows + r] += row[m];
        block_mass[(head * rows + r) * blocks + position[m] / block] += row[m];
      }
    }
  });
  group.all_reduce(std::span<double>(sums));
  group.all_reduce(std::span<double>(block_mass));
  return {std::move(map), std::move(sums), std::move(block_mass)};
}

}  // namespace

CoverageSample RingSelection::measure_sequence(const Exec& exec, Communicator& group, const SelectionRequest& request,
                                               const ContextLayout& layout, int s, const BlockIndex& index,
                                               int wanted_rows) {
  const AttentionShape& shape = request.shape;
  const SequenceTiles& tiles = request.tiles;
  const int64_t tokens = tiles.tokens, blocks = tiles.blocks(), heads = shape.heads, d = shape.head_dim;
  const int64_t all_rows = std::min<int64_t>(wanted_rows, tokens);
  std::vector<int64_t> sampled;  // tokens
  for (int64_t r = 0; r < all_rows; ++r)
    if (const int64_t token = sampled_token(r, all_rows, tokens); request.begin <= token && token < request.last())
      sampled.push_back(token);
  const auto rows = std::ssize(sampled);
  std::vector<int64_t> position;  // of every key this rank holds
  for (const int32_t b : request.held_blocks)
    for (int64_t i = 0; i < layout.block_length(s, b); ++i) position.push_back(int64_t{b} * tiles.block + i);
  const int64_t held = std::ssize(position);
  // Where the queries of sampled tokens are; -1: on another rank. Keys one sees are a prefix of those held.
  const auto first = std::ranges::lower_bound(position, request.begin) - position.begin();
  std::vector<int64_t> own(rows, -1), seen(rows);
  std::vector<float> queries(rows * heads * d, 0.0f);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = sampled[r];
    seen[r] = std::upper_bound(position.begin(), position.end(), token) - position.begin();
    if (seen[r] == 0 || position[seen[r] - 1] != token) continue;
    own[r] = seen[r] - 1 - first;
    std::memcpy(queries.data() + r * heads * d, request.q + own[r] * heads * d, heads * d * sizeof(float));
  }
  group.all_reduce(std::span<float>(queries));  // one rank has each, the others zeros

  std::vector<double> column_mass(rows * heads, 0.0);
  const auto [map, sums, block_mass] = held_masses(exec, group, request, queries, position, seen);

  // Which columns a row gathers is known where the row is; what they weigh, where the columns are.
  const BlockIndex::Sequence& sequence = index.sequences()[s];
  const bool gathers = selector_.config().pattern == SelectionPattern::vertical_slash && !sequence.dense;
  std::vector<uint8_t> listed(gathers ? heads * tokens : 0);
  for (int64_t r = 0; gathers && r < rows; ++r) {
    std::fill(listed.begin(), listed.end(), 0);
    const int64_t token = sampled[r];
    if (own[r] >= 0)
      for (int64_t head = 0; head < heads; ++head)
        for (const int32_t column :
             index
                 .row(BlockIndex::row_id(sequence, static_cast<int>(head), static_cast<int>(token / tiles.query_block)))
                 .columns)
          listed[head * tokens + column] = 1;
    group.all_reduce(std::span<uint8_t>(listed), ReduceOp::max);
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t m = 0; m < seen[r]; ++m)
        if (listed[head * tokens + position[m]]) column_mass[head * rows + r] += map[(head * rows + r) * held + m];
  }
  if (gathers) group.all_reduce(std::span<double>(column_mass));

  const std::vector<int64_t> grid = coverage_grid(tokens, tiles.block);
  std::vector<double> total(1 + grid.size(), 0.0);  // held, then the curve
  const BlockScoring scoring(selector_.config());
  BlockScorer scorer(shape, scoring, request.q, request.statistics, blocks, 0, request.planes);
  for (int64_t r = 0; r < rows; ++r) {
    if (own[r] < 0) continue;
    const int64_t token = sampled[r], seen_blocks = token / tiles.block + 1;
    const int64_t competing = tiles.competing(token / tiles.query_block);
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      std::vector<double> of_blocks, of_columns;
      for (int64_t head = int64_t{kv_head} * shape.group(); head < int64_t{kv_head + 1} * shape.group(); ++head) {
        const double sum = sums[head * rows + r];
        const double* mass = block_mass.data() + (head * rows + r) * blocks;
        for (int64_t j = 0; j < seen_blocks; ++j) of_blocks.push_back(mass[j] / sum);
        of_columns.push_back(column_mass[head * rows + r] / sum);
      }
      const float* scores = competing == 0 ? nullptr : scorer.token_masses(kv_head, own[r], own[r] + 1, competing);
      const SampledToken one =
          judge_token(shape, tiles, index, s, grid, token, kv_head, {of_blocks.data(), of_columns.data(), scores});
      total[0] += one.held;
      for (size_t i = 0; i < grid.size(); ++i) total[1 + i] += one.curve[i];
    }
  }
  group.all_reduce(std::span<double>(total));
  const double scale = 1.0 / static_cast<double>(all_rows * heads);
  CoverageSample sample;
  sample.rows = rows;
  sample.held = total[0] * scale;
  for (size_t i = 0; i < grid.size(); ++i) sample.curve.push_back(total[1 + i] * scale);
  return sample;
}

}  // namespace sb
