#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "plan/tuning/rank_tuner.h"

namespace sb {

// Takes single steps, best gain for its time first, while the schedule allows.
void RankTuner::fill(double deadline) {
  const double allowed = deadline * (1 + 1e-9);
  int64_t trials = 2000;
  std::vector<size_t> order(variables_.size());
  std::vector<double> value(variables_.size());
  std::vector<char> closed(variables_.size(), 0);
  bool any = true;
  while (any && trials > 0) {
    any = false;
    for (size_t i = 0; i < variables_.size(); ++i) {
      const Variable& v = variables_[i];
      const StageCurve& curve = curves_[static_cast<size_t>(v.curve)];
      order[i] = i;
      if (position_[i] + 1e-9 >= static_cast<double>(curve.steps.size())) closed[i] = 1;
      if (closed[i]) continue;
      const double next = position_[i] + 1.0 / v.units;
      const double time = at(curve.forward, next) + at(curve.backward, next) - at(curve.forward, position_[i]) -
                          at(curve.backward, position_[i]);
      value[i] = time > 0 ? (at(curve.gain, next) - at(curve.gain, position_[i])) / time : 1e300;
    }
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return value[a] != value[b] ? value[a] > value[b] : a < b; });
    for (size_t i : order) {
      if (closed[i] || trials-- <= 0) continue;
      const double before = position_[i];
      // Positions stay multiples of 1 / units.
      set_position(i, std::round((before * variables_[i].units) + 1) / variables_[i].units);
      if (simulate() <= allowed) {
        any = true;
      } else {
        set_position(i, before);
        closed[i] = 1;
      }
    }
  }
}

// The next step of a variable is too long, but a smaller budget in it may fit: the largest multiple of the block that
// does, for one layer. Time is linear in the pairs inside a step.
void RankTuner::fill_between(double deadline) {
  const double allowed = deadline * (1 + 1e-9);
  const AttentionSpec& spec = input_.cost.spec();
  for (int i = 0; i < times_.micro_batches; ++i) {
    for (int s = 0; s < times_.stages; ++s) {
      const size_t variable = times_.at(i, s);
      const Variable& v = variables_[variable];
      const StageCurve& curve = curves_[static_cast<size_t>(v.curve)];
      const auto whole = static_cast<size_t>(position_[variable] + 1e-9);
      if (whole >= curve.steps.size()) continue;
      const StageCurve::Step& step = curve.steps[whole];
      const auto part = static_cast<int>(std::lround((position_[variable] - static_cast<double>(whole)) * v.units));
      const int layer = step.layer < 0 ? input_.cost.first_layer(s) + part : step.layer;
      const auto vertices = input_.curves.vertices(step.sequence, layer);
      const auto& from = vertices[static_cast<size_t>(step.vertex) - 1];
      const auto& to = vertices[static_cast<size_t>(step.vertex)];
      const Sequence& sequence = input_.sequences[static_cast<size_t>(step.sequence)];
      const double low_pairs = selected_pairs(sequence.tokens, from.budget),
                   high_pairs = selected_pairs(sequence.tokens, to.budget);
      const double forward = times_.forward[variable], backward = times_.backward[variable];
      const double more_forward = v.scale / v.units * (curve.forward[whole + 1] - curve.forward[whole]);
      const double more_backward = v.scale / v.units * (curve.backward[whole + 1] - curve.backward[whole]);
      const auto try_budget = [&](int64_t budget) {
        const double share = (selected_pairs(sequence.tokens, budget) - low_pairs) / (high_pairs - low_pairs);
        times_.forward[variable] = forward + share * more_forward;
        times_.backward[variable] = backward + share * more_backward;
        return simulate() <= allowed;
      };
      int64_t low = from.budget / spec.block, high = (to.budget - 1) / spec.block + 1;  // in blocks: fits, does not
      while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        (try_budget(middle * spec.block) ? low : high) = middle;
      }
      const int64_t budget = low * spec.block;
      const double covered = budget > from.budget ? input_.coverage.at(sequence, layer, budget) : from.coverage;
      if (covered > from.coverage && try_budget(budget)) {
        between_.push_back({step.sequence, layer, static_cast<int32_t>(budget)});
        between_gain_ += static_cast<double>(sequence.tokens) * (covered - from.coverage);
      } else {
        times_.forward[variable] = forward;
        times_.backward[variable] = backward;
      }
    }
  }
}

}  // namespace sb
