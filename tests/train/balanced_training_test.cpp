// SparseBalance in the training loop, on ranks that are threads: what it may change and what not, and that a run can be
// repeated from its log.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "comm/thread_communicator.h"
#include "core/errors.h"
#include "plan/planner/plan_log.h"
#include "run/checkpoint/checkpoint.h"
#include "run/run_directory.h"
#include "tests/data/temporary_folder.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

RunConfig config_of(const std::string& output, const std::vector<std::string>& overrides) {
  const std::string yaml = R"(
model:
  init: {model_type: llama, vocab_size: 32, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
         num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, initializer_range: 0.2}
data:
  synthetic: {task: chunk_recall, vocab_size: 32, length: 900, min_length: 60, chunk: 4}
batch: {global_batch_size: 6, micro_batch_sequences: 1}
attention: {pattern: topk, block: 64, budget: 256, local_blocks: 1}
balance: {batching: sab, ordering: auto, tuning: optimal, profile: h200-analytic}
parallel: {dp: 2}
optimizer: {learning_rate: 1.0e-3, schedule: constant}
train: {max_steps: 8, save_steps: 0, threads: 1, validation_sequences: 2, tensorboard: false}
)";
  std::vector<std::string> all = {"train.output_dir=" + output};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return parse_run_config(yaml, "run.yaml", all);
}

// Trains on as many threads as the configuration has ranks. `printed`: where to.
void train(const RunConfig& config, const std::string& printed = "/dev/null") {
  const int ranks = config.parallel.dp * config.parallel.pp;
  std::FILE* out = std::fopen(printed.c_str(), "w");
  const auto go = [] { return false; };
  if (ranks == 1)
    run_training(config, out, false, go);
  else
    run_thread_ranks(ranks, [&](Communicator& world) { run_training(config, out, false, go, {&world, ranks}); });
  std::fclose(out);
}

std::string final_weights(const std::string& output) {
  return read_bytes(output + "/final/model.safetensors");
}

// Lines of metrics.jsonl that have this key, by step.
std::map<int64_t, nlohmann::json> metrics(const std::string& output, const std::string& key) {
  std::map<int64_t, nlohmann::json> lines;
  std::ifstream in(output + "/metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains(key)) lines[json["step"].get<int64_t>()] = json;
  }
  return lines;
}

std::string plan_texts(const std::string& output) {
  std::string texts;
  for (const auto& [step, logged] : read_plan_log(output + "/plan.jsonl").steps)
    texts += write_plan(logged.plan) + "\n";
  return texts;
}

// A budget of a sequence's own length holds all of its pairs, also when the last block is not full.
TEST(BalancedTraining, WhatIsPlannedDenseRunsDense) {
  TemporaryFolder folder;
  train(config_of(folder.path("run"),
                  {"attention.budget=1024", "attention.dense_below=64", "balance.tuning=none", "train.max_steps=2"}));
  const auto lines = metrics(folder.path("run"), "density");
  ASSERT_EQ(lines.size(), 2u);
  for (const auto& [step, line] : lines) EXPECT_EQ(line["density"].get<double>(), 1.0) << "step " << step;
}

TEST(BalancedTraining, DenseLayersArePlannedDense) {
  TemporaryFolder folder;
  train(config_of(folder.path("run"), {"attention.dense_layers=[1, 1]"}));
  bool tuned = false;
  for (const auto& [step, logged] : read_plan_log(folder.path("run") + "/plan.jsonl").steps)
    for (const PlannedRank& rank : logged.plan.ranks)
      for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
        const size_t n = micro_batch.sequences.size();
        ASSERT_EQ(micro_batch.budgets.size(), 2 * n);
        int64_t dense = 0;
        for (size_t k = 0; k < n; ++k) {
          const int32_t length = micro_batch.budgets[n + k];
          dense += length;
          tuned |= micro_batch.budgets[k] != std::min(256, length);
        }
        EXPECT_EQ(dense, micro_batch.tokens);
      }
  EXPECT_TRUE(tuned);
  for (const auto& [step, line] : metrics(folder.path("run"), "loss")) EXPECT_GT(line["coverage"], 0.5);
  EXPECT_THROW(train(config_of(folder.path("other"), {"attention.dense_layers=[2]"})), UserError);
}

