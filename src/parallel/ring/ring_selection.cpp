#include "parallel/ring/ring_selection.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/select/vertical_slash.h"
#include "core/errors.h"
#include "device/blas.h"

namespace sb {
namespace {

// Of vertical_slash, heads whose masses are exchanged together: few enough that the masses of all columns, which every
// rank has whole, shrink with the number of ranks as everything else does.
int64_t heads_at_once(int heads, int ranks) {
  return (heads + ranks - 1) / ranks;  // the same on all ranks, however many threads each has
}

// Zeros, in scratch.
template <typename T>
std::span<T> array(const Exec& exec, int64_t count) {
  T* data = exec.scratch->allocate_array<T>(count);
  std::fill_n(data, count, T{});
  return {data, static_cast<size_t>(count)};
}

}  // namespace

RingSelection::RingSelection(const SelectionConfig& config, int layers)
    : selector_(config), step_(config, layers), cut_(static_cast<size_t>(layers)) {
  SB_USER_CHECK(config.block % config.query_block == 0,
                "attention.query_block: {} does not divide attention.block {}, as it must when ranks share sequences "
                "(parallel.cp); use {}",
                config.query_block, config.block, 16);
}

void RingSelection::select(const Exec& exec, Communicator& group, int layer, const AttentionShape& shape,
                           const ContextLayout& layout, std::span<const int32_t> budgets, const float* q,
                           const float* k, BlockIndex& index) {
  const SelectionConfig& config = selector_.config();
  const int rank = group.rank();
  const std::vector<int32_t> local = layout.local_cu_seqlens(rank);
  for (int s = 0; step_.by_planes() && s < layout.sequences(); ++s)
    step_.add(layer, measure_planes(exec, shape, q + int64_t{local[s]} * shape.heads * shape.head_dim,
                                    k + int64_t{local[s]} * shape.kv_heads * shape.head_dim, local[s + 1] - local[s]));
  const auto tiles_of = [&](int s) {
    return sequence_tiles(config, layout.length(s), budgets.empty() ? config.budget : budgets[s]);
  };
  std::vector<uint8_t> dense(layout.sequences());
  for (int s = 0; s < layout.sequences(); ++s) dense[s] = runs_dense(config, layer, tiles_of(s));
  builder_.begin(index, {config.block, config.query_block, selector_.list_heads(shape)}, layout.cu_seqlens(), dense,
                 exec.pool->threads());
  const bool all_dense = std::all_of(dense.begin(), dense.end(), [](uint8_t d) { return d != 0; });
  const LayerPlanes* planes = all_dense ? nullptr : step_.planes(layer, shape);
  const bool most_mass = config.pattern == SelectionPattern::mass && config.order == SelectionOrder::lookahead;
  const ArenaScope scope(*exec.scratch);
  std::vector<const float*> statistics;
  if (config.scores_blocks() && !all_dense) {
    std::vector<uint8_t> wanted(dense.size());
    for (size_t s = 0; s < dense.size(); ++s) wanted[s] = dense[s] == 0;
    statistics = gather_statistics(exec, group, shape, layout, wanted, k, planes);
  }

  for (int s = 0; s < layout.sequences(); ++s) {
    if (dense[s]) continue;
    SelectionRequest request;
    request.layer = layer;
    request.shape = shape;
    request.tiles = tiles_of(s);
    request.threshold = step_.threshold(layer, request.tiles);
    request.planes = planes;
    request.q = q + int64_t{local[s]} * shape.heads * shape.head_dim;
    request.k = k + int64_t{local[s]} * shape.kv_heads * shape.head_dim;
    request.place = index.sequences()[s];
    request.held_blocks = layout.held(rank, s);
    SB_USER_CHECK(request.tiles.blocks() <= 65536,
                  "a sequence of {} tokens has more than 65,536 blocks of {}; use larger blocks", request.tiles.tokens,
                  request.tiles.block);
    if (config.pattern == SelectionPattern::window) {
      select_window_rows(request);
    } else if (config.pattern == SelectionPattern::vertical_slash) {
      select_vertical_slash_rows(exec, group, request, layout, s);
    } else {
      request.statistics = statistics[s];
      if (most_mass)
        select_most_mass_rows(exec, group, request);
      else
        step_.count(layer, request.tiles, selector_.select_held(exec, request, builder_));
    }
  }
  builder_.finish(*exec.pool);
}

std::vector<const float*> RingSelection::gather_statistics(const Exec& exec, Communicator& group,
                                                           const AttentionShape& shape, const ContextLayout& layout,
                                                           std::span<const uint8_t> wanted, const float* k,
                                                           const LayerPlanes* planes) {
  const SelectionConfig& config = selector_.config();
  const BlockScoring scoring(config);
  const int64_t width = scoring.block_floats(shape.head_dim);
  // Pieces of equal size: the most blocks any rank has.
  std::vector<int64_t> blocks(layout.ranks());
  for (int r = 0; r < layout.ranks(); ++r)
    for (int s = 0; s < layout.sequences(); ++s)
      if (wanted[s]) blocks[r] += std::ssize(layout.held(r, s));
  const int64_t piece = *std::max_element(blocks.begin(), blocks.end()) * shape.kv_heads * width;
  std::vector<float*> statistics(layout.sequences(), nullptr);
  for (int s = 0; s < layout.sequences(); ++s)
    if (wanted[s])
      statistics[s] = exec.scratch->allocate_array<float>(BlockStatistics::floats(scoring, shape, layout.blocks(s)));
  const ArenaScope scope(*exec.scratch);
  const std::span<float> all(exec.scratch->allocate_array<float>(piece * layout.ranks()),
                             static_cast<size_t>(piece * layout.ranks()));

  const std::vector<int32_t> local = layout.local_cu_seqlens(group.rank());
  float* own = all.data() + group.rank() * piece;
  for (int s = 0; s < layout.sequences(); ++s) {
    if (!wanted[s]) continue;
    BlockStatistics::fill(exec, shape, scoring, k + int64_t{local[s]} * shape.kv_heads * shape.head_dim,
                          local[s + 1] - local[s], own, planes);
    own += std::ssize(layout.held(group.rank(), s)) * shape.kv_heads * width;
  }
  group.all_gather(all, piece);

  // [rank][sequence][kv head][its blocks] becomes [sequence][kv head][blocks].
  for (int r = 0; r < layout.ranks(); ++r) {
    const float* source = all.data() + r * piece;
    for (int s = 0; s < layout.sequences(); ++s) {
      if (!wanted[s]) continue;
      for (int head = 0; head < shape.kv_heads; ++head)
        for (const int32_t b : layout.held(r, s)) {
          std::memcpy(statistics[s] + (head * layout.blocks(s) + b) * width, source, width * sizeof(float));
          source += width;
        }
    }
  }
  return {statistics.begin(), statistics.end()};
}

int64_t RingSelection::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int ranks) const {
  const SelectionConfig& config = selector_.config();
  const auto bytes = [](int64_t count, size_t each) { return Arena::rounded(count * static_cast<int64_t>(each)); };
  const int64_t all = max_tokens * ranks, sequences = all / (config.dense_limit() + 1);  // that are not dense
  switch (config.pattern) {
    case SelectionPattern::dense:
    case SelectionPattern::window:
      return 0;
    case SelectionPattern::vertical_slash: {
      // One sequence at a time.
      const int64_t heads = heads_at_once(shape.heads, ranks), rows = kEstimationQueries;
      return bytes(max_tokens, sizeof(int32_t)) + bytes(rows * shape.heads * shape.head_dim, sizeof(float)) +
             bytes(heads * rows * max_tokens, sizeof(float)) + bytes(heads * rows, sizeof(float)) +
             bytes(heads * rows, sizeof(double)) + bytes(heads * all, sizeof(double)) +
             bytes(heads * (all / config.block + 1), sizeof(double));
    }
    default: {
      // Every sequence may have a short block, and all sequences' may be on one rank.
      const int64_t blocks = max_tokens / config.block + sequences;
      const int64_t floats = BlockStatistics::floats(BlockScoring(config), shape, blocks * ranks);
      return bytes(floats, sizeof(float)) + sequences * Arena::kAlignment + bytes(floats, sizeof(float));
    }
  }
}

