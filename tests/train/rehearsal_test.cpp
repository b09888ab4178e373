// A cluster rehearsed on fewer ranks learns what the cluster itself learns, and is told its predicted times.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "plan/planner/plan_log.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/rank_runs.h"
#include "tests/train/tiny_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using Overrides = std::vector<std::string>;

const Overrides kReal = {"parallel.dp=2", "parallel.pp=2"};
const Overrides kRehearsed = {"parallel.rehearse={dp: 2, pp: 2}"};

RunConfig run_of(const fs::path& directory, const Overrides& where, const Overrides& more = {}) {
  Overrides all = {"attention={pattern: topk, score: moments, block: 64, budget: 256, local_blocks: 1}",
                   "data.synthetic={task: chunk_recall, vocab_size: 16, length: 700, min_length: 60, chunk: 4}",
                   "batch={global_batch_size: 6, micro_batch_sequences: 1}",
                   "balance={batching: sab, ordering: auto, tuning: optimal, profile: h200-analytic}",
                   "train.threads=1",
                   "train.max_steps=6",
                   "train.save_steps=0"};
  all.insert(all.end(), where.begin(), where.end());
  all.insert(all.end(), more.begin(), more.end());
  return tiny_run(directory, all);
}

std::vector<std::string> plans_of(const fs::path& run) {
  std::vector<std::string> plans;
  for (const auto& [step, logged] : read_plan_log(run / "plan.jsonl").steps) plans.push_back(write_plan(logged.plan));
  return plans;
}

void expect_same_learning(const fs::path& got, const fs::path& expected) {
  EXPECT_EQ(plans_of(got), plans_of(expected));
  EXPECT_EQ(plans_of(got).size(), 6u);
  expect_same_record(
      got, expected,
      {{"step", "tokens", "targets", "micro_batches"}, {"loss", "grad_norm", "density", "validation_loss"}});
}

TEST(Rehearsal, LearnsWhatTheClusterLearns) {
  ScratchDirectory scratch;
  const std::vector<std::pair<std::string, Overrides>> ways = {
      {"whole", {"balance.adapt=false"}},
      {"pieces", {"balance.adapt=false", "balance.chunk=128", "batch.micro_batch_tokens=1024"}},
      {"in-order", {"balance.batching=in_order", "balance.ordering=none", "balance.tuning=none"}},
      {"dense", {"attention.pattern=dense", "balance.tuning=none", "balance.adapt=false"}}};
  for (const auto& [name, more] : ways) {
    SCOPED_TRACE(name);
    const fs::path real = scratch / (name + "-real"), rehearsed = scratch / (name + "-rehearsed");
    train_on_ranks(run_of(real, kReal, more));
    train_on_ranks(run_of(rehearsed, kRehearsed, more));
    if (name == "in-order")  // plans carry corrected predictions there; what they arrange is the same
      expect_same_record(rehearsed, real, {{"step", "micro_batches"}, {"loss", "grad_norm", "density"}});
    else
      expect_same_learning(rehearsed, real);
  }
}

TEST(Rehearsal, RepeatsAnAdaptiveRunFromItsPlans) {
  ScratchDirectory scratch;
  for (const Overrides& chunk : {Overrides{}, Overrides{"balance.chunk=128"}}) {
    const fs::path real = scratch / fmt::format("real-{}", chunk.size()),
                   rehearsed = scratch / fmt::format("rehearsed-{}", chunk.size());
    train_on_ranks(run_of(real, kReal, chunk));
    Overrides more = chunk;
    more.push_back("balance.replay=" + (real / "plan.jsonl").string());
    train_on_ranks(run_of(rehearsed, kRehearsed, more));
    expect_same_learning(rehearsed, real);
  }
}

TEST(Rehearsal, SeveralRanksShareTheClusters) {
  ScratchDirectory scratch;
  const Overrides four = {"parallel.rehearse={dp: 4, pp: 2}", "balance.adapt=false"};
  train_on_ranks(run_of(scratch / "one", four));
  train_on_ranks(run_of(scratch / "two", four, {"parallel.dp=2"}));
  expect_same_learning(scratch / "two", scratch / "one");
}

TEST(Rehearsal, PredictsTheClusterAndLearnsNoTimesHere) {
  ScratchDirectory scratch;
  // Budgets stay: what else is learned, times, must not be.
  const TrainSummary summary = train_on_ranks(run_of(scratch / "run", kRehearsed, {"balance.tuning=none"}));
  train_on_ranks(run_of(scratch / "fixed", kRehearsed, {"balance.tuning=none", "balance.adapt=false"}));
  const auto record = read_plan_log(scratch / "run" / "plan.jsonl"),
             fixed = read_plan_log(scratch / "fixed" / "plan.jsonl");
  double seconds = 0;
  int64_t steps = 0;
  for (const nlohmann::json& line : metrics_of(scratch / "run")) {
    if (!line.contains("loss")) continue;
    ++steps;
    const LoggedStep& logged = record.steps.at(line["step"].get<int64_t>());
    EXPECT_EQ(logged.plan.ranks.size(), 2u);
    EXPECT_EQ(logged.plan.ranks[0].micro_batches[0].forward_us.size(), 2u);
    EXPECT_NEAR(line["cluster_step_ms"].get<double>(), logged.plan.makespan_us / 1e3, 1e-6);
    EXPECT_NEAR(line["cluster_step_ms"].get<double>(), fixed.steps.at(line["step"]).plan.makespan_us / 1e3, 1e-6);
    EXPECT_GE(line["predicted_in_order_ms"].get<double>(), line["cluster_step_ms"].get<double>());
    for (const char* measured : {"predicted_step_ms", "measured_makespan_ms", "bubble_percent", "rank_imbalance"})
      EXPECT_FALSE(line.contains(measured)) << measured;
    seconds += line["cluster_step_ms"].get<double>() / 1e3;
  }
  EXPECT_EQ(steps, 6);
  EXPECT_NEAR(summary.balance.cluster_seconds, seconds, 1e-9);
}

TEST(Rehearsal, RefusesWhatItCannotStandFor) {
  ScratchDirectory scratch;
  const auto error = [&](const Overrides& more) {
    return user_error_of([&] { run_of(scratch / "no", kRehearsed, more); });
  };
  EXPECT_EQ(error({}), "");
  EXPECT_NE(error({"parallel.rehearse.pp=0"}).find("both dp and pp"), std::string::npos);
  EXPECT_NE(error({"parallel.pp=2"}).find("parallel.pp: 1"), std::string::npos);
  EXPECT_NE(error({"parallel.dp=4"}).find("divided equally"), std::string::npos);
  EXPECT_NE(error({"parallel.rehearse.dp=8"}).find("global_batch_size"), std::string::npos);
  EXPECT_NE(error({"parallel.rehearse.pp=3"}).find("3 stages for 2 layers"), std::string::npos);
  EXPECT_NE(error({"balance={batching: in_order, ordering: none, tuning: none, profile: ''}"}).find("for which GPU"),
            std::string::npos);
  EXPECT_NE(error({"balance.chunk=auto"}).find("size of a piece in tokens"), std::string::npos);
  EXPECT_NE(error({"balance.compare_steps=2"}).find("compare_steps"), std::string::npos);
  EXPECT_NE(error({"train.recompute=chunk", "balance.chunk=128"}).find("recompute"), std::string::npos);
}

}  // namespace
}  // namespace sb
