#include "attention/select/staircase.h"

#include <algorithm>
#include <cmath>

#include "attention/select/by_mass.h"
#include "core/errors.h"

namespace sb {
namespace {

constexpr uint8_t kUnselected = 255;

void append(std::vector<IndexEntry>& out, int64_t block, int first_row) {
  out.push_back({static_cast<uint16_t>(block), static_cast<uint8_t>(first_row)});
}

struct ByMass {
  const float* masses;
  bool operator()(int32_t a, int32_t b) const { return selected_before(masses[a], a, masses[b], b); }
};

// How far down its masses a token goes.
struct Goal {
  double held = 0, wanted = 2;  // topp: of the mass; a token that wants more than there is never has enough
  float least = -INFINITY;      // mass: nothing below it is worth selecting

  bool open() const { return held < wanted; }
};

Goal goal_of(const StaircaseRule& rule, const float* mass, std::span<const uint8_t> first_row) {
  Goal goal;
  if (rule.kind == StaircaseRule::Kind::mass) goal.least = rule.threshold;
  if (rule.kind != StaircaseRule::Kind::topp) return goal;
  double all = 0;
  for (size_t j = 0; j < first_row.size(); ++j) {
    const double m = std::exp(static_cast<double>(mass[j]));
    all += m;
    if (first_row[j] != kUnselected) goal.held += m;
  }
  goal.wanted = rule.coverage * all;
  return goal;
}

// At most `room` blocks that no token selected yet, those of the largest masses, in this order; they lie in `order`.
std::span<const int32_t> best_unselected(const float* mass, std::span<const uint8_t> first_row, int64_t room,
                                         std::vector<int32_t>& order) {
  order.clear();
  for (size_t j = 0; j < first_row.size(); ++j) {
    if (first_row[j] == kUnselected) order.push_back(static_cast<int32_t>(j));
  }
  const int64_t count = std::min<int64_t>(room, std::ssize(order));
  // Later tokens mostly have room for one.
  if (count == 1) {
    std::iter_swap(order.begin(), std::min_element(order.begin(), order.end(), ByMass{mass}));
  } else {
    std::partial_sort(order.begin(), order.begin() + count, order.end(), ByMass{mass});
  }
  return std::span(order).first(static_cast<size_t>(count));
}

}  // namespace

StaircaseRule staircase_rule(StaircaseRule::Kind kind, int64_t free_quota, int step, int query_block) {
  StaircaseRule rule;
  rule.kind = kind;
  rule.rows = query_block;
  rule.total = free_quota;
  // Small quotas cannot give every token its step: half stays with the first token, the rest is spread.
  const int64_t later = std::min<int64_t>(int64_t{step} * (query_block - 1), free_quota / 2);
  rule.first = free_quota - later;
  return rule;
}

void Staircase::select(const SequenceTiles& tiles, int64_t tile, const BlockMasses& masses, const StaircaseRule& rule,
                       std::vector<IndexEntry>& out) {
  const int64_t competing = tiles.competing(tile);
  if (tiles.candidates(tile) <= rule.total && rule.kind == StaircaseRule::Kind::topk) {
    select_everything(tiles, tile, out);
    return;
  }
  SB_CHECK(masses.count == competing && masses.rows == (rule.rows == 1 ? 1 : tiles.rows(tile)),
           "masses of {} rows and {} blocks for tile {} of {} rows and {} blocks", masses.rows, masses.count, tile,
           tiles.rows(tile), competing);
  first_row_.assign(competing, kUnselected);
  for (int64_t j = 0; j < competing; ++j) {
    if (tiles.forced(tile, j)) first_row_[j] = 0;
  }

  int64_t selected = 0;
  for (int row = 0; row < masses.rows; ++row) {
    const int64_t room = std::min(rule.allowed(row), tiles.candidates(tile)) - selected;
    if (room <= 0) continue;
    const float* mass = masses.row(row);
    Goal goal = goal_of(rule, mass, first_row_);
    if (!goal.open()) continue;
    for (const int32_t j : best_unselected(mass, first_row_, room, order_)) {
      const bool below = mass[j] < goal.least;
      if (!goal.open() || (below && !(row == 0 && selected < rule.floor))) break;
      first_row_[j] = static_cast<uint8_t>(row);
      if (rule.kind == StaircaseRule::Kind::topp) goal.held += std::exp(static_cast<double>(mass[j]));
      ++selected;
    }
  }

  for (int64_t j = 0; j < competing; ++j) {
    if (first_row_[j] != kUnselected) append(out, j, first_row_[j]);
  }
  for (int64_t j = competing; j < tiles.visible(tile); ++j) append(out, j, 0);
}

void select_window(const SequenceTiles& tiles, int64_t tile, std::vector<IndexEntry>& out) {
  const int64_t own = tiles.visible(tile) - tiles.competing(tile);
  const int64_t sinks = std::min<int64_t>(tiles.sink_blocks, tiles.competing(tile));
  const int64_t local = std::max<int64_t>(tiles.local_blocks, tiles.quota(tile) - own - sinks);
  for (int64_t j = 0; j < tiles.visible(tile); ++j) {
    if (j < sinks || j >= tiles.competing(tile) - local) append(out, j, 0);
  }
}

void select_everything(const SequenceTiles& tiles, int64_t tile, std::vector<IndexEntry>& out) {
  for (int64_t j = 0; j < tiles.visible(tile); ++j) append(out, j, 0);
}

}  // namespace sb
