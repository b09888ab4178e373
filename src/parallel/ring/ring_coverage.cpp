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

// Sampled tokens of a sequence, and the keys that this rank holds of it.
struct SampledQueries {
  std::vector<int64_t> tokens;
  std::vector<int64_t> position;  // of every key held here
  std::vector<int64_t> seen;      // by token: how many keys it sees, which are a prefix of those held
  std::vector<int64_t> own;       // by token: where its query is; -1: on another rank
  std::vector<float> queries;     // [token, head, head_dim]

  int64_t rows() const { return std::ssize(tokens); }
  int64_t held() const { return std::ssize(position); }
};

// `all_rows`: of the whole sequence, of which the request may be a piece.
SampledQueries gather_queries(Communicator& group, const SelectionRequest& request, const ContextLayout& layout, int s,
                              int64_t all_rows) {
  const int64_t width = int64_t{request.shape.heads} * request.shape.head_dim;
  SampledQueries sampled;
  for (int64_t r = 0; r < all_rows; ++r)
    if (const int64_t token = sampled_token(r, all_rows, request.tiles.tokens);
        request.begin <= token && token < request.last())
      sampled.tokens.push_back(token);
  std::vector<int64_t>& position = sampled.position;
  for (const int32_t b : request.held_blocks)
    for (int64_t i = 0; i < layout.block_length(s, b); ++i) position.push_back(int64_t{b} * request.tiles.block + i);
  const auto first = std::ranges::lower_bound(position, request.begin) - position.begin();
  sampled.seen.resize(sampled.rows());
  sampled.own.resize(sampled.rows(), -1);
  sampled.queries.resize(sampled.rows() * width, 0.0f);
  for (int64_t r = 0; r < sampled.rows(); ++r) {
    const int64_t token = sampled.tokens[r];
    const int64_t seen = std::upper_bound(position.begin(), position.end(), token) - position.begin();
    sampled.seen[r] = seen;
    if (seen == 0 || position[seen - 1] != token) continue;
    sampled.own[r] = seen - 1 - first;
    std::memcpy(sampled.queries.data() + r * width, request.q + sampled.own[r] * width, width * sizeof(float));
  }
  group.all_reduce(std::span<float>(sampled.queries));  // one rank has each, the others zeros
  return sampled;
}

// What the keys held here weigh under the sampled queries.
struct HeldMasses {
  std::vector<float> map;                // [head, row, key], by the row's largest
  std::vector<double> sums, block_mass;  // [head, row] and [head, row, block], of all ranks
};

