#include "plan/tuning/rank_tuner.h"

#include <cmath>

#include "core/errors.h"

namespace sb {
namespace {

constexpr int kCorners = 12;  // of a stage curve

}  // namespace

RankTuner::RankTuner(const TuningInput& input, int rank, int64_t pivots)
    : input_(input),
      rank_(rank),
      pivots_(pivots),
      schedule_(input.schedules.of(rank)),
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
    cost.add_exposed(times_);
  }
  position_.assign(size, 0.0);
  std::vector<double> floor_position(size, 0.0), top(size, 0.0), gains;
  curves_.reserve(uniform ? static_cast<size_t>(micro_batches) : size);
  for (int i = 0; i < micro_batches; ++i) {
    const auto members = input.batches.members(input.batches.first(rank) + i);
    double tokens = 0;
    for (int member : members) tokens += static_cast<double>(input.sequences[static_cast<size_t>(member)].tokens);
    const StageTime linear = cost.linear(tokens), head = cost.head(tokens);
    if (uniform) curves_.push_back(stage_curve(cost, input.curves, input.sequences, members, 0, 1, kCorners));
    for (int s = 0; s < stages; ++s) {
      const int layers = cost.stage_layers(s);
      if (!uniform)
        curves_.push_back(
            stage_curve(cost, input.curves, input.sequences, members, cost.first_layer(s), layers, kCorners));
      const bool last = s + 1 == stages;
      const size_t at = times_.at(i, s);
      variables_.push_back({static_cast<int>(curves_.size()) - 1, uniform ? static_cast<double>(layers) : 1.0,
                            uniform ? layers : 1, layers * linear.forward + (last ? head.forward : 0.0),
                            layers * linear.backward + (last ? head.backward : 0.0), static_cast<int>(gains.size())});
      const StageCurve& curve = curves_.back();
      for (size_t c = 1; c < curve.corners.size(); ++c)
        gains.push_back(variables_.back().scale * (curve.gain[static_cast<size_t>(curve.corners[c])] -
                                                   curve.gain[static_cast<size_t>(curve.corners[c - 1])]));
      const auto floor = static_cast<size_t>(curve.corners.front());
      floor_position[at] = curve.corners.front();
      floor_gain_ += variables_.back().scale * curve.gain[floor];
      top[at] = static_cast<double>(curve.steps.size());
      if (cost.layout().comm) {
        times_.forward_transfer[at] = cost.transfer(s, tokens);
        times_.backward_transfer[at] = last ? 0.0 : cost.transfer(s + 1, tokens);
      }
    }
  }
  base_makespan_ = schedule_.makespan(stage_times(cost, input.sequences, input.batches, rank, input.base), order_);
  set_all(top);
  slowest_ = simulate();
  gain_ = total_gain();
  set_all(floor_position);
  fastest_ = simulate();
  top_gain_ = gain_;
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

void RankTuner::round(double deadline) {
  const double allowed = deadline * (1 + 1e-9);
  // Where the rows ran out the relaxed solution is too long: back towards the floor until it fits.
  if (slowest_ > deadline && simulate() > allowed) {
    const std::vector<double> wanted = position_;
    const auto shrink = [&](double share) {
      for (size_t v = 0; v < wanted.size(); ++v) {
        const double floor = curves_[static_cast<size_t>(variables_[v].curve)].corners.front();
        set_position(v, floor + (wanted[v] - floor) * share);
      }
    };
    double low = 0, high = 1;
    for (int i = 0; i < 8; ++i) {
      const double middle = 0.5 * (low + high);
      shrink(middle);
      (simulate() <= allowed ? low : high) = middle;
    }
    shrink(low);
  }
  for (size_t v = 0; v < position_.size(); ++v)
    set_position(v, std::floor(position_[v] * variables_[v].units + 1e-6) / variables_[v].units);
  between_.clear();
  between_gain_ = 0;
  fill(deadline);
  fill_between(deadline);
  gain_ = total_gain() + between_gain_;
}

void RankTuner::write(Budgets& budgets) const {
  const auto layers = static_cast<size_t>(input_.cost.layers());
  const int stages = input_.cost.stages();
  for (int i = 0; i < times_.micro_batches; ++i) {
    const auto members = input_.batches.members(input_.batches.first(rank_) + i);
    for (int member : members)
      for (size_t l = 0; l < layers; ++l)
        budgets[static_cast<size_t>(member) * layers + l] = input_.curves.floor(member, static_cast<int>(l));
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
