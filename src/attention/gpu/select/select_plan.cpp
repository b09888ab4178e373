#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>

#include "attention/gpu/select/select.h"
#include "attention/select/staircase.h"
#include "attention/select/vertical_slash.h"
#include "core/errors.h"

namespace sb::gpu {
namespace {

StaircaseRule rule_of(const SelectionConfig& config, int64_t free_quota) {
  const auto kind = config.pattern == SelectionPattern::topp   ? StaircaseRule::Kind::topp
                    : config.pattern == SelectionPattern::mass ? StaircaseRule::Kind::mass
                                                               : StaircaseRule::Kind::topk;
  const int rows = config.order == SelectionOrder::lookahead ? 1 : config.query_block;
  StaircaseRule rule = staircase_rule(kind, free_quota, config.step, rows);
  if (kind == StaircaseRule::Kind::mass) rule.first = rule.total = 2 * free_quota;
  return rule;
}

// The query blocks of one sequence under one key/value head, and what they are scored with.
class SequencePlanner {
 public:
  // `held`: the key blocks whose query blocks are planned; null: those of the sequence's tokens [first_token,
  // end_token).
  SequencePlanner(SelectPlan& plan, const SelectionConfig& config, const SequenceTiles& tiles, int32_t sequence,
                  int head, int32_t begin, int32_t list, const ScoreTile& score, int64_t batch_masses,
                  const std::span<const int32_t>* held, int64_t first_token, int64_t end_token)
      : plan_(plan),
        config_(config),
        tiles_(tiles),
        sequence_(sequence),
        head_(head),
        begin_(begin),
        list_(list),
        score_(score),
        batch_masses_(batch_masses),
        held_(held),
        first_token_(first_token),
        end_token_(end_token),
        most_mass_(config.pattern == SelectionPattern::mass && config.order == SelectionOrder::lookahead),
        statistics_(plan.statistics_rows),
        map_stride_((fine_blocks(end_token) + 15) / 16 * 16) {}

  void add(int64_t& batch_used) {
    if (config_.pattern != SelectionPattern::vertical_slash) add_blocks();
    SelectPool pool;
    pool.first_tile = plan_.pool_tiles;
    pool.tiles = static_cast<int32_t>(tiles_.tiles());
    int64_t lines = 0;  // of the map
    each_tile([&](int64_t tile, int32_t token) {
      SelectItem item = make_item(tile);
      item.map = plan_.map_bytes + lines++ * map_stride_;
      const bool scored = !item.everything && item.total > 0 && tiles_.candidates(tile) > 0;
      if (scored) {
        find_selecting(item);
        item.stride = static_cast<int32_t>((item.competing + 63) / 64 * 64);
        const int64_t needed = static_cast<int64_t>(selecting_.size()) * item.stride;
        if (batch_used > 0 && batch_used + needed > batch_masses_) {
          plan_.batches.push_back(
              {static_cast<int32_t>(plan_.scores.size()), 0, static_cast<int32_t>(plan_.items.size()), 0});
          batch_used = 0;
        }
        item.masses = batch_used;
        add_scores(item, token);
        batch_used += needed;
        if (most_mass_) {
          item.sums = plan_.sums;
          plan_.sums += item.stride;
          pool.wanted += tiles_.wanted(tile);
        }
        plan_.masses = std::max(plan_.masses, batch_used);
        plan_.max_competing = std::max(plan_.max_competing, item.competing);
      }
      plan_.items.push_back(item);
      plan_.sequences[sequence_].given += tiles_.given(tile);
      plan_.sequences[sequence_].wanted += tiles_.wanted(tile);
      plan_.batches.back().item_count = static_cast<int32_t>(plan_.items.size()) - plan_.batches.back().item_begin;
      plan_.batches.back().score_count = static_cast<int32_t>(plan_.scores.size()) - plan_.batches.back().score_begin;
    });
    if (most_mass_) {
      plan_.pools.push_back(pool);
      plan_.pool_tiles += pool.tiles;
    }
    add_columns();
    plan_.map_bytes += lines * map_stride_;
  }