void RingSelection::select_window_rows(const SelectionRequest& request) {
  const SequenceTiles& tiles = request.tiles;
  std::vector<IndexEntry> row;
  const int64_t tiles_a_block = tiles.block / tiles.query_block;
  for (const int32_t b : request.held_blocks)
    for (int64_t tile = b * tiles_a_block; tile < std::min((b + 1) * tiles_a_block, tiles.tiles()); ++tile) {
      row.clear();
      select_window(tiles, tile, row);
      for (int head = 0; head < request.shape.kv_heads; ++head)
        builder_.set_row(0, BlockIndex::row_id(request.place, head, static_cast<int>(tile)), row);
    }
}

namespace {

// The last queries of a sequence, and the keys that this rank holds of it. In scratch.
struct LastQueries {
  std::span<const int32_t> position;  // of every key held here
  std::span<const float> queries;     // [row, head, head_dim]
  std::vector<int64_t> seen;          // by row: how many keys it sees, which are a prefix of those held

  int64_t rows() const { return std::ssize(seen); }
  int64_t held() const { return std::ssize(position); }
};

// Heads that are worked on together.
struct HeadRange {
  int64_t first, count;
};

std::span<const int32_t> held_positions(const Exec& exec, const SelectionRequest& request, const ContextLayout& layout,
                                        int s) {
  int64_t held = 0;
  for (const int32_t b : request.held_blocks) held += layout.block_length(s, b);
  const std::span<int32_t> position = array<int32_t>(exec, held);
  for (int64_t i = 0; const int32_t b : request.held_blocks)
    for (int64_t t = 0; t < layout.block_length(s, b); ++t)
      position[i++] = static_cast<int32_t>(int64_t{b} * request.tiles.block + t);
  return position;
}

LastQueries gather_last_queries(const Exec& exec, Communicator& group, const SelectionRequest& request,
                                const ContextLayout& layout, int s) {
  const int64_t tokens = request.tiles.tokens, rows = std::min<int64_t>(kEstimationQueries, tokens);
  const int64_t width = int64_t{request.shape.heads} * request.shape.head_dim;
  const std::span<const int32_t> position = held_positions(exec, request, layout, s);
  const std::span<float> queries = array<float>(exec, rows * width);
  for (int64_t i = 0; i < std::ssize(position); ++i)
    if (position[i] >= tokens - rows)
      std::memcpy(queries.data() + (position[i] - (tokens - rows)) * width, request.q + i * width,
                  width * sizeof(float));
  group.all_reduce(queries);  // one rank has each, the others zeros
  std::vector<int64_t> seen(rows);
  for (int64_t r = 0; r < rows; ++r)
    seen[r] = std::upper_bound(position.begin(), position.end(), tokens - rows + r) - position.begin();
  return {position, queries, std::move(seen)};
}

// How much the held keys weigh in the softmax of each row.
struct HeldWeights {
  std::span<float> map;    // [head, row, key], by the row's largest of all ranks
  std::span<double> sums;  // [head, row], of all ranks
};

// Products of queries and held keys into `map`, and the largest of each row on this rank into `top`.
void multiply_held(const Exec& exec, const SelectionRequest& request, const LastQueries& last, const HeadRange& heads,
                   std::span<float> map, std::span<float> top) {
  const AttentionShape& shape = request.shape;
  const int64_t rows = last.rows(), held = last.held(), d = shape.head_dim;
  exec.pool->parallel_for(heads.count, 1, [&](int64_t i, int64_t, int) {
    if (held == 0) return;
    float* head_map = map.data() + i * rows * held;
    sgemm({.transpose_b = true,
           .m = rows,
           .n = held,
           .k = d,
           .a = last.queries.data() + (heads.first + i) * d,
           .lda = shape.heads * d,
           .b = request.k + (heads.first + i) / shape.group() * d,
           .ldb = int64_t{shape.kv_heads} * d,
           .c = head_map,
           .ldc = held});
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t m = 0; m < last.seen[r]; ++m)
        top[i * rows + r] = std::max(top[i * rows + r], head_map[r * held + m]);
  });
}

