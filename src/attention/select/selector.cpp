#include "attention/select/selector.h"

#include <algorithm>
#include <atomic>

#include "attention/select/by_mass.h"
#include "core/errors.h"

namespace sb {
namespace {

// Tiles with the same competing blocks go together, so that one product scores all tokens of a key block.
struct Chunks {
  explicit Chunks(const SelectionRequest& request)
      : tiles_per_chunk(std::max(1, request.tiles.block / request.tiles.query_block)),
        first(request.begin / (tiles_per_chunk * request.tiles.query_block)),
        count((last_tile(request) + tiles_per_chunk - 1) / tiles_per_chunk - first) {
    SB_CHECK(request.begin % (tiles_per_chunk * request.tiles.query_block) == 0, "a piece from token {} on",
             request.begin);
  }
  static int64_t last_tile(const SelectionRequest& request) {
    return (request.last() + request.tiles.query_block - 1) / request.tiles.query_block;
  }
  int64_t tiles_per_chunk, first, count;
};

}  // namespace

SequenceTiles sequence_tiles(const SelectionConfig& config, int64_t tokens, int64_t budget) {
  SequenceTiles tiles;
  tiles.tokens = tokens;
  tiles.block = config.block;
  tiles.query_block = config.query_block;
  tiles.sink_blocks = config.sink_blocks;
  tiles.local_blocks = config.local_blocks;
  tiles.budget = budget;
  return tiles;
}

bool runs_dense(const SelectionConfig& config, int layer, const SequenceTiles& tiles) {
  return config.pattern == SelectionPattern::dense || tiles.tokens <= config.dense_limit() || tiles.everything_fits() ||
         std::find(config.dense_layers.begin(), config.dense_layers.end(), layer) != config.dense_layers.end();
}

Selector::Selector(const SelectionConfig& config) : config_(config) {
  check_selection_config(config);
}

MassCounts Selector::select(const Exec& exec, const SelectionRequest& request, BlockIndexBuilder& builder) const {
  const SequenceTiles& tiles = request.tiles;
  SB_USER_CHECK(tiles.blocks() <= 65536, "a sequence of {} tokens has more than 65,536 blocks of {}; use larger blocks",
                tiles.tokens, tiles.block);
  SB_CHECK(request.end < 0 || !selection_looks_ahead(config_), "this pattern needs whole sequences");
  switch (config_.pattern) {
    case SelectionPattern::vertical_slash:
      select_vertical_slash(exec, request, builder);
      return {};
    case SelectionPattern::topk:
      return select_by_scores(exec, request, StaircaseRule::Kind::topk, builder);
    case SelectionPattern::topp:
      return select_by_scores(exec, request, StaircaseRule::Kind::topp, builder);
    case SelectionPattern::mass:
      if (config_.order == SelectionOrder::causal)
        return select_by_scores(exec, request, StaircaseRule::Kind::mass, builder);
      select_most_mass(exec, request, builder);
      return {};
    case SelectionPattern::window: {
      std::vector<IndexEntry> row;
      for (int64_t tile = request.begin / tiles.query_block; tile < Chunks::last_tile(request); ++tile) {
        row.clear();
        select_window(tiles, tile, row);
        for (int head = 0; head < request.shape.kv_heads; ++head) {
          builder.set_row(0, BlockIndex::row_id(request.place, head, static_cast<int>(tile)), row);
        }
      }
      return {};
    }
    case SelectionPattern::dense:
      break;
  }
  throw InternalError("dense attention makes no lists");
}

MassCounts Selector::select_held(const Exec& exec, const SelectionRequest& request, BlockIndexBuilder& builder) const {
  const SequenceTiles& tiles = request.tiles;
  SB_CHECK(tiles.block % tiles.query_block == 0, "query blocks of {} across blocks of {}", tiles.query_block,
           tiles.block);
  if (request.held_blocks.empty()) return {};
  switch (config_.pattern) {
    case SelectionPattern::topk:
      return select_by_scores(exec, request, StaircaseRule::Kind::topk, builder);
    case SelectionPattern::topp:
      return select_by_scores(exec, request, StaircaseRule::Kind::topp, builder);
    case SelectionPattern::mass:
      SB_CHECK(config_.order == SelectionOrder::causal, "the best pairs of a whole sequence need all of it");
      return select_by_scores(exec, request, StaircaseRule::Kind::mass, builder);
    default:
      throw InternalError("this pattern is not selected by scores");
  }
}

MassCounts Selector::select_by_scores(const Exec& exec, const SelectionRequest& request, StaircaseRule::Kind kind,
                                      BlockIndexBuilder& builder) const {
  const SequenceTiles& tiles = request.tiles;
  const bool lookahead = config_.order == SelectionOrder::lookahead;
  Chunks chunks(request);
  const bool shared = !request.held_blocks.empty();
  if (shared) chunks.count = std::ssize(request.held_blocks);
  std::atomic<int64_t> selected = 0, wanted = 0;
  struct Worker {
    BlockScorer scorer;
    Staircase staircase;
    std::vector<IndexEntry> row;
  };
  const BlockScorer scorer(request.shape, BlockScoring(config_), request.q, request.statistics, tiles.blocks(), 0,
                           request.planes);
  std::vector<Worker> workers(exec.pool->threads(), Worker{scorer, {}, {}});
  exec.pool->parallel_for(chunks.count * request.shape.kv_heads, 1, [&](int64_t item, int64_t, int thread) {
    // The last chunk has the most blocks: it goes first.
    const int64_t place = chunks.count - 1 - item / request.shape.kv_heads;
    const int64_t chunk = shared ? request.held_blocks[place] : chunks.first + place;
    const int head = static_cast<int>(item % request.shape.kv_heads);
    const int64_t first = chunk * chunks.tiles_per_chunk,
                  last = std::min(Chunks::last_tile(request), first + chunks.tiles_per_chunk);
    const int64_t competing = tiles.competing(first);

    bool needed = false;
    for (int64_t tile = first; tile < last; ++tile) {
      needed = needed || tiles.candidates(tile) > (kind == StaircaseRule::Kind::topk ? tiles.free_quota(tile) : 0);
    }
    Worker& worker = workers[thread];
    worker.scorer.set_first_token(shared ? (chunk - place) * tiles.block : request.begin);
    std::vector<IndexEntry>& row = worker.row;
    const float* masses = nullptr;
    if (needed) {
      masses = lookahead ? worker.scorer.tile_masses(head, tiles, first, last, competing)
                         : worker.scorer.token_masses(head, tiles.begin(first), tiles.end(last - 1), competing);
    }
    for (int64_t tile = first; tile < last; ++tile) {
      row.clear();
      if (!needed) {
        select_everything(tiles, tile, row);
      } else {
        const int64_t mass_row = lookahead ? tile - first : tiles.begin(tile) - tiles.begin(first);
        worker.staircase.select(tiles, tile,
                                {masses + mass_row * competing, competing, lookahead ? 1 : tiles.rows(tile), competing},
                                rule(kind, tiles, tile, request.threshold), row);
      }
      builder.set_row(thread, BlockIndex::row_id(request.place, head, static_cast<int>(tile)), row);
      selected.fetch_add(std::ssize(row) - tiles.given(tile), std::memory_order_relaxed);
      wanted.fetch_add(tiles.wanted(tile), std::memory_order_relaxed);
    }
  });
  return {selected, wanted};
}

void Selector::select_most_mass(const Exec& exec, const SelectionRequest& request, BlockIndexBuilder& builder) const {
  const SequenceTiles& tiles = request.tiles;
  const Chunks chunks(request);
  const int64_t pairs = wanted_blocks(tiles);
  exec.pool->parallel_for(request.shape.kv_heads, 1, [&](int64_t head, int64_t, int thread) {
    std::vector<std::vector<float>> masses(tiles.tiles());
    BlockScorer scorer(request.shape, BlockScoring(config_), request.q, request.statistics, tiles.blocks(), 0,
                       request.planes);
    for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
      const int64_t first = chunk * chunks.tiles_per_chunk,
                    last = std::min(tiles.tiles(), first + chunks.tiles_per_chunk);
      const int64_t competing = tiles.competing(first);
      if (competing == 0) continue;
      const float* found = scorer.tile_masses(static_cast<int>(head), tiles, first, last, competing);
      for (int64_t tile = first; tile < last; ++tile) {
        masses[tile].assign(found + (tile - first) * competing, found + (tile - first + 1) * competing);
      }
    }
    const std::vector<std::vector<IndexEntry>> rows = most_mass_rows(tiles, masses, pairs);
    for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
      builder.set_row(thread, BlockIndex::row_id(request.place, static_cast<int>(head), static_cast<int>(tile)),
                      rows[tile]);
    }
  });
}

