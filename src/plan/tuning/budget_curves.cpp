#include "plan/tuning/budget_curves.h"

#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "plan/batching/parallel_pieces.h"

namespace sb {
namespace {

// Budgets that are tried: multiples of the block, at least 10 % apart below the base and 15 % above it; 30 % above
// where every layer has a curve of its own; 25 % below and 50 % above when there are also many sequences.
struct LevelGrid {
  std::vector<int32_t> budgets;
  std::vector<double> logs;
  std::vector<double> log_blocks;  // of 0, 1, 2 … blocks up to the base budget, where a sequence is longer than it
};

LevelGrid level_grid(const AttentionSpec& spec, int64_t longest, double down_factor, double up_factor) {
  LevelGrid grid;
  const int64_t top = spec.max_budget > 0 ? std::min(spec.max_budget, longest) : longest;
  const auto base = static_cast<double>(spec.budget), block = static_cast<double>(spec.block);
  const auto least = std::max(static_cast<double>(spec.least_budget()), 0.05 * base);
  std::vector<int64_t> levels;
  for (double k = base; k >= least;) {
    levels.push_back(static_cast<int64_t>(k));
    k = std::ceil(std::min(k - block, down_factor * k) / block) * block;
  }
  std::reverse(levels.begin(), levels.end());
  for (double k = base;;) {
    k = std::floor(std::max(k + block, up_factor * k) / block) * block;
    if (static_cast<int64_t>(k) > top) break;
    levels.push_back(static_cast<int64_t>(k));
  }
  for (int64_t k : levels) {
    grid.budgets.push_back(static_cast<int32_t>(k));
    grid.logs.push_back(std::log(static_cast<double>(k)));
  }
  for (int64_t k = 0; k < std::min(spec.budget, longest) + spec.block; k += spec.block)
    grid.log_blocks.push_back(std::log(static_cast<double>(k)));
  return grid;
}

}  // namespace

class BudgetCurves::Builder {
 public:
  Builder(const AttentionSpec& spec, const CoverageModel& coverage, const LevelGrid& grid, bool uniform, int layers,
          double p, Chunk& chunk)
      : spec_(spec),
        coverage_(coverage),
        grid_(grid),
        curves_(uniform ? 1 : layers),
        weight_(uniform ? layers : 1),
        keep_(1.0 - p),
        chunk_(chunk) {
    base_level_ =
        static_cast<size_t>(std::find(grid.budgets.begin(), grid.budgets.end(), spec.budget) - grid.budgets.begin());
    SB_CHECK(base_level_ < grid.budgets.size(), "the base budget {} is no level", spec.budget);
  }

  void add(const Sequence& sequence) {
    const auto tokens = static_cast<double>(sequence.tokens);
    if (spec_.always_dense(sequence.tokens)) {
      for (int layer = 0; layer < curves_; ++layer) {
        chunk_.vertices.push_back({static_cast<int32_t>(sequence.tokens), 1.0});
        close(tokens, 1.0);
      }
      return;
    }
    const int64_t top = spec_.max_budget > 0 ? std::min(spec_.max_budget, sequence.tokens) : sequence.tokens;
    // Levels below the sequence's length, which is the dense one itself; below the base only as many as are usual.
    const auto& budgets = grid_.budgets;
    const auto last = top == sequence.tokens
                          ? std::lower_bound(budgets.begin(), budgets.end(), static_cast<int32_t>(top))
                          : std::upper_bound(budgets.begin(), budgets.end(), static_cast<int32_t>(top));
    const auto end = static_cast<size_t>(last - budgets.begin());
    constexpr size_t kUsual = 5;
    const size_t first = base_level_ > kUsual ? base_level_ - kUsual : 0, count = end - first;
    values_.resize(count * static_cast<size_t>(curves_));
    coverage_.evaluate_layers(sequence, curves_, std::span(budgets).subspan(first, count),
                              std::span(grid_.logs).subspan(first, count), values_);
    const auto value = [&](int layer) { return std::span(values_).subspan(static_cast<size_t>(layer) * count, count); };
    find_floors(sequence, first, value);
    pairs_.resize(end);
    for (size_t i = 0; i < end; ++i) pairs_[i] = selected_pairs(sequence.tokens, budgets[i]);
    const double top_pairs = selected_pairs(sequence.tokens, top);
    for (int layer = 0; layer < curves_; ++layer) {
      if (spec_.dense_layer(layer)) {
        chunk_.vertices.push_back({static_cast<int32_t>(sequence.tokens), 1.0});
        close(tokens, 1.0);
        continue;
      }
      hull_.clear();
      const Floor& floor = floors_[static_cast<size_t>(layer)];
      const int64_t lowest = floor.enough * spec_.block;
      if (lowest < budgets[floor.level])
        add_point({{static_cast<int32_t>(lowest), floor.covered}, selected_pairs(sequence.tokens, lowest)});
      for (size_t i = floor.level; i < first; ++i)
        add_point({{budgets[i], coverage_.at(sequence, layer, budgets[i])}, pairs_[i]});
      const std::span<const double> own = value(layer);
      for (size_t i = std::max(first, floor.level); i < end; ++i) add_point({{budgets[i], own[i - first]}, pairs_[i]});
      if (top == sequence.tokens)
        add_point({{static_cast<int32_t>(top), 1.0}, top_pairs});
      else if (budgets[end - 1] < top)
        add_point({{static_cast<int32_t>(top), coverage_.at(sequence, layer, top)}, top_pairs});
      for (const Point& point : hull_) chunk_.vertices.push_back(point.vertex);
      close(tokens, own[base_level_ - first]);
    }
  }