HeldWeights weigh_held(const Exec& exec, Communicator& group, const SelectionRequest& request, const LastQueries& last,
                       const HeadRange& heads) {
  const int64_t rows = last.rows(), held = last.held();
  const float scale = request.shape.scale;
  const std::span<float> map = array<float>(exec, heads.count * rows * held),
                         top = array<float>(exec, heads.count * rows);
  std::fill(top.begin(), top.end(), -std::numeric_limits<float>::infinity());
  multiply_held(exec, request, last, heads, map, top);
  group.all_reduce(top, ReduceOp::max);
  const std::span<double> sums = array<double>(exec, heads.count * rows);
  exec.pool->parallel_for(heads.count, 1, [&](int64_t i, int64_t, int) {
    for (int64_t r = 0; r < rows; ++r) {
      float* row = map.data() + (i * rows + r) * held;
      for (int64_t m = 0; m < last.seen[r]; ++m) {
        row[m] = std::exp(scale * (row[m] - top[i * rows + r]));
        sums[i * rows + r] += row[m];
      }
    }
  });
  group.all_reduce(sums);
  return {map, sums};
}

// The masses of all columns and distances, of all ranks.
struct LineMasses {
  std::span<const double> columns, distances;  // [head, token] and [head, block]
};

LineMasses line_masses(const Exec& exec, Communicator& group, const SequenceTiles& tiles, const LastQueries& last,
                       const HeldWeights& weights, int64_t heads) {
  const int64_t tokens = tiles.tokens, blocks = tiles.blocks(), rows = last.rows(), held = last.held();
  const int block = tiles.block;
  const std::span<double> columns = array<double>(exec, heads * tokens),
                          distances = array<double>(exec, heads * blocks);
  exec.pool->parallel_for(heads, 1, [&](int64_t i, int64_t, int) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = weights.map.data() + (i * rows + r) * held;
      const int64_t query_block = (tokens - rows + r) / block;
      for (int64_t m = 0; m < last.seen[r]; ++m) {
        const auto mass = static_cast<float>(row[m] / weights.sums[i * rows + r]);
        columns[i * tokens + last.position[m]] += mass;
        distances[i * blocks + query_block - last.position[m] / block] += mass;
      }
    }
  });
  group.all_reduce(columns);  // again: one rank has each
  group.all_reduce(distances);
  return {columns, distances};
}

