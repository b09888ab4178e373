#include "plan/tuning/tuning.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/errors.h"
#include "plan/batching/parallel_pieces.h"
#include "plan/schedule/vector_kernels.h"

namespace sb {

Budgets base_budgets(const AttentionSpec& spec, std::span<const Sequence> sequences, int layers) {
  Budgets budgets(sequences.size() * static_cast<size_t>(layers));
  for (size_t i = 0; i < sequences.size(); ++i)
    std::fill_n(budgets.begin() + static_cast<ptrdiff_t>(i * static_cast<size_t>(layers)), layers,
                static_cast<int32_t>(spec.base_budget(sequences[i].tokens)));
  for (const int layer : spec.dense_layers)
    for (size_t i = 0; i < sequences.size(); ++i)
      budgets[i * static_cast<size_t>(layers) + static_cast<size_t>(layer)] = static_cast<int32_t>(sequences[i].tokens);
  return budgets;
}

Orders given_orders(const Batches& batches) {
  Orders orders(static_cast<size_t>(batches.ranks()));
  for (int r = 0; r < batches.ranks(); ++r) {
    orders[static_cast<size_t>(r)].resize(static_cast<size_t>(batches.micro_batches(r)));
    std::iota(orders[static_cast<size_t>(r)].begin(), orders[static_cast<size_t>(r)].end(), 0);
  }
  return orders;
}

void ScheduleSet::prepare(const Batches& batches) {
  schedules_.clear();
  const bool whole = batches.pieces.empty();
  for (int r = 0; r < batches.ranks(); ++r) {
    const int m = batches.micro_batches(r);
    if (whole && !schedules_.empty() && schedules_.back()->micro_batches() == m)
      schedules_.push_back(schedules_.back());
    else if (whole)
      schedules_.push_back(shared_schedule(stages_, m, warmup_depth_));
    else
      schedules_.push_back(std::make_shared<const Schedule>(stages_, batches.groups(r),
                                                            batches.ahead[static_cast<size_t>(r)], warmup_depth_));
  }
}

namespace {

// The attention of one micro-batch, for stage after stage. Most layers have the budgets of the layer before them, and
// so its time.
class MicroBatchAttention {
 public:
  MicroBatchAttention(const CostModel& cost, std::span<const Sequence> sequences, std::span<const int> members,
                      const Piece& piece, std::span<const int32_t> budgets)
      : cost_(cost), sequences_(sequences), members_(members), piece_(piece), budgets_(budgets) {}

  // Adds that of the next stage to `sum`.
  void add_stage(int stage, StageTime& sum) {
    const int first = cost_.first_layer(stage), count = cost_.stage_layers(stage);
    if (all_alike(first, count)) {
      go_to(first);
      sum.forward += count * time_.forward;
      sum.backward += count * time_.backward;
      return;
    }
    for (int layer = first; layer < first + count; ++layer) {
      go_to(layer);
      sum.forward += time_.forward;
      sum.backward += time_.backward;
    }
  }

 private:
  const int32_t* budget(int member, int layer) const {
    return budgets_.data() + static_cast<size_t>(member) * static_cast<size_t>(cost_.layers()) + layer;
  }

  // Whether every sequence has one budget in all these layers.
  bool all_alike(int first, int count) const {
    return std::ranges::all_of(members_, [&](int member) {
      const int32_t* own = budget(member, first);
      return std::memcmp(own, own + 1, static_cast<size_t>(count - 1) * sizeof *own) == 0;
    });
  }

  // From the layer before, or one with the same budgets as that.
  void go_to(int layer) {
    const auto as_before = [&](int member) { return *budget(member, layer) == *budget(member, layer - 1); };
    if (layer > 0 && std::ranges::all_of(members_, as_before)) return;
    Work work;
    for (const int member : members_)
      work += work_of(cost_.spec(), sequences_[static_cast<size_t>(member)].tokens, piece_, *budget(member, layer));
    time_ = cost_.attention(work);
  }