TEST(BalancedTraining, BatchingAndOrderingChangeNothing) {
  TemporaryFolder folder;
  const std::vector<std::string> dense = {"attention.pattern=dense", "balance.tuning=none"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), dense.begin(), dense.end());
    return more;
  };
  train(config_of(folder.path("one"), with({"parallel.dp=1", "balance.batching=in_order", "balance.ordering=none"})));
  const auto expected = metrics(folder.path("one"), "loss");
  ASSERT_EQ(expected.size(), 8u);
  const std::vector<std::pair<std::string, std::vector<std::string>>> runs = {
      {"sab", {}},
      {"two a micro-batch", {"batch.micro_batch_sequences=2"}},
      {"pipeline", {"parallel.dp=1", "parallel.pp=2"}},
      {"grid", {"parallel.pp=2", "train.max_steps=4"}},
  };
  for (const auto& [name, more] : runs) {
    train(config_of(folder.path(name), with(more)));
    for (const auto& [step, line] : metrics(folder.path(name), "loss")) {
      const auto& same = expected.at(step);
      EXPECT_NEAR(line["loss"].get<double>(), same["loss"].get<double>(), 2e-4) << name << " " << step;
      EXPECT_NEAR(line["grad_norm"].get<double>(), same["grad_norm"].get<double>(),
                  2e-3 * same["grad_norm"].get<double>())
          << name << " " << step;
    }
  }
  // Sparse: the first step, where the weights are still the same bit by bit.
  for (const char* name : {"sparse-one", "sparse-sab"})
    train(config_of(folder.path(name), {"train.max_steps=1", "balance.tuning=none",
                                        name == std::string("sparse-one") ? "parallel.dp=1" : "parallel.dp=2"}));
  const auto one = metrics(folder.path("sparse-one"), "loss").at(1),
             sab = metrics(folder.path("sparse-sab"), "loss").at(1);
  EXPECT_NEAR(one["loss"].get<double>(), sab["loss"].get<double>(), 1e-4);
  EXPECT_NEAR(one["grad_norm"].get<double>(), sab["grad_norm"].get<double>(), 1e-3 * one["grad_norm"].get<double>());
  EXPECT_NEAR(one["coverage"].get<double>(), sab["coverage"].get<double>(), 1e-4);
}

// Nothing is learned, so that a plan follows from the settings and the step.
const std::vector<std::string> kTuned = {"parallel.dp=1", "balance.adapt=false", "train.max_steps=5",
                                         "train.save_steps=3"};
std::vector<std::string> untuned() {
  std::vector<std::string> options = kTuned;
  options.emplace_back("balance.tuning=none");
  return options;
}

// Neither by the first start with the new settings nor by one after it, when that ends before its first step.
TEST(BalancedTraining, PlansOfOtherSettingsAreNotTaken) {
  TemporaryFolder folder;
  train(config_of(folder.path("untuned"), untuned()));
  const auto expected = read_plan_log(folder.path("untuned/plan.jsonl")).steps;
  for (const bool ends_early : {false, true}) {
    const std::string output = folder.path(ends_early ? "second" : "first");
    train(config_of(output, kTuned));
    // As if it had been killed after step 5, with the checkpoint of step 3.
    fs::remove_all(checkpoint_path(output, 5));
    fs::remove_all(output + "/final");
    const auto tuned = read_plan_log(output + "/plan.jsonl").steps;
    ASSERT_NE(write_plan(tuned.at(4).plan), write_plan(expected.at(4).plan));
    ::testing::internal::CaptureStderr();
    if (ends_early) {
      const RunDirectory opened(config_of(output, untuned()));
    }
    train(config_of(output, untuned()));
    const std::string log = ::testing::internal::GetCapturedStderr();
    EXPECT_NE(log.find("steps from 4 on are planned again, because balance.tuning was optimal and is now none"),
              std::string::npos)
        << log;
    const auto steps = read_plan_log(output + "/plan.jsonl").steps;
    ASSERT_EQ(steps.size(), 5u);
    for (const auto& [step, logged] : steps)
      EXPECT_EQ(write_plan(logged.plan), write_plan((step <= 3 ? tuned : expected).at(step).plan)) << step;
  }
}

