#include "plan/planner/balanced_planner.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "core/errors.h"
#include "parallel/ring/context_layout.h"
#include "plan/coverage/cautious_coverage.h"
#include "tests/data/temporary_folder.h"
#include "tests/plan/planner/planned_steps.h"
#include "train/make_planner.h"

namespace sb::test {
namespace {

double metric(const std::vector<Metric>& metrics, const std::string& name) {
  for (const Metric& one : metrics)
    if (one.name == name) return one.value;
  ADD_FAILURE() << "no metric " << name;
  return 0;
}

// Losses against the base budget count more than estimated, gains less; what is dense is no estimate.
TEST(CautiousCoverage, DoubtsWhatIsNotAtTheBaseBudget) {
  const auto inner = layered_coverage(kLayers);
  AttentionSpec spec;
  spec.budget = 4096;
  const CautiousCoverage cautious(*inner, spec);
  const std::vector<int32_t> budgets = {1024, 4096, 9000, 40000, 50000};
  std::vector<double> logs;
  for (const int32_t budget : budgets) logs.push_back(std::log(budget));
  const Sequence sequence{7, 40000}, short_one{8, 3000};
  std::vector<double> all(kLayers * budgets.size());
  cautious.evaluate_layers(sequence, kLayers, budgets, logs, all);
  for (int layer = 0; layer < kLayers; ++layer) {
    const double base = inner->at(sequence, layer, 4096);
    const double* values = all.data() + static_cast<size_t>(layer) * budgets.size();
    EXPECT_NEAR(values[0], base - 1.15 * (base - inner->at(sequence, layer, 1024)), 1e-12);
    EXPECT_NEAR(values[1], base, 1e-12);
    EXPECT_NEAR(values[2], base + 0.85 * (inner->at(sequence, layer, 9000) - base), 1e-12);
    EXPECT_EQ(values[3], 1.0);
    EXPECT_EQ(values[4], 1.0);
    for (size_t i = 0; i < budgets.size(); ++i)
      EXPECT_NEAR(cautious.at(sequence, layer, budgets[i]), values[i], 1e-12) << layer << " " << budgets[i];
    EXPECT_EQ(cautious.at(short_one, layer, 1024), inner->at(short_one, layer, 1024)) << "it always runs dense";
  }
  std::vector<double> each(kLayers);
  cautious.evaluate_each(sequence, std::span(budgets).first(kLayers), std::span(logs).first(kLayers), each);
  for (size_t layer = 0; layer < kLayers; ++layer)
    EXPECT_NEAR(each[layer], all[layer * budgets.size() + layer], 1e-12) << layer;
}

TEST(BalancedPlanner, AReplayedPlanWithoutBudgetsHasTheConfiguredOnes) {
  TemporaryFolder folder;
  BalancedPlannerOptions written = options();
  written.log = std::filesystem::path(folder.path("plan.jsonl"));
  run(*planner(written), written, 1, 3, steady);
  BalancedPlannerOptions replay = options();
  replay.spec.dense_layers = {1};
  replay.replay = std::filesystem::path(folder.path("without.jsonl"));
  {
    PlanLog log(replay.replay);
    for (auto [step, logged] : read_plan_log(written.log).steps) {
      for (PlannedRank& rank : logged.plan.ranks)
        for (PlannedMicroBatch& micro_batch : rank.micro_batches) micro_batch.budgets.clear();
      log.plan(logged);
    }
  }
  const auto again = planner(replay);
  for (int64_t step = 1; step <= 3; ++step) again->announce(step, batch_of(step));
  for (int64_t step = 1; step <= 3; ++step) {
    const Plan plan = again->next();
    const std::vector<Sequence> sequences = batch_of(step);
    for (const PlannedRank& rank : plan.ranks)
      for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
        const size_t n = micro_batch.sequences.size();
        ASSERT_EQ(micro_batch.budgets.size(), n * kLayers);
        for (size_t k = 0; k < n; ++k) {
          const int64_t tokens = sequences[static_cast<size_t>(micro_batch.sequences[k] - sequences[0].id)].tokens;
          for (size_t layer = 0; layer < kLayers; ++layer)
            EXPECT_EQ(micro_batch.budgets[layer * n + k], layer == 1 ? tokens : std::min<int64_t>(tokens, 4096));
        }
      }
    again->learn(measure(plan, replay, 1.7));
  }
}

TEST(BalancedPlanner, EverySequenceRunsOnceUnderTheCap) {
  for (const auto& [dp, pp] : {std::pair{2, 1}, {1, 2}, {2, 2}}) {
    const BalancedPlannerOptions chosen = options(dp, pp);
    const auto planned = planner(chosen);
    for (const std::string& text : run(*planned, chosen, 1, 6, steady)) {
      const Plan plan = parse_plan(text, "plan");
      ASSERT_EQ(static_cast<int>(plan.ranks.size()), dp);
      std::set<int64_t> seen;
      for (const PlannedRank& rank : plan.ranks)
        for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
          EXPECT_LE(micro_batch.tokens, chosen.plan.batching.micro_batch_tokens);
          for (const int64_t id : micro_batch.sequences) EXPECT_TRUE(seen.insert(id).second);
        }
      EXPECT_EQ(seen.size(), 8u);
      EXPECT_EQ(*seen.begin(), (plan.step - 1) * 8);
      EXPECT_LE(plan.makespan_us, plan.baseline_us * (1 + 1e-9));
    }
  }
}