 private:
  int64_t fine_blocks(int64_t tokens) const { return (tokens + plan_.block - 1) / plan_.block; }

  // Calls body(tile, its first token in the packed tensors).
  template <typename Body>
  void each_tile(Body body) const {
    if (held_ == nullptr) {
      for (int64_t tile = first_token_ / tiles_.query_block; tiles_.begin(tile) < end_token_; ++tile)
        body(tile, static_cast<int32_t>(begin_ + tiles_.begin(tile) - first_token_));
      return;
    }
    const int64_t each = tiles_.block / tiles_.query_block;
    for (size_t i = 0; i < held_->size(); ++i) {
      const int64_t first = (*held_)[i] * each, token = begin_ + static_cast<int64_t>(i) * tiles_.block;
      for (int64_t tile = first; tile < std::min(first + each, tiles_.tiles()); ++tile)
        body(tile, static_cast<int32_t>(token + (tile - first) * tiles_.query_block));
    }
  }

  void add_blocks() {
    const int parts = plan_.parts;
    const auto add = [&](int64_t b, int64_t place, int64_t row) {
      plan_.blocks.push_back({static_cast<int32_t>(begin_ + place * tiles_.block),
                              static_cast<int32_t>(std::min<int64_t>(tiles_.block, tiles_.tokens - b * tiles_.block)),
                              head_, static_cast<int32_t>(row)});
    };
    const int64_t first = first_token_ / tiles_.block;
    for (int64_t b = first; b * tiles_.block < end_token_ && held_ == nullptr; ++b)
      add(b, b - first, statistics_ + statistics_row(b, parts));
    for (size_t i = 0; held_ != nullptr && i < held_->size(); ++i)
      add((*held_)[i], static_cast<int64_t>(i), statistics_row(std::ssize(plan_.blocks), parts));
    const int64_t rows = statistics_ + statistics_rows(tiles_.blocks(), parts);
    SB_USER_CHECK(rows < INT32_MAX, "parts of {} keys are too many for this micro-batch; raise attention.score_tokens",
                  plan_.select_block / parts);
    plan_.statistics_rows = static_cast<int32_t>(rows);
  }

  SelectItem make_item(int64_t tile) {
    const int expand = plan_.select_block / plan_.block;
    SelectItem item;
    item.tokens = tiles_.rows(tile);
    item.position = static_cast<int32_t>(tiles_.begin(tile));
    item.competing = static_cast<int32_t>(tiles_.competing(tile));
    item.visible = static_cast<int32_t>(fine_blocks(tiles_.end(tile)));
    item.sinks = std::min(tiles_.sink_blocks, item.competing);
    item.local = std::min(tiles_.local_blocks, item.competing - item.sinks);
    item.sequence = sequence_;
    item.list_begin = plan_.row_offsets.back();
    item.pool = most_mass_ ? static_cast<int32_t>(plan_.pools.size()) : list_;
    const int64_t own = item.visible - int64_t{item.competing} * expand, candidates = tiles_.candidates(tile);
    int64_t seen_by_last = item.competing;
    StaircaseRule rule = rule_of(config_, tiles_.free_quota(tile));
    if (config_.pattern == SelectionPattern::window) {
      const int64_t local = std::max<int64_t>(
          tiles_.local_blocks, tiles_.quota(tile) - (tiles_.visible(tile) - item.competing) - item.sinks);
      item.local = static_cast<int32_t>(std::min<int64_t>(local, item.competing - item.sinks));
      seen_by_last = item.sinks + item.local;
      rule = {};
      rule.first = rule.total = 0;
    } else if (config_.pattern == SelectionPattern::vertical_slash) {
      const int64_t slashes = vertical_slash_limits(config_, tiles_.budget).slash_cap - 1;
      seen_by_last = std::min<int64_t>(
          item.competing, tiles_.forced_competing(tile) + slashes * (tiles_.visible(tile) - item.competing));
    } else if (most_mass_) {
      item.first = item.total = static_cast<int32_t>(candidates);
    } else if (config_.pattern == SelectionPattern::topk && candidates <= rule.total) {
      item.everything = 1;
    } else {
      item.first = static_cast<int32_t>(rule.first);
      item.total = static_cast<int32_t>(rule.total);
      const int64_t allowed = rule.allowed(rule.rows == 1 ? 0 : item.tokens - 1);
      seen_by_last = tiles_.forced_competing(tile) + std::min(allowed, candidates);
    }
    item.capacity = static_cast<int32_t>(seen_by_last * expand + own);
    const int64_t entries = int64_t{plan_.row_offsets.back()} + item.capacity;
    SB_USER_CHECK(entries < INT32_MAX,
                  "the block lists of this micro-batch exceed 2^31 entries; lower attention.budget or the micro-batch");
    plan_.row_offsets.push_back(static_cast<int32_t>(entries));
    plan_.token_pairs += pairs_of(tile, item, rule);
    return item;
  }