 private:
  // The lowest budget that keeps enough coverage: level `level` does, the one before (if any) does not; `too_low` and
  // `enough`, in blocks, close in between.
  struct Floor {
    size_t level;
    int64_t too_low, enough, next;
    double covered, least;
  };

  // Of all layers at once; `value(layer)` is the coverage at the levels from `first`.
  template <typename Value>
  void find_floors(const Sequence& sequence, size_t first, const Value& value) {
    floors_.clear();
    for (int layer = 0; layer < curves_; ++layer) {
      const std::span<const double> own = value(layer);
      const double least = keep_ * own[base_level_ - first] * (1 - 1e-12);
      size_t level = base_level_;
      while (level > first && own[level - 1 - first] >= least) --level;
      double covered = own[level - first], below = level > first ? own[level - 1 - first] : 0.0;
      if (level == first) {
        // Unusually flat.
        for (; level > 0; --level) {
          below = coverage_.at(sequence, layer, grid_.budgets[level - 1]);
          if (below < least) break;
          covered = below;
        }
      }
      const int64_t enough = (grid_.budgets[level] + spec_.block - 1) / spec_.block;
      const int64_t too_low = level > 0 ? grid_.budgets[level - 1] / spec_.block : enough - 1;
      // The curve bends little between two levels: where a straight line would be.
      const double share = covered > below ? (least - below) / (covered - below) : 1.0;
      floors_.push_back({level, too_low, enough,
                         too_low + static_cast<int64_t>(share * static_cast<double>(enough - too_low)), covered,
                         least});
    }
    const auto count = static_cast<size_t>(curves_);
    tried_.resize(count);
    tried_logs_.resize(count);
    tried_values_.resize(count);
    for (;;) {
      bool open = false;
      for (size_t l = 0; l < count; ++l) {
        Floor& floor = floors_[l];
        open |= floor.enough - floor.too_low > 1;
        floor.next = floor.enough - floor.too_low > 1 ? std::clamp(floor.next, floor.too_low + 1, floor.enough - 1)
                                                      : floor.enough;
        tried_[l] = static_cast<int32_t>(floor.next * spec_.block);
        tried_logs_[l] = grid_.log_blocks[static_cast<size_t>(floor.next)];
      }
      if (!open) return;
      coverage_.evaluate_each(sequence, tried_, tried_logs_, tried_values_);
      for (size_t l = 0; l < count; ++l) {
        Floor& floor = floors_[l];
        if (floor.enough - floor.too_low <= 1) continue;
        if (tried_values_[l] >= floor.least) {
          floor.enough = floor.next--;
          floor.covered = tried_values_[l];
        } else {
          floor.too_low = floor.next++;
        }
      }
    }
  }