TEST(BalancedPlanner, PlansFollowFromWhatWasMeasured) {
  const BalancedPlannerOptions chosen = options();
  const auto slowness = [](int64_t step) { return 1.0 + 0.1 * static_cast<double>(step % 5); };
  EXPECT_EQ(run(*planner(chosen), chosen, 1, 12, slowness), run(*planner(chosen), chosen, 1, 12, slowness));
}

TEST(BalancedPlanner, AMeasurementCountsThreeStepsLater) {
  const BalancedPlannerOptions chosen = options();
  const auto usual = run(*planner(chosen), chosen, 1, 8, steady);
  const auto disturbed =
      run(*planner(chosen), chosen, 1, 8, [](int64_t step) { return step == 4 ? 3.0 : steady(step); });
  for (size_t i = 0; i < 6; ++i) EXPECT_EQ(usual[i], disturbed[i]) << "step " << i + 1;
  EXPECT_NE(usual[6], disturbed[6]);  // step 7 is the first that knows of step 4
}

TEST(BalancedPlanner, WithoutAdaptionAPlanFollowsFromTheStep) {
  BalancedPlannerOptions chosen = options();
  chosen.adapt = false;
  const auto planned = planner(chosen);
  const auto all = run(*planned, chosen, 1, 8, [](int64_t step) { return static_cast<double>(step); });
  EXPECT_EQ(planned->state(), "");
  const auto later = run(*planner(chosen), chosen, 5, 8, steady);
  EXPECT_EQ(std::vector(all.begin() + 4, all.end()), later);
}

TEST(BalancedPlanner, GoesOnFromItsState) {
  const BalancedPlannerOptions chosen = options();
  const auto slowness = [](int64_t step) { return 1.0 + 0.2 * static_cast<double>(step % 3); };
  const auto whole = run(*planner(chosen), chosen, 1, 11, slowness);
  const auto first = planner(chosen);
  run(*first, chosen, 1, 6, slowness);
  const auto second = planner(chosen);
  second->restore_state(first->state());
  const auto rest = run(*second, chosen, 7, 11, slowness);
  EXPECT_EQ(std::vector(whole.begin() + 6, whole.end()), rest);
  EXPECT_NE(error_of([&] { planner(chosen)->restore_state("{}"); }).find("balance state"), std::string::npos);
  std::string damaged = first->state();
  damaged.replace(damaged.find("corrections_ppm"), 15, "corrections_ppx");
  EXPECT_NE(error_of([&] { planner(chosen)->restore_state(damaged); }).find("corrections_ppm"), std::string::npos);
}