HeldMasses held_masses(const Exec& exec, Communicator& group, const SelectionRequest& request,
                       const SampledQueries& sampled) {
  const AttentionShape& shape = request.shape;
  const std::vector<int64_t>&position = sampled.position, &seen = sampled.seen;
  const int64_t rows = sampled.rows(), held = sampled.held(), heads = shape.heads, d = shape.head_dim;
  const int64_t blocks = request.tiles.blocks(), block = request.tiles.block;
  std::vector<float> map(rows * heads * held), top(rows * heads, -std::numeric_limits<float>::infinity());
  std::vector<double> sums(rows * heads, 0.0), block_mass(rows * heads * blocks, 0.0);
  exec.pool->parallel_for(heads, 1, [&](int64_t head, int64_t, int) {
    if (rows == 0 || held == 0) return;
    sgemm({.transpose_b = true,
           .m = rows,
           .n = held,
           .k = d,
           .a = sampled.queries.data() + head * d,
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

// [head, row]: what the single columns weigh that a row gathers. Which these are is known where the row is; what they
// weigh, where the columns are.
std::vector<double> column_masses(Communicator& group, const SelectionRequest& request, const SampledQueries& sampled,
                                  std::span<const float> map, const BlockIndex& index,
                                  const BlockIndex::Sequence& sequence) {
  const int64_t heads = request.shape.heads, tokens = request.tiles.tokens, rows = sampled.rows();
  std::vector<double> masses(rows * heads, 0.0);
  std::vector<uint8_t> listed(heads * tokens);
  for (int64_t r = 0; r < rows; ++r) {
    std::fill(listed.begin(), listed.end(), 0);
    const auto tile = static_cast<int>(sampled.tokens[r] / request.tiles.query_block);
    for (int64_t head = 0; sampled.own[r] >= 0 && head < heads; ++head)
      for (const int32_t column : index.row(BlockIndex::row_id(sequence, static_cast<int>(head), tile)).columns)
        listed[head * tokens + column] = 1;
    group.all_reduce(std::span<uint8_t>(listed), ReduceOp::max);
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t m = 0; m < sampled.seen[r]; ++m)
        if (listed[head * tokens + sampled.position[m]])
          masses[head * rows + r] += map[(head * rows + r) * sampled.held() + m];
  }
  group.all_reduce(std::span<double>(masses));
  return masses;
}

// Of all heads of one key-value head, as shares of each one's whole mass.
struct MassShares {
  std::vector<double> of_blocks, of_columns;
};

MassShares shares_of(const SelectionRequest& request, const HeldMasses& masses, std::span<const double> column_mass,
                     const SampledQueries& sampled, int64_t r, int kv_head) {
  const int64_t rows = sampled.rows(), group = request.shape.group(), blocks = request.tiles.blocks();
  MassShares shares;
  for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    const double sum = masses.sums[head * rows + r];
    const double* mass = masses.block_mass.data() + (head * rows + r) * blocks;
    for (int64_t j = 0; j < sampled.tokens[r] / request.tiles.block + 1; ++j) shares.of_blocks.push_back(mass[j] / sum);
    shares.of_columns.push_back(column_mass[head * rows + r] / sum);
  }
  return shares;
}

}  // namespace

CoverageSample RingSelection::measure_sequence(const Exec& exec, Communicator& group, const SelectionRequest& request,
                                               const ContextLayout& layout, int s, const BlockIndex& index,
                                               int wanted_rows) {
  const AttentionShape& shape = request.shape;
  const SequenceTiles& tiles = request.tiles;
  const int64_t all_rows = std::min<int64_t>(wanted_rows, tiles.tokens);
  const SampledQueries sampled = gather_queries(group, request, layout, s, all_rows);
  const int64_t rows = sampled.rows();
  const HeldMasses masses = held_masses(exec, group, request, sampled);
  const BlockIndex::Sequence& sequence = index.sequences()[s];
  const bool gathers = selector_.config().pattern == SelectionPattern::vertical_slash && !sequence.dense;
  const std::vector<double> column_mass = gathers ? column_masses(group, request, sampled, masses.map, index, sequence)
                                                  : std::vector<double>(rows * shape.heads, 0.0);

  const std::vector<int64_t> grid = coverage_grid(tiles.tokens, tiles.block);
  std::vector<double> total(1 + grid.size(), 0.0);  // held, then the curve
  const BlockScoring scoring(selector_.config());
  BlockScorer scorer(shape, scoring, request.q, request.statistics, tiles.blocks(), 0, request.planes);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = sampled.tokens[r], own = sampled.own[r];
    if (own < 0) continue;
    const int64_t competing = tiles.competing(token / tiles.query_block);
    for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      const MassShares shares = shares_of(request, masses, column_mass, sampled, r, kv_head);
      const float* scores = competing == 0 ? nullptr : scorer.token_masses(kv_head, own, own + 1, competing);
      const SampledToken one = judge_token(shape, tiles, index, s, grid, token, kv_head,
                                           {shares.of_blocks.data(), shares.of_columns.data(), scores});
      total[0] += one.held;
      for (size_t i = 0; i < grid.size(); ++i) total[1 + i] += one.curve[i];
    }
  }
  group.all_reduce(std::span<double>(total));
  const double scale = 1.0 / static_cast<double>(all_rows * shape.heads);
  CoverageSample sample;
  sample.rows = rows;
  sample.held = total[0] * scale;
  for (size_t i = 0; i < grid.size(); ++i) sample.curve.push_back(total[1 + i] * scale);
  return sample;
}

}  // namespace sb
