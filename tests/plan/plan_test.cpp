#include "plan/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "core/errors.h"
#include "core/random.h"
#include "report/schedule_picture.h"

namespace sb {
namespace {

std::vector<Sequence> draw(Random& random, int64_t count, int kind) {
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < count; ++i) {
    double n = 0;
    if (kind == 0) n = std::exp(8 + 1.5 * random.normal());  // broad
    if (kind == 1) n = random.below(2) == 0 ? 500 + 3000 * random.uniform() : 20000 + 10000 * random.uniform();
    if (kind == 2) n = 200 + 100 * random.uniform();                                    // all dense
    if (kind == 3) n = 40000;                                                           // all equal
    if (kind == 4) n = random.below(20) == 0 ? 200000 : 2000 + 500 * random.uniform();  // rare giants
    if (kind == 5) n = i == count / 2 ? 300000 : 9000;                                  // one giant
    if (kind == 6) n = 8100 + 200 * random.uniform();                                   // around the budget
    if (kind == 7) n = 1 + static_cast<double>(i % 3);                                  // next to nothing
    sequences.push_back({100 + i, std::clamp<int64_t>(static_cast<int64_t>(n), 1, 400000)});
  }
  return sequences;
}

// As a measured profile may look: kinks, fixed costs, and a selection that dense sequences do without.
Profile kinked_profile(const ModelShape& shape) {
  Profile profile = analytic_profile("h200-analytic", shape);
  const auto table = [&](Operation operation) -> OperationTable& {
    return profile.tables[static_cast<size_t>(operation)];
  };
  table(Operation::linear_forward).curve = {{0, 2000, 30000}, {20, 150, 1200}};
  table(Operation::linear_backward).curve = {{0, 2000, 30000}, {40, 290, 2400}};
  table(Operation::attention_forward).curve = {{0, 1e7, 2e8, 1e9}, {10, 60, 900, 4100}};
  table(Operation::attention_forward).per_tile = 0.01;
  table(Operation::attention_backward).curve = {{0, 1e7, 2e8, 1e9}, {15, 140, 2400, 11000}};
  table(Operation::selection) = {Coordinate::scores, {{0, 1e6}, {0, 120}}, 0, 0, 0};
  return profile;
}

// So many H200s as the analytic profile has them.
struct Cluster {
  Cluster(const std::string& model, int dp, int pp, const std::string& coverage_name)
      : latency(analytic_profile("h200-analytic", find_model_shape(model))),
        cost(latency, {}, {.dp = dp, .pp = pp}),
        coverage(find_coverage(coverage_name, cost.layers())) {}
  const LatencyModel latency;
  const CostModel cost;
  const std::unique_ptr<CoverageModel> coverage;
};

// The promise to the user, on arbitrary pools and layouts.
TEST(Plan, IsNeverWorseThanInOrderAndKeepsItsPromises) {
  Random random(1);
  const LatencyModel small(analytic_profile("h200-analytic", find_model_shape("qwen2.5-0.5b")));
  const LatencyModel large(analytic_profile("a100-analytic", find_model_shape("qwen2.5-3b")));
  const LatencyModel kinked(kinked_profile(find_model_shape("qwen2.5-0.5b")));
  for (int trial = 0; trial < 240; ++trial) {
    Layout layout;
    layout.dp = 1 << random.below(trial % 8 == 0 ? 7 : 4);
    layout.pp = 1 + static_cast<int>(random.below(8));
    layout.warmup_depth = 1 + static_cast<int>(random.below(2));
    layout.comm = random.below(2) == 0;
    layout.head = random.below(2) == 0;
    AttentionSpec spec;
    spec.block = random.below(2) == 0 ? 128 : 256;
    spec.budget = random.below(2) == 0 ? 8192 : 4096;
    const CostModel cost(trial % 3 == 0 ? small : trial % 3 == 1 ? large : kinked, spec, layout);
    const auto coverage = find_coverage(random.below(2) == 0 ? "layered" : "power:0.22", cost.layers());
    const auto sequences = draw(random, layout.dp * (1 + static_cast<int64_t>(random.below(9))), trial % 8);
    PlanOptions options;
    options.batching.micro_batch_sequences = 1 + static_cast<int64_t>(random.below(3));
    if (trial % 4 == 0) options.batching.micro_batch_tokens = 500000;
    ExpectedBudgets expected;
    for (TuningPolicy tuning : {TuningPolicy::none, TuningPolicy::optimal}) {
      options.tuning.policy = tuning;
      options.ordering = random.below(4) > 0;
      const Plan plan = plan_step(trial, cost, *coverage, sequences, options, expected);
      EXPECT_LE(plan.makespan_us, plan.baseline_us * (1 + 1e-9)) << "trial " << trial;
      EXPECT_GE(plan.makespan_us, plan.lower_bound_us * (1 - 1e-9)) << "trial " << trial;
      EXPECT_GE(plan.mean_coverage, plan.base_coverage - 1e-12) << "trial " << trial;
      EXPECT_LE(plan.worst_loss, 0.1 + 1e-9) << "trial " << trial;
      std::multiset<int64_t> seen, all;
      for (const Sequence& s : sequences) all.insert(s.id);
      ASSERT_EQ(static_cast<int>(plan.ranks.size()), layout.dp);
      double slowest = 0;
      for (int r = 0; r < layout.dp; ++r) {
        const PlannedRank& rank = plan.ranks[static_cast<size_t>(r)];
        ASSERT_FALSE(rank.micro_batches.empty());
        for (const auto& micro_batch : rank.micro_batches) {
          ASSERT_FALSE(micro_batch.sequences.empty());
          seen.insert(micro_batch.sequences.begin(), micro_batch.sequences.end());
        }
        const double simulated = schedule_of(plan, cost, r).makespan;
        EXPECT_NEAR(simulated, rank.makespan_us, 1e-6 * simulated);
        slowest = std::max(slowest, simulated);
      }
      EXPECT_EQ(seen, all);
      EXPECT_NEAR(slowest, plan.makespan_us, 1e-6 * slowest);
      learn_budgets(plan, spec, sequences, expected);
    }
  }
}

TEST(Plan, BudgetsStayBetweenTheirLimits) {
  Random random(2);
  const Cluster cluster("qwen2.5-3b", 4, 4, "layered");
  const auto sequences = draw(random, 32, 0);
  PlanOptions options;
  options.batching.micro_batch_sequences = 2;
  options.tuning.p = 0.5;
  const Plan plan = plan_step(0, cluster.cost, *cluster.coverage, sequences, options, {});
  for (const auto& rank : plan.ranks)
    for (const auto& micro_batch : rank.micro_batches)
      for (size_t k = 0; k < micro_batch.sequences.size(); ++k) {
        const auto found = std::find_if(sequences.begin(), sequences.end(),
                                        [&](const Sequence& s) { return s.id == micro_batch.sequences[k]; });
        for (int l = 0; l < 36; ++l) {
          const int32_t budget = micro_batch.budgets[static_cast<size_t>(l) * micro_batch.sequences.size() + k];
          EXPECT_LE(budget, found->tokens);
          EXPECT_GE(budget, std::min(found->tokens, cluster.cost.spec().least_budget()));
          if (found->tokens <= cluster.cost.spec().budget) {
            EXPECT_EQ(budget, found->tokens);
          }
        }
      }
}

TEST(Plan, ThreadsChangeNothing) {
  Random random(3);
  const Cluster cluster("qwen2.5-0.5b", 16, 2, "power:0.22");
  const auto sequences = draw(random, 128, 1);
  PlanOptions options;
  options.batching.micro_batch_sequences = 2;
  ThreadPool pool(3);
  EXPECT_EQ(write_plan(plan_step(4, cluster.cost, *cluster.coverage, sequences, options, {})),
            write_plan(plan_step(4, cluster.cost, *cluster.coverage, sequences, options, {}, &pool)));
}

TEST(Plan, LineRoundTripAndComplaints) {
  Random random(5);
  const Cluster cluster("qwen2.5-0.5b", 2, 3, "layered");
  PlanOptions options;
  options.batching.micro_batch_sequences = 2;
  const Plan plan = plan_step(17, cluster.cost, *cluster.coverage, draw(random, 16, 0), options, {});
  const std::string line = write_plan(plan);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const Plan again = parse_plan(line, "plan.jsonl:1");
  EXPECT_EQ(write_plan(again), line);
  EXPECT_EQ(again.step, 17);
  EXPECT_EQ(again.ranks[1].micro_batches[0].budgets, plan.ranks[1].micro_batches[0].budgets);
  for (const char* key : {"\"step\"", "\"ranks\"", "\"budgets\"", "\"layers\"", "\"tokens\""}) {
    std::string broken = line;
    broken.replace(broken.find(key), 3, "\"_");
    EXPECT_THROW(parse_plan(broken, "plan.jsonl:1"), UserError) << key;
  }
  EXPECT_THROW(parse_plan("[]", "plan.jsonl:1"), UserError);
  // Numbers that no model has neither take memory nor wrap around.
  Plan one;
  one.layers = 2;
  one.ranks.push_back({{{{7}, 24, {24, 24}, {1.0}, {2.0}}}, 3.0});
  const std::string small = write_plan(one);
  EXPECT_EQ(write_plan(parse_plan(small, "plan.jsonl:1")), small);
  for (const auto& [what, with] :
       std::vector<std::pair<std::string, std::string>>{{"\"layers\":2", "\"layers\":2000000000"},
                                                        {"\"layers\":2", "\"layers\":4294967298"},
                                                        {"\"layers\":2", "\"layers\":18446744073709551615"},
                                                        {"[24,2]", "[24,2000000000]"},
                                                        {"[24,2]", "[24,1,24,9223372036854775807]"},
                                                        {"[24,2]", "[4294967320,2]"},
                                                        {"\"tokens\":24", "\"tokens\":18446744073709551615"}}) {
    std::string broken = small;
    broken.replace(broken.find(what), what.size(), with);
    EXPECT_THROW(parse_plan(broken, "plan.jsonl:1"), UserError) << broken;
  }
  EXPECT_THROW(parse_plan(line.substr(0, line.size() / 2), "plan.jsonl:1"), UserError);
}

// Neither ends a step: it is planned otherwise, and the plan says so.
TEST(Plan, NotesWhatItCouldNotDo) {
  const Cluster cluster("qwen2.5-0.5b", 2, 2, "layered");
  // Three full micro-batches on two ranks: no policy can give both the same number.
  const std::vector<Sequence> three = {{0, 20000}, {1, 20000}, {2, 20000}};
  PlanOptions options;
  options.batching.micro_batch_sequences = 1;
  options.batching.micro_batch_tokens = 20000;
  for (BatchingPolicy policy : {BatchingPolicy::sab, BatchingPolicy::in_order}) {
    options.batching.policy = policy;
    const Plan plan = plan_step(1, cluster.cost, *cluster.coverage, three, options, {});
    EXPECT_EQ(plan.notes.size(), policy == BatchingPolicy::in_order ? 0u : 1u) << options.batching.name();
    for (const std::string& note : plan.notes) EXPECT_NE(note.find("found no arrangement"), std::string::npos) << note;
    EXPECT_EQ(parse_plan(write_plan(plan), "plan").notes, plan.notes);
  }
  Random random(3);
  options.batching = {};
  options.batching.micro_batch_sequences = 1;
  int unsolved = 0;
  for (int trial = 0; trial < 8; ++trial) {
    const auto sequences = draw(random, 16, 0);
    options.tuning.pivots = 0;
    EXPECT_EQ(plan_step(1, cluster.cost, *cluster.coverage, sequences, options, {}).notes, std::vector<std::string>{});
    options.tuning.pivots = 1;
    const Plan plan = plan_step(1, cluster.cost, *cluster.coverage, sequences, options, {});
    EXPECT_LE(plan.makespan_us, plan.baseline_us * (1 + 1e-9));
    EXPECT_GE(plan.mean_coverage, plan.base_coverage - 1e-12);
    EXPECT_LE(plan.worst_loss, 0.1 + 1e-9);
    for (const std::string& note : plan.notes) EXPECT_NE(note.find("pivots"), std::string::npos);
    unsolved += static_cast<int>(plan.notes.size());
  }
  EXPECT_GT(unsolved, 0);
}

// Raising everything to the slowest is worth a longer step to who asks for it.
TEST(Plan, AnchorIsNotUndoneByTheInOrderPlan) {
  Random random(6);
  const Cluster cluster("qwen2.5-0.5b", 8, 1, "layered");
  PlanOptions options;
  options.batching.micro_batch_sequences = 1;
  options.tuning.policy = TuningPolicy::anchor;
  options.tuning.anchor = AnchorKind::max;
  for (int step = 1; step <= 60; ++step) {
    std::vector<Sequence> sequences;
    for (int i = 0; i < 32; ++i) sequences.push_back({i, 12000 + static_cast<int64_t>(random.below(60000))});
    const Plan plan = plan_step(step, cluster.cost, *cluster.coverage, sequences, options, {});
    EXPECT_GT(plan.mean_coverage, plan.base_coverage + 0.01) << "step " << step;
  }
}

TEST(Plan, ExpectedBudgetsFollowWhatWasChosen) {
  AttentionSpec spec;
  ExpectedBudgets expected;
  EXPECT_EQ(expected.of(spec, 20000), 8192);
  EXPECT_EQ(expected.of(spec, 4000), 4000);
  for (int i = 0; i < 100; ++i) expected.observe(spec, 20000, 4096);
  EXPECT_NEAR(static_cast<double>(expected.of(spec, 20500)), 4096, 8);
  EXPECT_EQ(expected.of(spec, 80000), 8192);
}

TEST(Plan, PicturesHoldEveryOperation) {
  Random random(6);
  const Cluster cluster("qwen2.5-0.5b", 2, 2, "power:0.22");
  PlanOptions options;
  options.batching.micro_batch_sequences = 1;
  const Plan plan = plan_step(0, cluster.cost, *cluster.coverage, draw(random, 6, 0), options, {});
  const auto count = [](const std::string& text, const std::string& what) {
    int found = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
    return found;
  };
  // 2 ranks × 3 micro-batches × 2 stages × (forward, backward).
  EXPECT_EQ(count(schedule_svg({{"a < b", &plan}}, cluster.cost), "<title>"), 24);
  EXPECT_EQ(count(schedule_svg({{"a < b", &plan}}, cluster.cost), "a &lt; b"), 1);
  // Without a box of its own a picture in a narrower window is cut off instead of scaled.
  EXPECT_EQ(count(schedule_svg({{"a < b", &plan}}, cluster.cost), " viewBox=\"0 0 1130 "), 1);
  EXPECT_EQ(count(schedule_trace(plan, cluster.cost), "slack_us"), 24);
}

}  // namespace
}  // namespace sb