TEST(BalancedPlanner, GoesOnFromCoverageThatWasMeasuredInOrder) {
  const BalancedPlannerOptions chosen = options();
  const auto first = planner(chosen);
  run(*first, chosen, 1, 6, steady);
  ASSERT_FALSE(first->learned().coverage.curves().empty());
  InOrderPlanner plain(1, kLayers, {2, 10});
  plain.restore_state(first->state());
  EXPECT_EQ(*plain.coverage(), first->learned().coverage);
  const auto second = planner(chosen);
  second->restore_state(plain.state());
  BalanceState expected;
  expected.coverage = first->learned().coverage;
  EXPECT_EQ(second->learned(), expected) << "nothing is known of times and budgets";
  EXPECT_EQ(run(*second, chosen, 7, 11, steady).size(), 5u);
}

TEST(BalancedPlanner, LearnsTheMachineWithoutOvershooting) {
  const BalancedPlannerOptions chosen = options();
  const auto planned = planner(chosen);
  double highest = 0;
  for (int64_t step = 1; step <= 3; ++step) planned->announce(step, batch_of(step));
  for (int64_t step = 1; step <= 30; ++step) {
    planned->learn(measure(planned->next(), chosen, 2.5));
    highest = std::max(highest, static_cast<double>(planned->learned().corrections_ppm[0]) / 1e6);
    planned->announce(step + 3, batch_of(step + 3));
  }
  EXPECT_LE(highest, 2.5 * 1.01);
  for (const int64_t ppm : planned->learned().corrections_ppm) EXPECT_NEAR(static_cast<double>(ppm) / 1e6, 2.5, 0.03);
  EXPECT_LT(metric(planned->metrics(), "prediction_error"), 0.02);
  EXPECT_NEAR(metric(planned->metrics(), "predicted_makespan_ms"), metric(planned->metrics(), "measured_makespan_ms"),
              0.02 * metric(planned->metrics(), "measured_makespan_ms"));
  // Coverage (k/n)^0.4 was shown; a curve of its own for every layer.
  EXPECT_NEAR(planned->learned().coverage.at({0, 40000}, 2, 10000), std::pow(0.25, 0.4), 0.02);
  EXPECT_GT(metric(planned->metrics(), "imbalance"), 0.99);
  EXPECT_GT(metric(planned->metrics(), "planning_ms"), 0.0);
  EXPECT_GT(metric(planned->metrics(), "budget"), 1000.0);
}

// A machine just as the profile says takes what was predicted, also where gradients of pieces leave before those of the
// weights are computed.
TEST(BalancedPlanner, MeasuredTimesOfPiecesMakeTheSchedulePredicted) {
  BalancedPlannerOptions chosen = options(1, 2);
  chosen.plan.chunk.tokens = 4096;
  chosen.adapt = false;
  const auto planned = planner(chosen);
  for (int64_t step = 1; step <= 1 + planned->ahead(); ++step) planned->announce(step, batch_of(step));
  const Plan plan = planned->next();
  ASSERT_TRUE(plan.cut());
  planned->learn(measure(plan, chosen, 1.0));
  const double predicted = metric(planned->metrics(), "predicted_makespan_ms");
  EXPECT_NEAR(metric(planned->metrics(), "measured_makespan_ms"), predicted, 1e-4 * predicted);
}

ModelConfig small_model() {
  ModelConfig model;
  model.layers = kLayers;
  model.hidden_size = 256;
  model.intermediate_size = 512;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 64;
  model.vocab_size = 1000;
  return model;
}