// A run's plans stay as long as those that are to be replayed in their place are not there.
TEST(BalancedTraining, AReplayThatCannotBeTakesNoPlans) {
  TemporaryFolder folder;
  const std::string output = folder.path("run");
  train(config_of(output, kTuned));
  fs::remove_all(checkpoint_path(output, 5));
  fs::remove_all(output + "/final");
  const std::string plans = plan_texts(output);
  std::ofstream(folder.path("empty.jsonl"));
  for (const auto& [name, reason] :
       {std::pair{"none.jsonl", "cannot be read"}, {"empty.jsonl", "no plan for step 1"}}) {
    std::vector<std::string> replay = kTuned;
    replay.push_back("balance.replay=" + folder.path(name));
    try {
      train(config_of(output, replay));
      FAIL() << name;
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
    }
    EXPECT_EQ(plan_texts(output), plans);
  }
  train(config_of(output, kTuned));
  EXPECT_EQ(plan_texts(output), plans);
}

TEST(BalancedTraining, PlansOfAnAttemptThatFinishedNoStepAreNotTaken) {
  TemporaryFolder folder;
  train(config_of(folder.path("untuned"), untuned()));
  const std::string output = folder.path("run");
  train(config_of(output, kTuned));
  for (const char* name : {"checkpoint-3", "checkpoint-5", "final", "metrics.jsonl"})
    fs::remove_all(output + "/" + name);
  train(config_of(output, untuned()));
  EXPECT_EQ(plan_texts(output), plan_texts(folder.path("untuned")));
}

TEST(BalancedTraining, ARunRepeatsFromItsLog) {
  for (const auto& [dp, pp] : {std::pair{2, 1}, {1, 2}}) {
    TemporaryFolder folder;
    const std::vector<std::string> grid = {fmt::format("parallel.dp={}", dp), fmt::format("parallel.pp={}", pp)};
    const auto with = [&](std::vector<std::string> more) {
      more.insert(more.begin(), grid.begin(), grid.end());
      return more;
    };
    train(config_of(folder.path("first"), with({"train.save_steps=3"})));
    // Replayed as a whole.
    train(config_of(folder.path("second"), with({"balance.replay=" + folder.path("first/plan.jsonl")})));
    EXPECT_EQ(plan_texts(folder.path("second")), plan_texts(folder.path("first")));
    EXPECT_EQ(final_weights(folder.path("second")), final_weights(folder.path("first")));
    // As after a crash between steps 6 and 8: the checkpoint of step 3 is there, and the log up to the end.
    for (const char* gone : {"first/checkpoint-6", "first/checkpoint-8", "first/final"})
      fs::remove_all(folder.path(gone));
    const std::string plans = plan_texts(folder.path("first"));
    train(config_of(folder.path("first"), with({"train.save_steps=3"})));
    EXPECT_EQ(plan_texts(folder.path("first")), plans);
    EXPECT_EQ(final_weights(folder.path("first")), final_weights(folder.path("second")));
  }
}