StaircaseRule Selector::rule(StaircaseRule::Kind kind, const SequenceTiles& tiles, int64_t tile,
                             float threshold) const {
  const int64_t free_quota = tiles.free_quota(tile);
  StaircaseRule rule = staircase_rule(kind, free_quota, config_.step,
                                      config_.order == SelectionOrder::lookahead ? 1 : config_.query_block);
  rule.coverage = config_.coverage;
  if (kind == StaircaseRule::Kind::mass) {
    // The threshold decides; floor and cap keep a tile from starving or from taking everything.
    rule.threshold = threshold;
    rule.floor = (free_quota + 3) / 4;
    rule.first = rule.total = 2 * free_quota;
  }
  return rule;
}

void Selector::select_tile(const SelectionRequest& request, int head, int64_t tile, BlockScorer& scorer,
                           std::vector<IndexEntry>& row) const {
  const SequenceTiles& tiles = request.tiles;
  if (config_.pattern == SelectionPattern::window) return select_window(tiles, tile, row);
  SB_CHECK(config_.order == SelectionOrder::causal && !config_.lists_per_query_head(), "pattern looks ahead");
  const auto kind = config_.pattern == SelectionPattern::topk   ? StaircaseRule::Kind::topk
                    : config_.pattern == SelectionPattern::topp ? StaircaseRule::Kind::topp
                                                                : StaircaseRule::Kind::mass;
  const int64_t competing = tiles.competing(tile);
  if (tiles.candidates(tile) == 0) return select_everything(tiles, tile, row);
  const float* masses = scorer.token_masses(head, tiles.begin(tile), tiles.end(tile), competing);
  Staircase().select(tiles, tile, {masses, competing, tiles.rows(tile), competing},
                     rule(kind, tiles, tile, request.threshold), row);
}