// Every sequence may leave a rank a remainder, and a balanced micro-batch may have many short ones.
TEST(BalancedPlannerConfig, RanksThatShareSequencesHaveRoomForWhatIsPlanned) {
  RunConfig config;
  config.parallel.cp = 3;
  config.attention.selection.block = 64;
  config.batch.global_batch_size = 36;
  config.batch.micro_batch_sequences = 3;
  config.batch.micro_batch_tokens = 8192;
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < 36; ++i) sequences.push_back({i, i < 11 ? 8192 : 324});
  const PackingLimits limits = packing_limits(config.batch, 8192);
  TemporaryFolder folder;
  for (const auto batching : {BatchingPolicy::in_order, BatchingPolicy::sab})
    for (const auto placement : {ContextPlacement::zigzag, ContextPlacement::triangular}) {
      config.balance.batching = batching;
      config.balance.ordering = BalanceOptions::Ordering::automatic;
      config.parallel.placement = placement;
      config.train.output_dir =
          folder.path(fmt::format("{}-{}", static_cast<int>(batching), static_cast<int>(placement)));
      std::filesystem::create_directories(config.train.output_dir);
      const auto planner = make_balanced_planner(config, small_model(), limits);
      planner->announce(1, sequences);
      const Plan plan = planner->next();
      for (const PlannedMicroBatch& micro_batch : plan.ranks.at(0).micro_batches) {
        std::vector<int32_t> cu_seqlens = {0};
        for (const int64_t id : micro_batch.sequences)
          cu_seqlens.push_back(cu_seqlens.back() + static_cast<int32_t>(sequences[static_cast<size_t>(id)].tokens));
        const ContextLayout layout(placement, config.parallel.cp, config.attention.selection.block, cu_seqlens);
        for (int rank = 0; rank < config.parallel.cp; ++rank)
          EXPECT_LE(std::ssize(layout.tokens(rank)), most_rank_tokens(config, limits));
        EXPECT_LE(std::ssize(micro_batch.sequences), 4 * config.batch.micro_batch_sequences);
      }
    }
}

TEST(BalancedPlannerConfig, TakesItFromTheRun) {
  RunConfig config;
  EXPECT_FALSE(wants_balancing(config.balance));
  config.balance.batching = BatchingPolicy::sab;
  EXPECT_TRUE(wants_balancing(config.balance));
  EXPECT_TRUE(attention_spec(config).always_dense(1'000'000));  // the default pattern is dense
  config.attention.selection.pattern = SelectionPattern::topk;
  config.attention.selection.budget = 2048;
  EXPECT_FALSE(attention_spec(config).always_dense(2049));
  EXPECT_TRUE(attention_spec(config).always_dense(2048));
  config.attention.selection.score = BlockScore::moments;
  config.attention.selection.score_tokens = 4;
  EXPECT_DOUBLE_EQ(work_of(attention_spec(config), 8192, 2048).scores, 8192.0 * 8192.0 / 2 / 4);
  config.attention.selection.pattern = SelectionPattern::window;  // as wide as its budget
  EXPECT_EQ(attention_spec(config).budget, 2048);
  config.attention.selection.pattern = SelectionPattern::topk;
  config.attention.selection.score_tokens = 0;

  const ModelConfig model = small_model();
  TemporaryFolder folder;
  config.train.output_dir = folder.path("");
  config.balance.profile = "a100-analytic";
  config.parallel.dp = 2;
  const auto planned = make_balanced_planner(config, model, {1, 4096});
  planned->announce(1, {{0, 4000}, {1, 300}, {2, 2000}});
  EXPECT_EQ(planned->next().ranks.size(), 2u);

  // A measured profile of another model.
  Profile profile = analytic_profile("a100-analytic", shape());
  profile.held_out.count = 3;
  std::ofstream(std::filesystem::path(folder.path("profile.json"))) << write_profile(profile);
  config.balance.profile = std::filesystem::path(folder.path("profile.json"));
  EXPECT_THROW(make_balanced_planner(config, model, {1, 4096}), UserError);

  // One of this model, measured with other blocks.
  profile.shape = model_shape(model);
  profile.recompute = "attention";
  profile.attention = {64, 16, "topk", "moments", 0, 0};
  std::ofstream(std::filesystem::path(folder.path("profile.json"))) << write_profile(profile);
  config.train.recompute = Recompute::attention;
  config.attention.selection.block = 64;
  EXPECT_EQ(run_profile(config, model).shape.layers, kLayers);
  config.attention.selection.score_tokens = 8;
  EXPECT_THROW(run_profile(config, model), UserError);
  config.attention.selection.pattern = SelectionPattern::dense;  // has no blocks
  EXPECT_NO_THROW(make_balanced_planner(config, model, {1, 4096}));
}

}  // namespace
}  // namespace sb::test
