// What a step reads: its plan, and this rank's micro-batches of it.
#include <algorithm>
#include <iterator>
#include <numeric>

#include "comm/communicator.h"
#include "core/errors.h"
#include "ops/dropout.h"
#include "parallel/ring/context_batch.h"
#include "plan/planner/plan_log.h"
#include "train/trainer.h"

namespace sb {

int64_t Trainer::StepPlan::tokens() const {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

// The global batch is the next global_batch_size sequences of the source, whatever micro-batches they end up in.
Trainer::StepPlan Trainer::receive_plan() {
  const auto span = trace_.span("plan", state_.step + 1);
  StepPlan step;
  announce_steps();
  if (planner_) step.plan = planner_->next();
  if (world_->size() > 1)
    step.plan = unpack_plan(broadcast_text(*world_, leads() ? pack_plan(step.plan) : "", 0), state_.step + 1);
  SB_CHECK(step.plan.step == state_.step + 1 && std::ssize(step.plan.ranks) == config_.parallel.planned_dp(),
           "a plan of step {} for {} ranks at step {}", step.plan.step, step.plan.ranks.size(), state_.step + 1);
  return read_step(std::move(step.plan));
}

void Trainer::announce_steps() {
  if (!planner_) return;
  const int64_t last = std::min(state_.step + 1 + ahead_, std::max(config_.train.max_steps, state_.step + 1));
  for (; next_announced_ <= last; ++next_announced_) {
    planner_->announce(next_announced_, step_batch(config_, parts_.source, state_, next_announced_));
  }
}

Trainer::StepPlan Trainer::read_step(Plan plan) {
  StepPlan step;
  step.plan = std::move(plan);
  std::vector<int64_t> targets;
  for (int64_t i = 0; i < config_.batch.global_batch_size; ++i) {
    const uint64_t position = state_.position + static_cast<uint64_t>(i);
    step.lengths.push_back(parts_.source.length(position));
    targets.push_back(parts_.source.valid_targets(position));
  }
  const std::vector<float> weights = target_weights(config_.batch.loss, targets);
  // One, or in a rehearsal all that this rank stands for, one after the other.
  const size_t own = step.plan.ranks.size() / static_cast<size_t>(config_.parallel.dp);
  const size_t first = own * static_cast<size_t>(model_->grid().dp_rank());
  for (const PlannedRank& planned : std::span(step.plan.ranks).subspan(first, own)) {
    std::vector<MicroBatch> batches = read_micro_batches(planned, weights);
    std::ranges::move(batches, std::back_inserter(step.micro_batches));
    step.order.ahead = std::max(step.order.ahead, planned.ahead);
  }
  step.order.split_backward = step.plan.cut();
  return step;
}

std::vector<MicroBatch> Trainer::read_micro_batches(const PlannedRank& planned, std::span<const float> weights) const {
  std::vector<MicroBatch> batches;
  MicroBatch cut;  // the sequence whose pieces follow each other
  for (const PlannedMicroBatch& next : planned.micro_batches) {
    SB_USER_CHECK(!next.is_piece() || (config_.balance.chunk != 0 && next.end - next.begin <= limits_.max_tokens),
                  "step {}: its plan has pieces of {} tokens, for which no memory is planned; set balance.chunk to "
                  "that of the run that made the plan",
                  state_.step + 1, next.end - next.begin);
    if (!next.is_piece()) {
      batches.push_back(own_part(read_micro_batch(next, weights)));
      continue;
    }
    if (next.begin == 0) cut = read_micro_batch(next, weights);
    batches.push_back(own_part(cut_piece(cut, next.begin, next.end)));
  }
  return batches;
}

MicroBatch Trainer::read_micro_batch(const PlannedMicroBatch& planned, std::span<const float> weights) const {
  std::vector<TokenSequence> sequences;
  std::vector<float> own_weights;
  std::vector<int32_t> sources;
  for (const int64_t position : planned.sequences) {
    sequences.push_back(parts_.source.read(static_cast<uint64_t>(position)));
    own_weights.push_back(weights[static_cast<size_t>(position - static_cast<int64_t>(state_.position))]);
    if (!sources_.empty()) sources.insert(sources.end(), sequences.back().tokens.size(), sequences.back().source);
  }
  std::vector<int> all(sequences.size());
  std::iota(all.begin(), all.end(), 0);
  MicroBatch batch = make_micro_batch(sequences, all, own_weights, parts_.model.vocab_size);
  batch.sources = std::move(sources);
  batch.budgets = planned.budgets;
  batch.dropout_key = dropout_key(config_.train.seed, state_.step + 1);
  return batch;
}

// What this rank has of a micro-batch whose sequences context-parallel ranks share.
MicroBatch Trainer::own_part(MicroBatch batch) const {
  const ParallelOptions& parallel = config_.parallel;
  if (parallel.cp == 1) return batch;
  return context_part(batch, batch_layout(parallel.placement, parallel.cp, config_.attention.selection.block, batch),
                      model_->grid().cp_rank());
}

}  // namespace sb