  const CostModel& cost_;
  std::span<const Sequence> sequences_;
  std::span<const int> members_;
  Piece piece_;
  std::span<const int32_t> budgets_;
  StageTime time_;  // of the layer that it is at
};

// Room for the times of so many micro-batches, transfers included where they take any; the gradient reduction.
PipelineTimes empty_times(const CostModel& cost, int micro_batches, bool split) {
  PipelineTimes times;
  times.stages = cost.stages();
  times.micro_batches = micro_batches;
  const auto size = static_cast<size_t>(times.stages * times.micro_batches);
  times.forward.resize(size);
  times.backward.resize(size);
  if (cost.layout().comm || split) {
    times.forward_transfer.resize(size);
    times.backward_transfer.resize(size);
  }
  if (cost.layout().comm) cost.add_exposed(times);
  return times;
}

}  // namespace

PipelineTimes stage_times(const CostModel& cost, std::span<const Sequence> sequences, const Batches& batches, int rank,
                          std::span<const int32_t> budgets) {
  const bool split = batches.cut();
  PipelineTimes times = empty_times(cost, batches.micro_batches(rank), split);
  double known_tokens = -1;  // pieces are mostly as long as the one before
  StageTime linear, head;
  for (int i = 0; i < times.micro_batches; ++i) {
    const int index = batches.first(rank) + i;
    const auto tokens = static_cast<double>(batches.tokens(sequences, index));
    if (tokens != known_tokens) {
      known_tokens = tokens;
      linear = cost.linear(tokens);
      head = cost.head(tokens);
    }
    MicroBatchAttention attention(cost, sequences, batches.members(index), batches.piece(index), budgets);
    for (int s = 0; s < times.stages; ++s) {
      const int count = cost.stage_layers(s);
      StageTime sum{count * linear.forward, count * linear.backward};
      attention.add_stage(s, sum);
      const bool last = s + 1 == times.stages;
      times.forward[times.at(i, s)] = sum.forward + (last ? head.forward : 0.0);
      times.backward[times.at(i, s)] = sum.backward + (last ? head.backward : 0.0);
      if (!times.forward_transfer.empty()) {
        times.forward_transfer[times.at(i, s)] = cost.transfer(s, tokens);
        times.backward_transfer[times.at(i, s)] = cost.gradient_transfer(s, tokens, linear, split);
      }
    }
  }
  return times;
}

double step_makespan(const CostModel& cost, const ScheduleSet& schedules, std::span<const Sequence> sequences,
                     const Batches& batches, const Orders& orders, std::span<const int32_t> budgets) {
  double makespan = 0;
  for (int r = 0; r < batches.ranks(); ++r)
    makespan = std::max(makespan, schedules.of(r).makespan(stage_times(cost, sequences, batches, r, budgets),
                                                           orders[static_cast<size_t>(r)]));
  return makespan;
}

CoverageSummary summarize_coverage(const CoverageModel& coverage, const AttentionSpec& spec,
                                   std::span<const Sequence> sequences, int layers, std::span<const int32_t> budgets,
                                   ThreadPool* pool) {
  constexpr int64_t kChunk = 32;
  const auto count = std::ssize(sequences);
  const auto depth = static_cast<size_t>(layers);
  // Beyond every length in layers that are always dense.
  std::vector<int32_t> base(depth, static_cast<int32_t>(spec.budget));
  for (const int layer : spec.dense_layers) base[static_cast<size_t>(layer)] = INT32_MAX;
  std::vector<double> log_base(depth);
  log_all(base.data(), depth, log_base.data());
  std::vector<CoverageSummary> chunks(static_cast<size_t>((count + kChunk - 1) / kChunk));
  parallel_pieces(pool, std::ssize(chunks), [&](int64_t c, int) {
    CoverageSummary own;
    std::vector<double> logs(depth), value(depth), base_value(depth);
    for (auto i = static_cast<size_t>(c * kChunk); i < static_cast<size_t>(std::min(count, (c + 1) * kChunk)); ++i) {
      const auto tokens = static_cast<double>(sequences[i].tokens);
      if (spec.always_dense(sequences[i].tokens)) {
        own.mean += tokens * layers;
        own.base_mean += tokens * layers;
        continue;
      }
      const auto list = budgets.subspan(i * depth, depth);
      // One layer stands for all where they are alike in curve and budget.
      const bool alike = coverage.uniform_layers() && spec.dense_layers.empty() &&
                         std::equal(list.begin() + 1, list.end(), list.begin());
      const size_t distinct = alike ? 1 : depth;
      log_all(list.data(), distinct, logs.data());
      coverage.evaluate_each(sequences[i], list.first(distinct), std::span(logs).first(distinct), value);
      coverage.evaluate_each(sequences[i], std::span(base).first(distinct), std::span(log_base).first(distinct),
                             base_value);
      const double weight = tokens * (alike ? layers : 1);
      for (size_t l = 0; l < distinct; ++l) {
        own.mean += weight * value[l];
        own.base_mean += weight * base_value[l];
        own.min = std::min(own.min, value[l]);
        own.worst_loss = std::max(own.worst_loss, 1.0 - value[l] / base_value[l]);
      }
    }
    chunks[static_cast<size_t>(c)] = own;
  });
  CoverageSummary summary;
  for (const CoverageSummary& own : chunks) {
    summary.mean += own.mean;
    summary.base_mean += own.base_mean;
    summary.min = std::min(summary.min, own.min);
    summary.worst_loss = std::max(summary.worst_loss, own.worst_loss);
  }
  double weight = 0;
  for (const Sequence& sequence : sequences) weight += static_cast<double>(sequence.tokens) * layers;
  summary.mean /= weight;
  summary.base_mean /= weight;
  return summary;
}

TuningResult tune_anchor(const TuningInput& input, const TuningOptions& options) {
  const CostModel& cost = input.cost;
  const std::span<const Sequence> sequences = input.sequences;
  const BudgetCurves& curves = input.curves;
  const Batches& batches = input.batches;
  const AttentionSpec& spec = cost.spec();
  const auto layers = static_cast<size_t>(cost.layers());
  TuningResult result;
  result.budgets.assign(input.base.begin(), input.base.end());
  const auto fill = [&](std::span<const int> members, double scale, Budgets& budgets) {
    for (int member : members) {
      const int64_t tokens = sequences[static_cast<size_t>(member)].tokens;
      if (spec.always_dense(tokens)) continue;
      const int64_t top = spec.max_budget > 0 ? std::min(spec.max_budget, tokens) : tokens;
      // Rounded down to blocks, so that a latency which meets the anchor still does.
      const double wanted = scale * static_cast<double>(spec.budget) / static_cast<double>(spec.block);
      const auto budget = std::min(top, scale == 1.0 ? spec.budget : static_cast<int64_t>(wanted + 1e-9) * spec.block);
      for (size_t l = 0; l < layers; ++l) {
        const int64_t floor = curves.floor(member, static_cast<int>(l));
        budgets[static_cast<size_t>(member) * layers + l] = static_cast<int32_t>(std::max(budget, floor));
      }
    }
  };
  const auto latency = [&](int rank, int micro_batch, const Budgets& budgets) {
    Batches one;
    const auto members = batches.members(batches.first(rank) + micro_batch);
    one.sequences.assign(members.begin(), members.end());
    one.micro_batch_begin.push_back(static_cast<int>(members.size()));
    one.rank_begin.push_back(1);
    const PipelineTimes times = stage_times(cost, sequences, one, 0, budgets);
    return std::accumulate(times.forward.begin(), times.forward.end(), 0.0) +
           std::accumulate(times.backward.begin(), times.backward.end(), 0.0);
  };
  std::vector<double> base;
  for (int r = 0; r < batches.ranks(); ++r)
    for (int i = 0; i < batches.micro_batches(r); ++i) base.push_back(latency(r, i, result.budgets));
  const double anchor = options.anchor == AnchorKind::mean
                            ? std::accumulate(base.begin(), base.end(), 0.0) / static_cast<double>(base.size())
                        : options.anchor == AnchorKind::min ? *std::min_element(base.begin(), base.end())
                                                            : *std::max_element(base.begin(), base.end());
  for (int r = 0; r < batches.ranks(); ++r) {
    for (int i = 0; i < batches.micro_batches(r); ++i) {
      const auto members = batches.members(batches.first(r) + i);
      int64_t longest = 0;
      for (int member : members) longest = std::max(longest, sequences[static_cast<size_t>(member)].tokens);
      // Largest common factor on the budgets whose latency stays within the anchor; the floor where none does.
      double low = 0, high = static_cast<double>(longest) / static_cast<double>(spec.budget) + 1;
      fill(members, high, result.budgets);
      if (latency(r, i, result.budgets) <= anchor) continue;
      const double finest = 0.5 * static_cast<double>(spec.block) / static_cast<double>(spec.budget);
      while (high - low > finest) {
        const double middle = 0.5 * (low + high);
        fill(members, middle, result.budgets);
        (latency(r, i, result.budgets) <= anchor ? low : high) = middle;
      }
      fill(members, low, result.budgets);
    }
  }
  return result;
}

TuningResult tune(const TuningInput& input, const TuningOptions& options) {
  SB_USER_CHECK(options.p >= 0 && options.p < 1, "p must be in [0, 1), got {}", options.p);
  SB_USER_CHECK(options.target == kEqualCoverage || (options.target >= 0 && options.target <= 1),
                "target must be equal_coverage or a number from 0 to 1, got {}", options.target);
  switch (options.policy) {
    case TuningPolicy::none:
      return {Budgets(input.base.begin(), input.base.end())};
    case TuningPolicy::anchor:
      return tune_anchor(input, options);
    case TuningPolicy::optimal:
      return tune_optimal(input, options);
  }
  throw InternalError("unknown tuning policy");
}

}  // namespace sb