  struct Point {
    Vertex vertex;
    double pairs;
  };
  // Upper hull: what lies below the line from its neighbour to the new point goes.
  void add_point(const Point& point) {
    while (hull_.size() >= 2) {
      const Point &b = hull_[hull_.size() - 1], &a = hull_[hull_.size() - 2];
      if ((b.vertex.coverage - a.vertex.coverage) * (point.pairs - a.pairs) >
          (point.vertex.coverage - a.vertex.coverage) * (b.pairs - a.pairs))
        break;
      hull_.pop_back();
    }
    hull_.push_back(point);
  }

  void close(double tokens, double base) {
    chunk_.begin.push_back(static_cast<uint32_t>(chunk_.vertices.size()));
    chunk_.base.push_back(base);
    chunk_.base_total += tokens * weight_ * base;
  }

  const AttentionSpec& spec_;
  const CoverageModel& coverage_;
  const LevelGrid& grid_;
  int curves_;
  double weight_, keep_;
  Chunk& chunk_;
  size_t base_level_ = 0;
  std::vector<Point> hull_;
  std::vector<double> pairs_, values_, tried_logs_, tried_values_;
  std::vector<int32_t> tried_;
  std::vector<Floor> floors_;
};

BudgetCurves::BudgetCurves(const CostModel& cost, const CoverageModel& coverage, std::span<const Sequence> sequences,
                           double p, ThreadPool* pool)
    : uniform_(coverage.uniform_layers() && cost.spec().dense_layers.empty()), layers_(cost.layers()) {
  int64_t longest = 0;
  for (const Sequence& sequence : sequences) longest = std::max(longest, sequence.tokens);
  const bool many = !uniform_ && sequences.size() > kSmallStep;
  const LevelGrid grid = level_grid(cost.spec(), longest, many ? 0.75 : 0.9, many ? 1.5 : uniform_ ? 1.15 : 1.3);
  const auto count = std::ssize(sequences);
  chunks_.resize(static_cast<size_t>((count + kChunk - 1) / kChunk));
  parallel_pieces(pool, std::ssize(chunks_), [&](int64_t c, int) {
    Chunk& chunk = chunks_[static_cast<size_t>(c)];
    const auto first = c * kChunk, last = std::min(count, first + kChunk);
    const auto curves = static_cast<size_t>((last - first) * (uniform_ ? 1 : layers_));
    chunk.vertices.reserve(curves * 8);
    chunk.begin.reserve(curves + 1);
    chunk.base.reserve(curves);
    Builder builder(cost.spec(), coverage, grid, uniform_, layers_, p, chunk);
    for (int64_t i = first; i < last; ++i) builder.add(sequences[static_cast<size_t>(i)]);
  });
  for (const Chunk& chunk : chunks_) base_total_ += chunk.base_total;
}

namespace {

// A step up the curve of one sequence in one layer.
struct Raise {
  double slope, pairs, scores, gain;
  StageCurve::Step step;
};

// Where all curves begin, and the steps up from there, in the order in which they are taken. `work` is summed over
// `distinct` layers; it is divided by their number before the model is asked.
struct Raises {
  int distinct;
  Work work;
  double gain = 0;
  std::vector<Raise> steps;
};

Raises find_raises(const CostModel& cost, const BudgetCurves& curves, std::span<const Sequence> sequences,
                   std::span<const int> members, int first_layer, int layers) {
  Raises raises{curves.uniform() ? 1 : layers, {}, 0, {}};
  const int distinct = raises.distinct;
  Work& work = raises.work;
  for (int member : members) {
    const Sequence& sequence = sequences[static_cast<size_t>(member)];
    const auto tokens = static_cast<double>(sequence.tokens);
    const Work whole = work_of(cost.spec(), sequence.tokens, sequence.tokens);
    work.tokens += whole.tokens * distinct;
    work.tiles += whole.tiles * distinct;
    for (int l = 0; l < distinct; ++l) {
      const auto vertices = curves.vertices(member, first_layer + l);
      Work before = work_of(cost.spec(), sequence.tokens, vertices[0].budget);
      work.pairs += before.pairs;
      work.scores += before.scores;
      raises.gain += tokens * vertices[0].coverage;
      for (size_t v = 1; v < vertices.size(); ++v) {
        const Work next = work_of(cost.spec(), sequence.tokens, vertices[v].budget);
        const double pairs = next.pairs - before.pairs;
        const double more = tokens * (vertices[v].coverage - vertices[v - 1].coverage);
        raises.steps.push_back({more / pairs,
                                pairs,
                                next.scores - before.scores,
                                more,
                                {member, curves.uniform() ? -1 : first_layer + l, static_cast<int32_t>(v)}});
        before = next;
      }
    }
  }
  // Each curve is concave, so sorting keeps its steps in their own order.
  if (members.size() > 1 || distinct > 1)
    std::stable_sort(raises.steps.begin(), raises.steps.end(),
                     [](const Raise& a, const Raise& b) { return a.slope > b.slope; });
  return raises;
}

// Everything but the corners.
StageCurve take_all(const CostModel& cost, const Raises& raises, int layers) {
  const int distinct = raises.distinct;
  const double scale = static_cast<double>(layers) / distinct;
  Work work = raises.work;
  double gain = raises.gain;
  StageCurve curve;
  curve.steps.reserve(raises.steps.size());
  curve.forward.reserve(raises.steps.size() + 1);
  curve.backward.reserve(raises.steps.size() + 1);
  curve.gain.reserve(raises.steps.size() + 1);
  const auto record = [&] {
    const StageTime time =
        cost.attention({work.tokens / distinct, work.tiles / distinct, work.pairs / distinct, work.scores / distinct});
    curve.forward.push_back(time.forward * layers);
    curve.backward.push_back(time.backward * layers);
    curve.gain.push_back(gain * scale);
  };
  record();
  for (const Raise& raise : raises.steps) {
    curve.steps.push_back(raise.step);
    work.pairs += raise.pairs;
    work.scores += raise.scores;
    gain += raise.gain;
    record();
  }
  return curve;
}

double time_at(const StageCurve& curve, int position) {
  return curve.forward[static_cast<size_t>(position)] + curve.backward[static_cast<size_t>(position)];
}

// Of gain over time.
std::vector<int> concave_envelope(const StageCurve& curve) {
  const auto time = [&](int i) { return time_at(curve, i); };
  const auto gain = [&](int i) { return curve.gain[static_cast<size_t>(i)]; };
  std::vector<int> corners;
  for (int i = 0; i < static_cast<int>(curve.gain.size()); ++i) {
    // More for no more time (a dense sequence needs no selection): the lower step is never worth taking.
    while (!corners.empty() && time(i) <= time(corners.back())) corners.pop_back();
    while (corners.size() >= 2) {
      const int b = corners.back(), a = corners[corners.size() - 2];
      if ((gain(b) - gain(a)) * (time(i) - time(a)) > (gain(i) - gain(a)) * (time(b) - time(a))) break;
      corners.pop_back();
    }
    corners.push_back(i);
  }
  return corners;
}

// Both ends, and between them those that span the most time.
std::vector<int> thinned(const StageCurve& curve, const std::vector<int>& corners, int most) {
  std::vector<int> kept{corners.front()};
  const double start = time_at(curve, corners.front()), span = time_at(curve, corners.back()) - start;
  for (size_t c = 1; c + 1 < corners.size(); ++c) {
    const double due = start + span * static_cast<double>(kept.size()) / (most - 1);
    if (time_at(curve, corners[c]) >= due && static_cast<int>(kept.size()) + 1 < most) kept.push_back(corners[c]);
  }
  kept.push_back(corners.back());
  return kept;
}

}  // namespace

StageCurve stage_curve(const CostModel& cost, const BudgetCurves& curves, std::span<const Sequence> sequences,
                       std::span<const int> members, int first_layer, int layers, int max_corners) {
  StageCurve curve = take_all(cost, find_raises(cost, curves, sequences, members, first_layer, layers), layers);
  curve.corners = concave_envelope(curve);
  if (std::ssize(curve.corners) > max_corners) curve.corners = thinned(curve, curve.corners, max_corners);
  return curve;
}

}  // namespace sb