  // What each token of the tile computes, all of its allowance used.
  int64_t pairs_of(int64_t tile, const SelectItem& item, const StaircaseRule& rule) const {
    int64_t pairs = 0;
    for (int row = 0; row < item.tokens; ++row) {
      int64_t seen = item.competing;
      if (!item.everything) {
        const int64_t allowed = rule.allowed(rule.rows == 1 ? 0 : row);
        seen = item.sinks + item.local + std::min(allowed, tiles_.candidates(tile));
      }
      pairs += seen * tiles_.block + (tiles_.begin(tile) + row + 1 - int64_t{item.competing} * tiles_.block);
    }
    return pairs;
  }

  // Tokens whose masses are needed: with topk some may have nothing to add.
  void find_selecting(const SelectItem& item) {
    selecting_.clear();
    const bool some = config_.pattern == SelectionPattern::topk && config_.order == SelectionOrder::causal;
    Allowance allowance(item.first, item.total, config_.query_block);
    for (int row = 0; row < item.tokens; ++row, allowance.next())
      if (!some || allowance.grew) selecting_.push_back(row);
  }

  // Query blocks with the same competing key blocks join, or with as many 64s of them.
  void add_scores(const SelectItem& item, int32_t token) {
    const auto left = static_cast<uint16_t>(item.competing - (item.stride - kStatisticsGroup));
    for (size_t i = 0; i < selecting_.size(); ++i) {
      const int32_t at = token + selecting_[i];
      ScoreItem* last = nullptr;
      if (static_cast<int32_t>(plan_.scores.size()) > plan_.batches.back().score_begin) last = &plan_.scores.back();
      if (last == nullptr || last->head != head_ || last->statistics != statistics_ || last->stride != item.stride ||
          (!score_.joins && last->competing != item.competing) || last->tokens == score_.tokens ||
          at - last->token > UINT16_MAX) {
        last = &plan_.scores.emplace_back();
        // What is left over is scored like the first.
        plan_.score_rows.resize(plan_.scores.size() * score_.tokens, {0, left});
        last->token = at;
        last->head = head_;
        last->statistics = statistics_;
        last->stride = item.stride;
        last->masses = item.masses + static_cast<int64_t>(i) * item.stride;
      }
      last->competing = item.competing;
      plan_.score_rows[plan_.score_rows.size() - score_.tokens + last->tokens++] = {
          static_cast<uint16_t>(at - last->token), left};
    }
  }

  void add_columns() {
    const int64_t blocks = fine_blocks(end_token_), own = first_token_ / plan_.block;
    const int64_t query_blocks = (end_token_ - first_token_ + plan_.query_block - 1) / plan_.query_block;
    for (int64_t b = 0; b < blocks && held_ == nullptr; b += kGroupColumns) {
      SelectGroup group;
      group.column = plan_.columns + static_cast<int32_t>(b);
      group.columns = static_cast<int32_t>(std::min<int64_t>(kGroupColumns, blocks - b));
      group.key_block = static_cast<int32_t>(b - own);
      group.first_block = static_cast<int32_t>(std::max<int64_t>(b - own, 0) * plan_.block / plan_.query_block);
      group.query_blocks = static_cast<int32_t>(query_blocks - group.first_block);
      group.stride = static_cast<int32_t>(map_stride_);
      group.map = plan_.map_bytes + b;
      group.block = plan_.block;
      group.query_block = plan_.query_block;
      plan_.groups.push_back(group);
    }
    plan_.columns += static_cast<int32_t>(blocks);
  }

