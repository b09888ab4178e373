#include "balance/budget_curves.h"

#include <algorithm>
#include <cmath>

#include "core/errors.h"

namespace sb {
namespace {

// Budgets that are tried: multiples of the block, at least 10 % apart below the base and 15 % above it (30 % where
// every layer has a curve of its own).
struct LevelGrid {
  std::vector<int32_t> budgets;
  std::vector<double> logs;
};

LevelGrid level_grid(const AttentionSpec& spec, int64_t longest, bool uniform) {
  LevelGrid grid;
  const int64_t top = spec.max_budget > 0 ? std::min(spec.max_budget, longest) : longest;
  const auto base = static_cast<double>(spec.budget);
  const auto least = std::max(static_cast<double>(spec.least_budget()), 0.05 * base);
  std::vector<int64_t> down;
  for (double k = base; k >= least;) {
    down.push_back(static_cast<int64_t>(k));
    k = std::min(k - static_cast<double>(spec.block), 0.9 * k);
    k = std::ceil(k / static_cast<double>(spec.block)) * static_cast<double>(spec.block);
  }
  std::reverse(down.begin(), down.end());
  for (double k = base;;) {
    k = std::max(k + static_cast<double>(spec.block), (uniform ? 1.15 : 1.3) * k);
    k = std::floor(k / static_cast<double>(spec.block)) * static_cast<double>(spec.block);
    if (static_cast<int64_t>(k) > top) break;
    down.push_back(static_cast<int64_t>(k));
  }
  for (int64_t k : down) {
    grid.budgets.push_back(static_cast<int32_t>(k));
    grid.logs.push_back(std::log(static_cast<double>(k)));
  }
  return grid;
}

}  // namespace

BudgetCurves::BudgetCurves(const CostModel& cost, const CoverageModel& coverage, std::span<const Sequence> sequences,
                           double p)
    : uniform_(coverage.uniform_layers()), layers_(cost.layers()) {
  const AttentionSpec& spec = cost.spec();
  int64_t longest = 0;
  for (const Sequence& sequence : sequences) longest = std::max(longest, sequence.tokens);
  const LevelGrid grid = level_grid(spec, longest, uniform_);
  const auto base_level =
      static_cast<size_t>(std::find(grid.budgets.begin(), grid.budgets.end(), spec.budget) - grid.budgets.begin());
  SB_CHECK(base_level < grid.budgets.size(), "the base budget {} is no level", spec.budget);
  std::vector<double> value(grid.budgets.size());
  const int curves = uniform_ ? 1 : layers_;
  begin_.reserve(sequences.size() * static_cast<size_t>(curves) + 1);
  base_.reserve(begin_.capacity());
  vertices_.reserve(sequences.size() * static_cast<size_t>(curves) * 10);
  for (const Sequence& sequence : sequences) {
    const auto tokens = static_cast<double>(sequence.tokens);
    const int64_t top = spec.max_budget > 0 ? std::min(spec.max_budget, sequence.tokens) : sequence.tokens;
    for (int layer = 0; layer < curves; ++layer) {
      const double weight = tokens * (uniform_ ? layers_ : 1);
      if (spec.always_dense(sequence.tokens)) {
        vertices_.push_back(
            {static_cast<int32_t>(sequence.tokens), selected_pairs(sequence.tokens, sequence.tokens), 0, 1.0});
        begin_.push_back(vertices_.size());
        base_.push_back(1.0);
        base_total_ += weight;
        continue;
      }
      // Levels below the sequence's length, and the length itself as the dense one.
      const auto levels = static_cast<size_t>(
          std::lower_bound(grid.budgets.begin(), grid.budgets.end(), static_cast<int32_t>(top)) - grid.budgets.begin());
      // From the base up, then down in pieces until the loss is more than p allows.
      const auto evaluate = [&](size_t from, size_t to) {
        coverage.evaluate(sequence, layer, std::span(grid.budgets).subspan(from, to - from),
                          std::span(grid.logs).subspan(from, to - from), std::span(value).subspan(from, to - from));
      };
      evaluate(base_level, levels);
      const double base = value[base_level];
      const double floor = (1.0 - p) * base * (1 - 1e-12);
      size_t low = base_level, known = base_level;
      while (low > 0) {
        if (low == known) {
          constexpr size_t kPiece = 6;
          known = low > kPiece ? low - kPiece : 0;
          evaluate(known, low);
        }
        if (value[low - 1] < floor) break;
        --low;
      }
      // The lowest budget of all lies between two levels.
      int64_t lowest = grid.budgets[low];
      if (low > 0) {
        int64_t too_low = grid.budgets[low - 1] / spec.block, enough = (lowest + spec.block - 1) / spec.block;
        while (enough - too_low > 1) {
          const int64_t middle = (enough + too_low) / 2;
          (coverage.at(sequence, layer, middle * spec.block) >= floor ? enough : too_low) = middle;
        }
        lowest = std::min(lowest, enough * spec.block);
      }
      const size_t start = vertices_.size();
      const double scores = work_of(spec, sequence.tokens, spec.budget).scores;
      const auto add = [&](int64_t budget, double covered, double score) {
        const double pairs = selected_pairs(sequence.tokens, budget);
        // Upper hull: what lies below the line from its neighbour to the new point goes.
        while (vertices_.size() >= start + 2) {
          const Vertex& b = vertices_[vertices_.size() - 1];
          const Vertex& a = vertices_[vertices_.size() - 2];
          if ((b.coverage - a.coverage) * (pairs - a.pairs) > (covered - a.coverage) * (b.pairs - a.pairs)) break;
          vertices_.pop_back();
        }
        vertices_.push_back({static_cast<int32_t>(budget), pairs, score, covered});
      };
      if (lowest < grid.budgets[low]) add(lowest, coverage.at(sequence, layer, lowest), scores);
      for (size_t i = low; i < levels; ++i) add(grid.budgets[i], value[i], scores);
      if (top == sequence.tokens)
        add(top, 1.0, 0.0);
      else if (levels == 0 || grid.budgets[levels - 1] < top)
        add(top, coverage.at(sequence, layer, top), scores);
      begin_.push_back(vertices_.size());
      base_.push_back(base);
      base_total_ += weight * base;
    }
  }
}

StageCurve stage_curve(const CostModel& cost, const BudgetCurves& curves, std::span<const Sequence> sequences,
                       std::span<const int> members, int first_layer, int layers, int max_corners) {
  struct Candidate {
    double slope, pairs, scores, gain;
    StageCurve::Step step;
  };
  StageCurve curve;
  Work work;  // sums over layers; divided by their number before the model is asked
  double gain = 0;
  std::vector<Candidate> candidates;
  const int distinct = curves.uniform() ? 1 : layers;
  for (int member : members) {
    const Sequence& sequence = sequences[static_cast<size_t>(member)];
    const auto tokens = static_cast<double>(sequence.tokens);
    const Work whole = work_of(cost.spec(), sequence.tokens, sequence.tokens);
    work.tokens += whole.tokens * distinct;
    work.tiles += whole.tiles * distinct;
    for (int l = 0; l < distinct; ++l) {
      const auto vertices = curves.vertices(member, first_layer + l);
      work.pairs += vertices[0].pairs;
      work.scores += vertices[0].scores;
      gain += tokens * vertices[0].coverage;
      for (size_t v = 1; v < vertices.size(); ++v) {
        const double pairs = vertices[v].pairs - vertices[v - 1].pairs;
        const double more = tokens * (vertices[v].coverage - vertices[v - 1].coverage);
        candidates.push_back({more / pairs,
                              pairs,
                              vertices[v].scores - vertices[v - 1].scores,
                              more,
                              {member, curves.uniform() ? -1 : first_layer + l, static_cast<int32_t>(v)}});
      }
    }
  }
  // Each curve is concave, so sorting keeps its steps in their own order.
  if (members.size() > 1 || distinct > 1)
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const auto& a, const auto& b) { return a.slope > b.slope; });
  const double scale = static_cast<double>(layers) / distinct;
  const size_t n = candidates.size();
  curve.steps.reserve(n);
  curve.forward.reserve(n + 1);
  curve.backward.reserve(n + 1);
  curve.gain.reserve(n + 1);
  const auto record = [&] {
    const StageTime time =
        cost.attention({work.tokens / distinct, work.tiles / distinct, work.pairs / distinct, work.scores / distinct});
    curve.forward.push_back(time.forward * layers);
    curve.backward.push_back(time.backward * layers);
    curve.gain.push_back(gain * scale);
  };
  record();
  for (const Candidate& candidate : candidates) {
    curve.steps.push_back(candidate.step);
    work.pairs += candidate.pairs;
    work.scores += candidate.scores;
    gain += candidate.gain;
    record();
  }
  // Envelope over time, then thinned to the corners that span the most time.
  const auto time = [&](int i) {
    return curve.forward[static_cast<size_t>(i)] + curve.backward[static_cast<size_t>(i)];
  };
  const auto at = [&](int i) { return curve.gain[static_cast<size_t>(i)]; };
  auto& corners = curve.corners;
  for (int i = 0; i <= static_cast<int>(n); ++i) {
    // More for no more time (a dense sequence needs no selection): the lower step is never worth taking.
    while (!corners.empty() && time(i) <= time(corners.back())) corners.pop_back();
    while (corners.size() >= 2) {
      const int b = corners.back(), a = corners[corners.size() - 2];
      if ((at(b) - at(a)) * (time(i) - time(a)) > (at(i) - at(a)) * (time(b) - time(a))) break;
      corners.pop_back();
    }
    corners.push_back(i);
  }
  if (static_cast<int>(corners.size()) > max_corners) {
    std::vector<int> kept{corners.front()};
    const double span = time(corners.back()) - time(corners.front());
    for (size_t c = 1; c + 1 < corners.size(); ++c) {
      const double due = time(corners.front()) + span * static_cast<double>(kept.size()) / (max_corners - 1);
      if (time(corners[c]) >= due && static_cast<int>(kept.size()) + 1 < max_corners) kept.push_back(corners[c]);
    }
    kept.push_back(corners.back());
    corners.swap(kept);
  }
  return curve;
}

}  // namespace sb