// "" when it is trained as configured.
std::string refusal(const RunConfig& config) {
  try {
    train(config);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

// The log of a run, with the plan of one step changed.
void write_changed(const fs::path& log, int64_t step, const std::function<void(Plan&)>& change, const fs::path& file) {
  PlanLog changed(file);
  for (auto& [number, logged] : read_plan_log(log).steps) {
    if (number == step) change(logged.plan);
    changed.plan(logged);
  }
}

// Before the run has a folder, whichever of its steps it is.
TEST(BalancedTraining, PlansThatDoNotFitAreRefusedAtTheStart) {
  TemporaryFolder folder;
  const std::string log = folder.path("first/plan.jsonl"), output = folder.path("second");
  train(config_of(folder.path("first"), {}));
  const auto changed = [&](const char* name, const std::function<void(Plan&)>& change) {
    write_changed(log, 6, change, folder.path(name));
    return folder.path(name);
  };
  const auto first_micro_batch = [](Plan& plan) -> PlannedMicroBatch& { return plan.ranks[0].micro_batches[0]; };
  const std::string tokens = changed("tokens.jsonl", [&](Plan& plan) { ++first_micro_batch(plan).tokens; });
  const std::string id = changed("id.jsonl", [&](Plan& plan) { first_micro_batch(plan).sequences[0] = 99; });
  const std::string rank = changed("rank.jsonl", [](Plan& plan) { plan.ranks.pop_back(); });
  const auto kept = [&](const char* name, const std::function<bool(int64_t)>& keep) {
    PlanLog written(folder.path(name));
    for (const auto& [step, logged] : read_plan_log(log).steps)
      if (keep(step)) written.plan(logged);
    return folder.path(name);
  };
  const std::string hole = kept("hole.jsonl", [](int64_t step) { return step != 6; });
  const std::string late = kept("late.jsonl", [](int64_t step) { return step > 1; });
  const std::string empty = kept("empty.jsonl", [](int64_t) { return false; });
  const std::string cure = "balance.replay needs the log of a run with the same data, batches, layers and ranks";

  struct Case {
    std::string replay;
    std::vector<std::string> overrides;
    std::vector<std::string> said;
  };
  const Case cases[] = {
      {log, {"parallel.dp=1"}, {log + ", line 1: the plan of step 1 is for 2 data-parallel ranks, not 1", cure}},
      {log, {"parallel.dp=1", "parallel.pp=2"}, {"the plan of step 1 is for 2 data-parallel ranks, not 1", cure}},
      {log, {"parallel.pp=2"}, {"the plan of step 1 is for 1 pipeline stages, not 2", cure}},
      {log, {"model.init.num_hidden_layers=3"}, {"the plan of step 1 is for 2 layers, not 3", cure}},
      {log, {"train.seed=7"}, {"the plan of step 1 counts ", "it was made for other data", cure}},
      {log, {"batch.global_batch_size=8"}, {"the plan of step 1 has 6 sequences, but the step has 8", cure}},
      {hole, {}, {hole + ": has no plan for step 6; it has steps 1 to 8. balance.replay needs one for every step"}},
      {late, {}, {late + ": has no plan for step 1; it has steps 2 to 8. balance.replay needs"}},
      {empty, {}, {empty + ": has no plan for step 1; it has none. balance.replay needs"}},
      {tokens, {}, {tokens + ", line 6: the plan of step 6 counts ", "it was made for other data", cure}},
      {id,
       {},
       {id + ", line 6: the plan of step 6 has sequence 99, which does not occur exactly once",
        "it was made for other data", cure}},
      {rank, {}, {rank + ", line 6: the plan of step 6 is for 1 data-parallel ranks, not 2", cure}},
  };
  for (const Case& c : cases) {
    std::vector<std::string> overrides = c.overrides;
    overrides.push_back("balance.replay=" + c.replay);
    const std::string message = refusal(config_of(output, overrides));
    for (const std::string& part : c.said) EXPECT_NE(message.find(part), std::string::npos) << part << "\n" << message;
    EXPECT_FALSE(fs::exists(output)) << message;
  }
  // Steps that the run does not have may be as they are.
  EXPECT_EQ(refusal(config_of(output, {"balance.replay=" + tokens, "train.max_steps=5"})), "");
}

// It was written again when the run went on from a checkpoint before it.
TEST(BalancedTraining, AStepPlannedTwiceIsJudgedByItsLastPlan) {
  TemporaryFolder folder;
  const std::string log = folder.path("first/plan.jsonl");
  train(config_of(folder.path("first"), {"train.max_steps=2"}));
  const LoggedStep fits = read_plan_log(log).steps.at(2);
  LoggedStep other = fits;
  ++other.plan.ranks[0].micro_batches[0].tokens;
  for (const bool fits_last : {true, false}) {
    const std::string twice = folder.path(fits_last ? "right.jsonl" : "wrong.jsonl");
    fs::copy(log, twice);
    PlanLog more(twice);
    for (const bool fit : {!fits_last, fits_last}) more.plan(fit ? fits : other);
    const std::string message =
        refusal(config_of(folder.path("second"), {"train.max_steps=2", "balance.replay=" + twice}));
    if (fits_last)
      EXPECT_EQ(message, "");
    else
      EXPECT_NE(message.find("line 6: the plan of step 2 counts"), std::string::npos) << message;
    fs::remove_all(folder.path("second"));
  }
}

// Plans are read again at their step.
TEST(BalancedTraining, APipeIsNoReplay) {
  TemporaryFolder folder;
  ASSERT_EQ(::mkfifo(folder.path("pipe").c_str(), 0600), 0);
  for (const std::string& path : {folder.path("pipe"), folder.path("")}) {
    const std::string message = refusal(config_of(folder.path("run"), {"balance.replay=" + path}));
    EXPECT_NE(message.find("is not a file; name the plan.jsonl itself"), std::string::npos) << message;
  }
  EXPECT_FALSE(fs::exists(folder.path("run")));
}

// Half of another run is no run to repeat; it is refused before there is a folder, and the cure makes it whole.
TEST(BalancedTraining, AReplayNeedsACompleteLog) {
  TemporaryFolder folder;
  const std::string log = folder.path("first/plan.jsonl"), output = folder.path("second");
  train(config_of(folder.path("first"), {}));
  const std::string text = read_bytes(log), cut = folder.path("cut.jsonl");
  const size_t sixth = text.find("{\"step\":6,");
  ASSERT_NE(sixth, std::string::npos);
  std::ofstream(cut) << text.substr(0, sixth + 100);
  const std::string refused = refusal(config_of(output, {"balance.replay=" + cut}));
  EXPECT_NE(refused.find("has no plan for step 6; it has steps 1 to 5; " + cut + ", line 11: the line is not finished"),
            std::string::npos)
      << refused;
  EXPECT_NE(refused.find("lower train.max_steps"), std::string::npos) << refused;
  EXPECT_FALSE(fs::exists(output));
  train(config_of(output, {"train.max_steps=5", "balance.replay=" + cut}));
  const auto first = metrics(folder.path("first"), "loss"), second = metrics(output, "loss");
  ASSERT_EQ(second.size(), 5u);
  for (const auto& [step, line] : second) EXPECT_EQ(line["loss"], first.at(step)["loss"]) << step;
}

// A run of other settings does not fit its plans either, but the folder is what is to be changed.
TEST(BalancedTraining, AFolderOfAnotherRunIsNamedBeforeItsReplay) {
  TemporaryFolder folder;
  const std::string log = folder.path("copy.jsonl"), output = folder.path("first");
  train(config_of(output, {"train.max_steps=2"}));
  fs::copy(output + "/plan.jsonl", log);
  for (const auto& [option, said] : {std::pair{"train.seed=7", "already holds another run:\n  train.seed: 1 there"},
                                     {"train.resume=never", "already holds a run and train.resume is never"}}) {
    const std::string message = refusal(config_of(output, {option, "parallel.dp=1", "balance.replay=" + log}));
    EXPECT_NE(message.find(said), std::string::npos) << message;
  }
}

// All of its plans are checked, wherever it resumes, and what is there stays as it is.
TEST(BalancedTraining, AResumedReplayIsCheckedAsAWhole) {
  TemporaryFolder folder;
  const std::string log = folder.path("first/plan.jsonl"), output = folder.path("second");
  train(config_of(folder.path("first"), {}));
  train(config_of(output, {"train.max_steps=4", "balance.replay=" + log}));
  const std::string before = read_bytes(output + "/run.yaml"), plans = plan_texts(output);
  for (const int64_t step : {3, 7}) {
    const std::string changed = folder.path(fmt::format("{}.jsonl", step));
    write_changed(
        log, step, [](Plan& plan) { ++plan.ranks[0].micro_batches[0].tokens; }, changed);
    const std::string message = refusal(config_of(output, {"balance.replay=" + changed}));
    EXPECT_NE(message.find(fmt::format("line {0}: the plan of step {0} counts", step)), std::string::npos) << message;
  }
  EXPECT_EQ(read_bytes(output + "/run.yaml"), before);
  EXPECT_EQ(plan_texts(output), plans);
  train(config_of(output, {"balance.replay=" + log}));
  EXPECT_EQ(final_weights(output), final_weights(folder.path("first")));
}

TEST(BalancedTraining, WithoutAdaptionRunsAreEqual) {
  TemporaryFolder folder;
  for (const char* name : {"a", "b"}) train(config_of(folder.path(name), {"balance.adapt=off", "train.max_steps=5"}));
  EXPECT_EQ(plan_texts(folder.path("a")), plan_texts(folder.path("b")));
  EXPECT_EQ(final_weights(folder.path("a")), final_weights(folder.path("b")));
}

TEST(BalancedTraining, NoBudgetIsAboveTheLargest) {
  TemporaryFolder folder;
  const auto most = [&](const std::string& name) {  // of those that leave something out
    int32_t budget = 0;
    for (const auto& [step, logged] : read_plan_log(folder.path(name + "/plan.jsonl")).steps)
      for (const PlannedRank& rank : logged.plan.ranks)
        for (const PlannedMicroBatch& micro_batch : rank.micro_batches)
          for (const int32_t own : micro_batch.budgets)
            if (own < micro_batch.tokens) budget = std::max(budget, own);
    return budget;
  };
  // Everything is raised to the slowest micro-batch. By moments: with the scores of planes counted, what is raised here
  // is raised to all pairs.
  const auto with = [](std::vector<std::string> more) {
    for (const char* always : {"attention.score=moments", "balance.tuning=anchor", "balance.anchor=max",
                               "balance.adapt=off", "train.max_steps=3"})
      more.push_back(always);
    return more;
  };
  train(config_of(folder.path("free"), with({})));
  ASSERT_GT(most("free"), 256);
  train(config_of(folder.path("bound"), with({"balance.max_budget=256"})));
  EXPECT_LE(most("bound"), 256);
  // Nor do plans of another run bring one for which there is no memory.
  try {
    train(config_of(folder.path("replayed"),
                    with({"balance.max_budget=256", "balance.replay=" + folder.path("free/plan.jsonl")})));
    ADD_FAILURE();
  } catch (const UserError& error) {
    EXPECT_TRUE(std::string(error.what()).ends_with("; raise balance.max_budget")) << error.what();
  }
}

TEST(BalancedTraining, BudgetsMoveAndValidationKeepsItsOwn) {
  TemporaryFolder folder;
  train(config_of(folder.path("tuned"), {"optimizer.learning_rate=0"}));
  train(config_of(folder.path("plain"), {"optimizer.learning_rate=0", "balance.tuning=none"}));
  bool moved = false;
  for (const auto& [step, logged] : read_plan_log(folder.path("tuned/plan.jsonl")).steps)
    for (const PlannedRank& rank : logged.plan.ranks)
      for (const PlannedMicroBatch& micro_batch : rank.micro_batches)
        for (const int32_t budget : micro_batch.budgets)
          moved = moved || (budget != 256 && budget < micro_batch.tokens);
  EXPECT_TRUE(moved);
  const auto tuned = metrics(folder.path("tuned"), "validation_loss"),
             plain = metrics(folder.path("plain"), "validation_loss");
  ASSERT_FALSE(tuned.empty());
  EXPECT_EQ(tuned.rbegin()->second["validation_loss"], plain.rbegin()->second["validation_loss"]);
  const auto last = metrics(folder.path("tuned"), "predicted_step_ms");
  ASSERT_EQ(last.size(), 8u);
  for (const char* key : {"rank_imbalance", "imbalance", "bubble_percent", "planning_ms", "planning_percent", "budget",
                          "predicted_coverage", "measured_makespan_ms", "coverage"})
    EXPECT_TRUE(last.at(8).contains(key)) << key;
}

// The batch that also runs in order leaves no trace in the training, nor in the thresholds that attention learns.
TEST(BalancedTraining, ComparingStepsChangesNothing) {
  TemporaryFolder folder;
  const auto with = [](const std::vector<std::string>& more) {
    std::vector<std::string> all = {"attention.pattern=mass", "balance.adapt=false", "train.max_steps=6"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  train(config_of(folder.path("plain"), with({})));
  train(config_of(folder.path("compared"), with({"balance.compare_steps=2"})), folder.path("printed"));
  EXPECT_EQ(final_weights(folder.path("compared")), final_weights(folder.path("plain")));
  EXPECT_EQ(plan_texts(folder.path("compared")), plan_texts(folder.path("plain")));
  const auto lines = metrics(folder.path("compared"), "compared_in_order_ms");
  ASSERT_EQ(lines.size(), 3u);
  for (const auto& [step, line] : lines) {
    EXPECT_EQ(step % 2, 0);
    EXPECT_GT(line["compared_in_order_ms"], 0.0);
    EXPECT_GT(line["compared_balanced_ms"], 0.0);
  }
  EXPECT_TRUE(metrics(folder.path("plain"), "compared_in_order_ms").empty());
  EXPECT_NE(read_bytes(folder.path("printed")).find("(3 steps compared, without the optimizer update)"),
            std::string::npos);
  // Nor does a stop after a step that ran in order second.
  train(config_of(folder.path("resumed"), with({"balance.compare_steps=2", "train.max_steps=4"})));
  train(config_of(folder.path("resumed"), with({"balance.compare_steps=2"})));
  EXPECT_EQ(final_weights(folder.path("resumed")), final_weights(folder.path("plain")));
}

// Who runs second finds caches warm: in order goes before the step and after its update, in turns.
TEST(BalancedTraining, ComparedStepsTakeTurnsInWhoRunsFirst) {
  TemporaryFolder folder;
  train(config_of(folder.path("run"), {"balance.compare_steps=2", "train.trace=true"}));
  std::map<int64_t, std::map<std::string, double>> begins;  // of rank 0, by step
  for (const auto& event : nlohmann::json::parse(read_bytes(folder.path("run/trace.json"))))
    if (event["ph"] == "X" && event["pid"] == 0 && (event["name"] == "in order" || event["name"] == "update"))
      begins[event["args"]["n"]][event["name"]] = event["ts"];
  ASSERT_EQ(begins.size(), 8u);
  for (const auto& [step, begin] : begins) {
    ASSERT_TRUE(begin.contains("update")) << step;
    ASSERT_EQ(begin.contains("in order"), step % 2 == 0) << step;
    if (step % 2 != 0) continue;
    EXPECT_EQ(begin.at("in order") < begin.at("update"), step % 4 == 2) << step;
  }
}

TEST(BalancedTraining, ACurriculumIsPlannedWithTheLengthsItHas) {
  TemporaryFolder folder;
  const auto with = [](std::vector<std::string> more) {
    for (const char* always : {"data.synthetic.min_length=0", "data.synthetic.length=512", "train.max_steps=10",
                               "data.synthetic.curriculum={start_length: 64, threshold: 0.01, min_observations: 1}"})
      more.push_back(always);
    return more;
  };
  train(config_of(folder.path("run"), with({})));
  const auto lines = metrics(folder.path("run"), "loss");
  ASSERT_EQ(lines.size(), 10u);
  EXPECT_EQ(lines.at(1)["longest_sequence"], 64);
  EXPECT_GT(lines.at(10)["longest_sequence"].get<int64_t>(), 64);

  // Its plans fit again, though at the start nobody knows the lengths that they are of; ranks are known then.
  const std::string replay = "balance.replay=" + folder.path("run/plan.jsonl");
  EXPECT_EQ(refusal(config_of(folder.path("again"), with({replay}))), "");
  EXPECT_EQ(final_weights(folder.path("again")), final_weights(folder.path("run")));
  EXPECT_NE(refusal(config_of(folder.path("other"), with({replay, "parallel.dp=1"}))).find("is for 2 data-parallel"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(folder.path("other")));
  // And which sequences a step has.
  EXPECT_NE(refusal(config_of(folder.path("other"), with({replay, "batch.global_batch_size=4"}))).find("has sequence"),
            std::string::npos);
  EXPECT_FALSE(fs::exists(folder.path("other")));
}

TEST(BalancedTraining, MemoryIsPlannedForTunedBudgets) {
  SparseAttention::Options options;
  options.selection.budget = 1024;
  options.layers = 1;
  const AttentionShape shape{4, 2, 64, 1.0f};
  const int64_t plain = SparseAttention(options).state_bytes(shape, 65536);
  options.largest_budget = 65536;
  // Every row may list all 512 blocks, three bytes per entry and four in the columns.
  EXPECT_GE(SparseAttention(options).state_bytes(shape, 65536), int64_t{65536} / 16 * 2 * 512 * 7);
  EXPECT_LT(plain, int64_t{65536} / 16 * 2 * 512 * 7);
}

TEST(PlanMessage, DamagedOrLateOnesAreRefused) {
  Plan plan;
  plan.step = 7;
  plan.layers = 1;
  plan.ranks.resize(1);
  plan.ranks[0].micro_batches.resize(1);
  plan.ranks[0].micro_batches[0] = {{3}, 10, {10}, {1.0}, {2.0}};
  const std::string message = pack_plan(plan);
  EXPECT_EQ(write_plan(unpack_plan(message, 7)), write_plan(plan));
  const auto error_of = [](const std::string& text, int64_t step) -> std::string {
    try {
      unpack_plan(text, step);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(error_of(message, 8).find("plan of step 7 arrived at the start of step 8"), std::string::npos);
  for (size_t at = 0; at < message.size(); ++at) {
    std::string damaged = message;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    EXPECT_NE(error_of(damaged, 7), "") << at;
  }
  for (const size_t length : {size_t{0}, size_t{5}, message.size() / 2, message.size() - 1})
    EXPECT_NE(error_of(message.substr(0, length), 7), "") << length;
}

}  // namespace
}  // namespace sb