std::vector<std::vector<IndexEntry>> most_mass_rows(const SequenceTiles& tiles,
                                                    const std::vector<std::vector<float>>& masses, int64_t pairs) {
  struct Pair {
    float mass;
    int32_t tile, block;
    int64_t place() const { return int64_t{tile} << 32 | block; }
  };
  std::vector<Pair> candidates;
  for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
    for (int64_t j = 0; j < tiles.competing(tile); ++j) {
      if (!tiles.forced(tile, j)) {
        candidates.push_back({masses[tile][j], static_cast<int32_t>(tile), static_cast<int32_t>(j)});
      }
    }
  }
  pairs = std::min<int64_t>(pairs, static_cast<int64_t>(candidates.size()));
  std::nth_element(candidates.begin(), candidates.begin() + pairs, candidates.end(),
                   [](const Pair& a, const Pair& b) { return selected_before(a.mass, a.place(), b.mass, b.place()); });
  std::vector<std::vector<IndexEntry>> rows(tiles.tiles());
  for (int64_t i = 0; i < pairs; ++i) {
    rows[candidates[i].tile].push_back({static_cast<uint16_t>(candidates[i].block), 0});
  }
  for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
    for (int64_t j = 0; j < tiles.visible(tile); ++j) {
      if (tiles.forced(tile, j)) rows[tile].push_back({static_cast<uint16_t>(j), 0});
    }
    std::sort(rows[tile].begin(), rows[tile].end(),
              [](const IndexEntry& a, const IndexEntry& b) { return a.block < b.block; });
  }
  return rows;
}

}  // namespace sb