  SelectPlan& plan_;
  const SelectionConfig& config_;
  const SequenceTiles& tiles_;
  int32_t sequence_;
  int head_;
  int32_t begin_, list_;
  ScoreTile score_;
  int64_t batch_masses_;
  const std::span<const int32_t>* held_;
  int64_t first_token_, end_token_;
  bool most_mass_;
  int32_t statistics_;
  int64_t map_stride_;
  std::vector<int> selecting_;
};

// Every score item once for each slice, in each batch the long ones first.
void order_scores(SelectPlan& plan) {
  std::vector<ScoreItem> scores;
  std::vector<ScoreToken> rows;
  scores.reserve(plan.scores.size() * plan.slices);
  rows.reserve(plan.score_rows.size() * plan.slices);
  std::vector<int32_t> order;
  for (SelectBatch& batch : plan.batches) {
    order.resize(batch.score_count);
    std::iota(order.begin(), order.end(), batch.score_begin);
    std::ranges::stable_sort(order, std::greater(), [&](int32_t i) { return plan.scores[i].competing; });
    batch.score_begin = static_cast<int32_t>(scores.size());
    for (const int32_t i : order)
      for (int slice = 0; slice < plan.slices; ++slice) {
        ScoreItem& item = scores.emplace_back(plan.scores[i]);
        item.head = item.head * plan.slices + slice;
        item.masses += slice * plan.masses;
        const auto first = plan.score_rows.begin() + int64_t{i} * plan.score_tokens;
        rows.insert(rows.end(), first, first + plan.score_tokens);
      }
    batch.score_count = static_cast<int32_t>(scores.size()) - batch.score_begin;
  }
  plan.scores = std::move(scores);
  plan.score_rows = std::move(rows);
}

// What a row of the statistics holds, and how many a block has.
void set_statistics(const Shape& shape, const SelectionConfig& config, const ScoreTile& score, SelectPlan& plan) {
  if (config.judges_by_planes()) {
    plan.plane_depth = score.plane_depth > 0 ? score.plane_depth : config.score_channels;
    plan.row_keys = score.row_keys;
    plan.parts = config.block / score.row_keys;
    plan.statistics = 1;
    plan.row_width = plan.plane_depth * plan.row_keys;
    return;
  }
  if (config.scores_blocks()) {
    const BlockScoring scoring(config);
    plan.parts = scoring.parts();
    plan.statistics = plan.parts > 1 && !scoring.moments() ? 1 : 2;
  }
  plan.row_width = plan.statistics * shape.head_dim;
}

}  // namespace

SelectPlan make_select_plan(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
                            const std::vector<SequenceTiles>& tiles, const SelectionConfig& config,
                            const ScoreTile& score, int64_t batch_masses, const HeldBlocks* held, bool piece) {
  const size_t sequences = cu_seqlens.size() - 1;
  SB_CHECK(dense.size() == sequences && tiles.size() == sequences, "{} flags, {} tilings for {} sequences",
           dense.size(), tiles.size(), sequences);
  SB_CHECK(
      held == nullptr || (held->blocks.size() == sequences && config.block % config.query_block == 0 &&
                          !(config.pattern == SelectionPattern::mass && config.order == SelectionOrder::lookahead)),
      "ranks that share sequences select by blocks of their own");
  SB_CHECK(!piece || (sequences == 1 && held == nullptr && shape.first_query % config.block == 0 &&
                      shape.first_query % config.query_block == 0),
           "a piece from token {} on, with blocks of {} and query blocks of {}", shape.first_query, config.block,
           config.query_block);
  SelectPlan plan;
  plan.list_heads = config.lists_per_query_head() ? shape.query_heads : shape.kv_heads;
  plan.query_block = config.query_block;
  plan.select_block = config.block;
  plan.block = std::min(config.block, kBlock);
  plan.slices = score.slices;
  plan.score_tokens = score.tokens;
  set_statistics(shape, config, score, plan);
  for (size_t s = 0; s < sequences; ++s) {
    plan.sequences.push_back({tiles[s]});
    plan.mass_classes.push_back(config.learns_thresholds() && !dense[s] ? mass_class(mass_key(0, tiles[s])) : 0);
    plan.rows += static_cast<int32_t>((cu_seqlens[s + 1] - cu_seqlens[s] + plan.query_block - 1) / plan.query_block);
  }
  plan.row_offsets.push_back(0);
  plan.batches.emplace_back();
  int64_t batch_used = 0;
  for (int32_t head = 0; head < plan.list_heads; ++head) {
    int32_t sparse = 0;
    for (size_t s = 0; s < sequences; ++s) {
      const SequenceTiles& t = tiles[s];
      const int32_t tokens = cu_seqlens[s + 1] - cu_seqlens[s];
      SB_CHECK((held != nullptr || piece || t.tokens == tokens) && t.block == config.block &&
                   t.query_block == plan.query_block,
               "tiling of sequence {} does not match", s);
      if (dense[s]) {
        plan.row_offsets.insert(plan.row_offsets.end(), (tokens + plan.query_block - 1) / plan.query_block,
                                plan.row_offsets.back());
        const auto blocks = static_cast<int32_t>((t.tokens + plan.block - 1) / plan.block);
        for (int32_t b = 0; b < blocks && held == nullptr; b += kGroupColumns) {
          SelectGroup group;
          group.column = plan.columns + b;
          group.columns = std::min(kGroupColumns, blocks - b);
          plan.groups.push_back(group);
        }
        plan.columns += blocks;
        if (held == nullptr) plan.token_pairs += t.tokens * (t.tokens + 1) / 2;
        continue;
      }
      SB_USER_CHECK(t.blocks() <= 65536, "a sequence of {} tokens has more than 65,536 blocks of {}; use larger blocks",
                    t.tokens, t.block);
      SequencePlanner(plan, config, t, static_cast<int32_t>(s), head, cu_seqlens[s], sparse++ * plan.list_heads + head,
                      score, batch_masses / score.slices, held == nullptr ? nullptr : &held->blocks[s],
                      shape.first_query, piece ? shape.keys() : t.tokens)
          .add(batch_used);
    }
  }
  plan.entries = plan.row_offsets.back();
  order_scores(plan);
  for (const SelectBatch& batch : plan.batches)
    std::stable_sort(plan.items.begin() + batch.item_begin, plan.items.begin() + batch.item_begin + batch.item_count,
                     [](const SelectItem& a, const SelectItem& b) { return a.competing > b.competing; });
  return plan;
}

void set_plan(const SelectPlan& plan, SelectParams& params) {
  params.query_block = plan.query_block;
  params.select_block = plan.select_block;
  params.block = plan.block;
  params.max_competing = plan.max_competing;
  params.slices = plan.slices;
  params.slice_masses = plan.masses;
  params.parts = plan.parts;
  params.statistics_channels = plan.statistics;
  params.statistics_rows = plan.statistics_rows;
  params.row_width = plan.row_width;
  params.plane_depth = plan.plane_depth;
  params.row_keys = plan.row_keys;
  params.batches = plan.batches;
  params.column_count = plan.columns;
  params.pool_tiles = plan.pool_tiles;
}

int mass_class(const MassKey& key) {
  return std::clamp(key.length_class, 0, 31) * 64 + std::clamp(key.budget_class, 0, 63);
}

std::vector<int32_t> plane_samples(std::span<const int32_t> cu_seqlens) {
  std::vector<int32_t> samples;
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s)
    for (int64_t token = cu_seqlens[s]; token < cu_seqlens[s + 1]; token += kPlaneSampling)
      samples.push_back(static_cast<int32_t>(token));
  return samples;
}

}  // namespace sb::gpu