// Those of the query blocks that this rank holds.
void set_vertical_slash_rows(const Exec& exec, const SelectionRequest& request, const VerticalSlashLimits& limits,
                             const LineMasses& masses, const HeadRange& heads, BlockIndexBuilder& builder) {
  const SequenceTiles& tiles = request.tiles;
  const int64_t tokens = tiles.tokens, blocks = tiles.blocks(), tiles_a_block = tiles.block / tiles.query_block;
  exec.pool->parallel_for(heads.count, 1, [&](int64_t i, int64_t, int thread) {
    const VerticalSlash found = select_vertical_slash(masses.columns.subspan(i * tokens, tokens),
                                                      masses.distances.subspan(i * blocks, blocks), limits);
    const auto head = static_cast<int>(heads.first + i);
    std::vector<uint8_t> listed;
    std::vector<IndexEntry> row;
    std::vector<int32_t> single;
    for (const int32_t b : request.held_blocks)
      for (int64_t tile = b * tiles_a_block; tile < std::min((b + 1) * tiles_a_block, tiles.tiles()); ++tile) {
        vertical_slash_row(tiles, found, tile, listed, row, single);
        builder.set_row(thread, BlockIndex::row_id(request.place, head, static_cast<int>(tile)), row, single);
      }
  });
}

}  // namespace

// The last queries go to all ranks; each computes its part of their attention. Row maxima and sums, then the masses of
// columns and distances, are all that is exchanged; for some heads at a time, so that it takes little memory.
void RingSelection::select_vertical_slash_rows(const Exec& exec, Communicator& group, const SelectionRequest& request,
                                               const ContextLayout& layout, int s) {
  const ArenaScope scope(*exec.scratch);
  const LastQueries last = gather_last_queries(exec, group, request, layout, s);
  const VerticalSlashLimits limits = vertical_slash_limits(selector_.config(), request.tiles.budget);
  const int64_t heads = request.shape.heads, at_once = heads_at_once(request.shape.heads, layout.ranks());
  for (int64_t first = 0; first < heads; first += at_once) {
    const HeadRange range{first, std::min(at_once, heads - first)};
    const ArenaScope heads_scope(*exec.scratch);
    const HeldWeights weights = weigh_held(exec, group, request, last, range);
    const LineMasses masses = line_masses(exec, group, request.tiles, last, weights, range.count);
    set_vertical_slash_rows(exec, request, limits, masses, range, builder_);
  }
}

}  // namespace sb
