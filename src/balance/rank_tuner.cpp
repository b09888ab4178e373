#include "balance/rank_tuner.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/errors.h"

namespace sb {

RankTunerLimits rank_tuner_limits(int64_t variables) {
  RankTunerLimits limits;
  if (variables > 128) limits = {8, 12, 5, 3, 0};
  if (variables > 2048) limits = {4, 6, 4, 3, 0};
  return limits;
}

RankTuner::RankTuner(const TuningInput& input, int rank, const RankTunerLimits& limits)
    : input_(input),
      rank_(rank),
      limits_(limits),
      schedule_(input.schedules.of(input.batches.micro_batches(rank))),
      order_(input.orders[static_cast<size_t>(rank)]) {
  const CostModel& cost = input.cost;
  const int stages = cost.stages(), micro_batches = input.batches.micro_batches(rank);
  const bool uniform = input.curves.uniform();
  times_.stages = stages;
  times_.micro_batches = micro_batches;
  const auto size = static_cast<size_t>(stages * micro_batches);
  times_.forward.resize(size);
  times_.backward.resize(size);
  if (cost.layout().comm) {
    times_.forward_transfer.resize(size);
    times_.backward_transfer.resize(size);
    for (int s = 0; s < stages; ++s) times_.tail.push_back(cost.reduction(s));
  }
  position_.assign(size, 0.0);
  std::vector<double> base_position(size, 0.0), top(size, 0.0), gains;
  curves_.reserve(uniform ? static_cast<size_t>(micro_batches) : size);
  for (int i = 0; i < micro_batches; ++i) {
    const auto members = input.batches.members(input.batches.first(rank) + i);
    double tokens = 0;
    for (int member : members) tokens += static_cast<double>(input.sequences[static_cast<size_t>(member)].tokens);
    const StageTime linear = cost.linear(tokens), head = cost.head(tokens);
    if (uniform) curves_.push_back(stage_curve(cost, input.curves, input.sequences, members, 0, 1, limits.corners));
    for (int s = 0; s < stages; ++s) {
      const int layers = cost.stage_layers(s);
      if (!uniform)
        curves_.push_back(
            stage_curve(cost, input.curves, input.sequences, members, cost.first_layer(s), layers, limits.corners));
      const bool last = s + 1 == stages;
      const size_t at = times_.at(i, s);
      variables_.push_back({static_cast<int>(curves_.size()) - 1, uniform ? static_cast<double>(layers) : 1.0,
                            uniform ? layers : 1, layers * linear.forward + (last ? head.forward : 0.0),
                            layers * linear.backward + (last ? head.backward : 0.0), static_cast<int>(gains.size())});
      const StageCurve& curve = curves_.back();
      for (size_t c = 1; c < curve.corners.size(); ++c)
        gains.push_back(variables_.back().scale * (curve.gain[static_cast<size_t>(curve.corners[c])] -
                                                   curve.gain[static_cast<size_t>(curve.corners[c - 1])]));
      floor_gain_ += variables_.back().scale * curve.gain[0];
      top[at] = static_cast<double>(curve.steps.size());
      if (cost.layout().comm) {
        times_.forward_transfer[at] = cost.transfer(s, tokens);
        times_.backward_transfer[at] = last ? 0.0 : cost.transfer(s + 1, tokens);
      }
    }
  }
  const Budgets base = base_budgets(cost.spec(), input.sequences, cost.layers());
  base_makespan_ = schedule_.makespan(stage_times(cost, input.sequences, input.batches, rank, base), order_);
  set_all(top);
  slowest_ = simulate();
  gain_ = total_gain();
  set_all(base_position);
  fastest_ = simulate();
  programme_ = std::make_unique<DeadlineLp>(gains);
  row_.resize(gains.size());
}

double RankTuner::at(const std::vector<double>& values, double position) const {
  const auto i = static_cast<size_t>(position);
  if (i + 1 >= values.size()) return values.back();
  return values[i] + (values[i + 1] - values[i]) * (position - static_cast<double>(i));
}

void RankTuner::set_position(size_t variable, double position) {
  const Variable& v = variables_[variable];
  const StageCurve& curve = curves_[static_cast<size_t>(v.curve)];
  position_[variable] = position;
  times_.forward[variable] = v.fixed_forward + v.scale * at(curve.forward, position);
  times_.backward[variable] = v.fixed_backward + v.scale * at(curve.backward, position);
}

void RankTuner::set_all(const std::vector<double>& positions) {
  for (size_t i = 0; i < positions.size(); ++i) set_position(i, positions[i]);
}

double RankTuner::total_gain() const {
  double sum = 0;
  for (size_t i = 0; i < variables_.size(); ++i)
    sum += variables_[i].scale * at(curves_[static_cast<size_t>(variables_[i].curve)].gain, position_[i]);
  return sum;
}

// Adds the longest path at the present positions as a row.
bool RankTuner::add_critical_path(double deadline) {
  if (programme_->rows() >= limits_.rows) return false;
  schedule_.critical_path(times_, order_, chain_);
  std::fill(row_.begin(), row_.end(), 0.0);
  double fixed = 0;
  const auto& nodes = schedule_.nodes();
  int previous = -1;
  for (int id : chain_) {
    const auto& node = nodes[static_cast<size_t>(id)];
    const size_t at = times_.at(order_[static_cast<size_t>(node.position)], node.stage);
    const Variable& v = variables_[at];
    const StageCurve& curve = curves_[static_cast<size_t>(v.curve)];
    const auto& values = node.backward ? curve.backward : curve.forward;
    fixed += (node.backward ? v.fixed_backward : v.fixed_forward) + v.scale * values[0];
    for (size_t c = 1; c < curve.corners.size(); ++c)
      row_[static_cast<size_t>(v.first_column) + c - 1] +=
          v.scale * (values[static_cast<size_t>(curve.corners[c])] - values[static_cast<size_t>(curve.corners[c - 1])]);
    // Reached over the transfer, not over the stage's own order.
    if (!times_.forward_transfer.empty() && node.dependency == previous && node.previous != previous && previous >= 0)
      fixed += node.backward ? times_.backward_transfer[at] : times_.forward_transfer[at];
    previous = id;
  }
  if (!times_.tail.empty()) fixed += times_.tail[static_cast<size_t>(nodes[static_cast<size_t>(chain_.back())].stage)];
  // A path that the programme holds already: what is left over is the bend of the curves between corners.
  double planned = fixed;
  for (size_t j = 0; j < row_.size(); ++j) planned += row_[j] * programme_->x(static_cast<int>(j));
  if (planned <= deadline * (1 + 1e-8)) return false;
  programme_->add_row(row_, deadline - fixed);
  return true;
}

void RankTuner::positions_from_programme() {
  for (size_t i = 0; i < variables_.size(); ++i) {
    const Variable& v = variables_[i];
    const StageCurve& curve = curves_[static_cast<size_t>(v.curve)];
    const auto time = [&](int k) {
      return curve.forward[static_cast<size_t>(k)] + curve.backward[static_cast<size_t>(k)];
    };
    // The programme knows the corners only; the time it gives is spent on the steps between them.
    double more = 0;
    for (size_t c = 1; c < curve.corners.size(); ++c)
      more += std::clamp(programme_->x(v.first_column + static_cast<int>(c) - 1), 0.0, 1.0) *
              (time(curve.corners[c]) - time(curve.corners[c - 1]));
    const double until = time(0) + more * (1 + 1e-12);
    const auto steps = static_cast<int>(curve.steps.size());
    int k = 0;
    while (k < steps && time(k + 1) <= until) ++k;
    const double part = k < steps ? (until - time(k)) / (time(k + 1) - time(k)) : 0.0;
    set_position(i, k + std::clamp(part, 0.0, 1.0));
  }
}

void RankTuner::relax(double deadline) {
  price_ = 0;
  if (slowest_ <= deadline) {
    for (size_t i = 0; i < variables_.size(); ++i)
      set_position(i, static_cast<double>(curves_[static_cast<size_t>(variables_[i].curve)].steps.size()));
    relaxed_gain_ = total_gain();
    return;
  }
  programme_->shift_limits(deadline - deadline_);
  deadline_ = deadline;
  for (;;) {
    SB_CHECK(programme_->solve(), "the tuning programme of rank {} has no solution at {} us (fastest {} us)", rank_,
             deadline, fastest_);
    positions_from_programme();
    if (simulate() <= deadline * (1 + 1e-7)) break;
    if (!add_critical_path(deadline)) break;
  }
  relaxed_gain_ = floor_gain_ + programme_->objective();
  price_ = programme_->price();
}

void RankTuner::round(double deadline) {
  const double allowed = deadline * (1 + 1e-9);
  // Where the rows ran out the relaxed solution is too long: back towards the floor until it fits.
  if (slowest_ > deadline && simulate() > allowed) {
    const std::vector<double> wanted = position_;
    double low = 0, high = 1;
    for (int i = 0; i < 8; ++i) {
      const double middle = 0.5 * (low + high);
      for (size_t v = 0; v < wanted.size(); ++v) set_position(v, wanted[v] * middle);
      (simulate() <= allowed ? low : high) = middle;
    }
    for (size_t v = 0; v < wanted.size(); ++v) set_position(v, wanted[v] * low);
  }
  for (size_t v = 0; v < position_.size(); ++v)
    set_position(v, std::floor(position_[v] * variables_[v].units + 1e-6) / variables_[v].units);
  between_.clear();
  between_gain_ = 0;
  if (limits_.fill_trials > 0) {
    fill(deadline);
    fill_between(deadline);
  }
  gain_ = total_gain() + between_gain_;
}

// Takes single steps, best gain for its time first, while the schedule allows.
void RankTuner::fill(double deadline) {
  const double allowed = deadline * (1 + 1e-9);
  int64_t trials = limits_.fill_trials;
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
      const double forward = times_.forward[variable], backward = times_.backward[variable];
      const double more_forward = v.scale / v.units * (curve.forward[whole + 1] - curve.forward[whole]);
      const double more_backward = v.scale / v.units * (curve.backward[whole + 1] - curve.backward[whole]);
      const auto try_budget = [&](int64_t budget) {
        const double share = (selected_pairs(sequence.tokens, budget) - from.pairs) / (to.pairs - from.pairs);
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

void RankTuner::write(Budgets& budgets) const {
  const auto layers = static_cast<size_t>(input_.cost.layers());
  const int stages = input_.cost.stages();
  for (int i = 0; i < times_.micro_batches; ++i) {
    const auto members = input_.batches.members(input_.batches.first(rank_) + i);
    for (int member : members)
      for (size_t l = 0; l < layers; ++l)
        budgets[static_cast<size_t>(member) * layers + l] =
            input_.curves.vertices(member, static_cast<int>(l))[0].budget;
    for (int s = 0; s < stages; ++s) {
      const size_t at = times_.at(i, s);
      const Variable& v = variables_[at];
      const StageCurve& curve = curves_[static_cast<size_t>(v.curve)];
      const int first = input_.cost.first_layer(s), count = input_.cost.stage_layers(s);
      const auto take = [&](const StageCurve::Step& step, int from, int to) {
        for (int l = from; l < to; ++l)
          budgets[static_cast<size_t>(step.sequence) * layers + static_cast<size_t>(l)] =
              input_.curves.vertices(step.sequence, l)[static_cast<size_t>(step.vertex)].budget;
      };
      const auto whole = static_cast<size_t>(position_[at] + 1e-9);
      for (size_t k = 0; k < whole; ++k) {
        const auto& step = curve.steps[k];
        if (step.layer < 0)
          take(step, first, first + count);
        else
          take(step, step.layer, step.layer + 1);
      }
      const int part = static_cast<int>(std::lround((position_[at] - static_cast<double>(whole)) * v.units));
      if (part > 0) take(curve.steps[whole], first, first + part);
    }
  }
  for (const Between& more : between_)
    budgets[static_cast<size_t>(more.sequence) * layers + static_cast<size_t>(more.layer)] = more.budget;
}

}  // namespace sb
