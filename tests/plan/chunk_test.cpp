#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

#include "core/random.h"
#include "plan/chunking.h"
#include "plan/plan.h"
#include "plan/simulate/layout_sweep.h"
#include "plan/simulate/length_pool.h"
#include "plan/simulate/simulate.h"
#include "report/schedule_picture.h"

namespace sb {
namespace {

TEST(Chunk, PiecesAreEqualAndEndAtEdges) {
  Random random(1);
  for (int trial = 0; trial < 500; ++trial) {
    const auto edge = static_cast<int64_t>(16 << random.below(5));
    const int64_t chunk = edge * (1 + static_cast<int64_t>(random.below(40)));
    const int64_t length = 1 + static_cast<int64_t>(random.below(200000));
    const std::vector<Piece> pieces = cut_sequence(length, chunk, edge);
    if (length <= chunk) {
      ASSERT_EQ(pieces, std::vector<Piece>{Piece{}});
      continue;
    }
    EXPECT_EQ(std::ssize(pieces), (length + chunk - 1) / chunk);
    int64_t at = 0, least = length, most = 0;
    for (const Piece& piece : pieces) {
      ASSERT_EQ(piece.begin, at);
      EXPECT_EQ(piece.begin % edge, 0);
      EXPECT_LE(piece.end - piece.begin, chunk);
      ASSERT_GT(piece.end, piece.begin);
      least = std::min(least, piece.end - piece.begin);
      most = std::max(most, piece.end - piece.begin);
      at = piece.end;
    }
    EXPECT_EQ(at, length);
    // The last one also lacks what the sequence does not fill of its last block.
    EXPECT_LT(most - least, 2 * edge);
  }
}

TEST(Chunk, WorkOfThePiecesIsThatOfTheSequence) {
  Random random(2);
  AttentionSpec spec;
  for (int trial = 0; trial < 200; ++trial) {
    spec.score = trial % 2 == 0 ? "planes" : "moments";
    spec.score_channels = trial % 2 == 0 ? 32 : 0;
    spec.score_tokens = trial % 4 == 1 ? 32 : 0;
    const int64_t length = 1 + static_cast<int64_t>(random.below(100000));
    const int64_t budget = 640 + static_cast<int64_t>(random.below(20000));
    const Work whole = work_of(spec, length, budget);
    Work sum;
    double prefix = 0;
    const std::vector<Piece> pieces = cut_sequence(length, 2048, piece_edge(spec));
    for (const Piece& piece : pieces) {
      sum += work_of(spec, length, piece, budget);
      prefix += static_cast<double>(piece.end);
    }
    EXPECT_DOUBLE_EQ(sum.tokens, whole.tokens);
    EXPECT_DOUBLE_EQ(sum.tiles, whole.tiles);
    EXPECT_NEAR(sum.pairs, whole.pairs, 1e-9 * whole.pairs);
    EXPECT_NEAR(sum.scores, whole.scores, 1e-9 * whole.scores);
    EXPECT_DOUBLE_EQ(whole.prefix, 0.0);
    EXPECT_DOUBLE_EQ(sum.prefix, prefix);
  }
}

struct Bench {
  explicit Bench(Layout layout, const std::string& profile = "h200", const std::string& model = "qwen2.5-3b")
      : latency(find_profile(profile, find_model_shape(model), spec())),
        cost(latency, spec(), layout),
        coverage(find_coverage("power:0.22", cost.layers())) {}
  static AttentionSpec spec() {
    AttentionSpec spec;
    spec.block = 256;
    return spec;
  }
  const LatencyModel latency;
  const CostModel cost;
  const std::unique_ptr<CoverageModel> coverage;
};

// Every token of every sequence once, in pieces that follow each other, with the same budgets, and the schedule is as
// long as the plan says.
void check_plan(const Plan& plan, const CostModel& cost, const std::vector<Sequence>& sequences, int64_t most) {
  std::map<int64_t, int64_t> left;
  for (const Sequence& sequence : sequences) left[sequence.id] = sequence.tokens;
  double slowest = 0;
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    const PlannedRank& rank = plan.ranks[r];
    ASSERT_FALSE(rank.micro_batches.empty());
    const PlannedMicroBatch* before = nullptr;
    for (const PlannedMicroBatch& micro_batch : rank.micro_batches) {
      ASSERT_FALSE(micro_batch.sequences.empty());
      EXPECT_LE(micro_batch.tokens, most);
      if (!micro_batch.is_piece()) {
        int64_t tokens = 0;
        for (const int64_t id : micro_batch.sequences) {
          tokens += left[id];
          left[id] = 0;
        }
        EXPECT_EQ(tokens, micro_batch.tokens);
      } else {
        ASSERT_EQ(micro_batch.sequences.size(), 1u);
        EXPECT_EQ(micro_batch.end - micro_batch.begin, micro_batch.tokens);
        EXPECT_EQ(micro_batch.begin % piece_edge(cost.spec()), 0);
        left[micro_batch.sequences[0]] -= micro_batch.tokens;
        if (micro_batch.begin > 0) {
          ASSERT_NE(before, nullptr);
          EXPECT_EQ(before->sequences, micro_batch.sequences);
          EXPECT_EQ(before->end, micro_batch.begin);
          EXPECT_EQ(before->budgets, micro_batch.budgets);
        }
      }
      before = &micro_batch;
    }
    const double simulated = schedule_of(plan, cost, static_cast<int>(r)).makespan;
    EXPECT_NEAR(simulated, rank.makespan_us, 1e-6 * simulated);
    slowest = std::max(slowest, simulated);
  }
  for (const auto& [id, tokens] : left) EXPECT_EQ(tokens, 0) << "sequence " << id;
  EXPECT_NEAR(plan.makespan_us, slowest, 1e-6 * slowest);
  EXPECT_GE(plan.makespan_us, plan.lower_bound_us * (1 - 1e-9));
  EXPECT_EQ(write_plan(parse_plan(write_plan(plan), "a test")), write_plan(plan));
}

std::vector<Sequence> draw_sequences(Random& random, int64_t count, int kind) {
  std::vector<Sequence> sequences;
  for (int64_t i = 0; i < count; ++i) {
    double n = std::exp(9 + 1.3 * random.normal());
    if (kind == 1) n = random.below(2) == 0 ? 300 + 2000 * random.uniform() : 30000 + 50000 * random.uniform();
    if (kind == 2) n = 200 + 100 * random.uniform();
    if (kind == 3) n = i == 0 ? 250000 : 3000;
    sequences.push_back({100 + i, std::clamp<int64_t>(static_cast<int64_t>(n), 1, 400000)});
  }
  return sequences;
}

TEST(Chunk, AutomaticPlansHoldEverythingOnceAndAreNeverSlowerThanWholeOnes) {
  Random random(3);
  int cut = 0;
  // SB_TRIALS: more of them, for a longer look.
  const char* more = std::getenv("SB_TRIALS");
  const int trials = more != nullptr ? std::atoi(more) : 60;
  for (int trial = 0; trial < trials; ++trial) {
    Layout layout;
    layout.dp = 1 + static_cast<int>(random.below(16));
    layout.pp = 1 + static_cast<int>(random.below(8));
    layout.comm = layout.head = random.below(2) == 0;
    const Bench bench(layout, trial % 2 == 0 ? "h200" : "a100-analytic", trial % 4 < 2 ? "qwen2.5-3b" : "qwen2.5-0.5b");
    const auto sequences = draw_sequences(random, layout.dp * (1 + static_cast<int64_t>(random.below(6))), trial % 4);
    PlanOptions options;
    options.batching.micro_batch_sequences = 1 + static_cast<int64_t>(random.below(2));
    for (const TuningPolicy tuning : {TuningPolicy::none, TuningPolicy::optimal}) {
      options.tuning.policy = tuning;
      options.chunk.tokens = 0;
      const Plan whole = plan_step(trial, bench.cost, *bench.coverage, sequences, options, {});
      options.chunk.tokens = ChunkOptions::kAutomatic;
      const Plan plan = plan_step(trial, bench.cost, *bench.coverage, sequences, options, {});
      check_plan(plan, bench.cost, sequences, 400000);
      EXPECT_LE(plan.makespan_us, whole.makespan_us * (1 + 1e-9)) << "trial " << trial;
      EXPECT_GE(plan.mean_coverage, plan.base_coverage - 1e-12) << "trial " << trial;
      EXPECT_LE(plan.worst_loss, options.tuning.p + 1e-9) << "trial " << trial;
      for (const PlannedRank& rank : plan.ranks)
        cut += rank.micro_batches.end() != std::ranges::find_if(rank.micro_batches, &PlannedMicroBatch::is_piece);
    }
  }
  EXPECT_GT(cut, 40);  // it is chunks that are tested
}

TEST(Chunk, AGivenSizeCutsEverythingAboveItWhateverThePolicy) {
  Random random(4);
  for (const BatchingPolicy policy : {BatchingPolicy::in_order, BatchingPolicy::sab})
    for (const int pp : {1, 3})
      for (const int64_t tokens : {256, 1024, 5120}) {
        const Bench bench({.dp = 2, .pp = pp}, "h200-analytic");
        const auto sequences = draw_sequences(random, 9, 0);
        PlanOptions options;
        options.batching.policy = policy;
        options.batching.micro_batch_tokens = 8192;  // longer sequences fit all the same
        options.batching.max_sequences = 4;
        options.tuning.policy = TuningPolicy::none;
        options.ordering = policy != BatchingPolicy::in_order;
        options.chunk.tokens = tokens;
        const Plan plan = plan_step(1, bench.cost, *bench.coverage, sequences, options, {});
        check_plan(plan, bench.cost, sequences, tokens);
        for (const PlannedRank& rank : plan.ranks) {
          if (pp == 1) {
            EXPECT_EQ(rank.ahead, 1);
          }
          for (const PlannedMicroBatch& micro_batch : rank.micro_batches) EXPECT_LE(micro_batch.sequences.size(), 4u);
        }
      }
}

// Packs as large as the size that is given would leave a pipeline of several stages without enough micro-batches.
TEST(Chunk, AGivenSizeAboveAllSequencesTakesNoLongerThanWholeOnes) {
  for (const int pp : {2, 4, 8})
    for (const int64_t length : {100, 4096, 16384}) {
      const Bench bench({.dp = 1, .pp = pp}, "h200-analytic");
      std::vector<Sequence> sequences;
      for (int64_t i = 0; i < 31; ++i) sequences.push_back({i, length});
      PlanOptions options;
      options.batching.micro_batch_sequences = 1;
      options.tuning.policy = TuningPolicy::none;
      const Plan whole = plan_step(1, bench.cost, *bench.coverage, sequences, options, {});
      options.chunk.tokens = 65536;
      const Plan plan = plan_step(1, bench.cost, *bench.coverage, sequences, options, {});
      check_plan(plan, bench.cost, sequences, options.chunk.tokens);
      EXPECT_LE(plan.makespan_us, whole.makespan_us * (1 + 1e-9)) << pp << " stages, " << length << " tokens";
    }
}

TEST(Chunk, SizesThatAreNoMultipleOfABlockAndAnchorsAreRefused) {
  const Bench bench({.dp = 1, .pp = 2});
  const std::vector<Sequence> sequences{{0, 20000}};
  PlanOptions options;
  options.batching.micro_batch_sequences = 1;
  options.tuning.policy = TuningPolicy::none;
  options.chunk.tokens = 1000;
  EXPECT_THROW(plan_step(0, bench.cost, *bench.coverage, sequences, options, {}), UserError);
  options.chunk.tokens = 1024;
  EXPECT_NO_THROW(plan_step(0, bench.cost, *bench.coverage, sequences, options, {}));
  options.tuning.policy = TuningPolicy::anchor;
  EXPECT_THROW(plan_step(0, bench.cost, *bench.coverage, sequences, options, {}), UserError);
}

TEST(Chunk, MemoryBoundsHowFarForwardsRunAhead) {
  const Bench bench({.dp = 1, .pp = 4, .comm = false, .head = false});
  const std::vector<Sequence> sequences{{0, 65536}, {1, 32768}, {2, 32768}, {3, 4096}};
  PlanOptions options;
  options.batching.micro_batch_sequences = 1;
  options.tuning.policy = TuningPolicy::none;
  options.chunk.tokens = 4096;
  const Plan free = plan_step(0, bench.cost, *bench.coverage, sequences, options, {});
  EXPECT_EQ(free.ranks[0].ahead, 16);
  const auto held = [&](const Plan& plan, int stage) {
    int64_t now = 0, most = 0;
    const auto schedule = rank_schedule(plan.ranks[0], 4);
    for (const Schedule::Node& node : schedule->nodes()) {
      if (node.stage != stage) continue;
      const int64_t tokens = plan.ranks[0].micro_batches[static_cast<size_t>(node.position)].tokens;
      now += node.backward ? -tokens : tokens;
      most = std::max(most, now);
    }
    return most;
  };
  // The longest sequence and one piece a stage must fit; less is refused.
  EXPECT_LE(held(free, 0), 65536 + 3 * 4096);
  for (int s = 0; s < 4; ++s) options.chunk.kept_tokens.push_back(65536 + (3 - s) * 4096);
  const Plan bound = plan_step(0, bench.cost, *bench.coverage, sequences, options, {});
  for (int s = 0; s < 4; ++s) EXPECT_LE(held(bound, s), options.chunk.kept_tokens[static_cast<size_t>(s)]);
  options.chunk.kept_tokens.assign(4, 60000);
  EXPECT_THROW(plan_step(0, bench.cost, *bench.coverage, sequences, options, {}), UserError);
  options.chunk.tokens = ChunkOptions::kAutomatic;
  const Plan whole = plan_step(0, bench.cost, *bench.coverage, sequences, options, {});
  EXPECT_FALSE(whole.ranks[0].micro_batches[0].is_piece());
}

TEST(Chunk, ActivationsOfPiecesTakeHalfOfThoseOfWholeSequences) {
  const Bench bench({.dp = 1, .pp = 4});
  const MemoryEstimate whole = estimate_memory(bench.cost, 72 * 1024);
  const MemoryEstimate cut = estimate_memory(bench.cost, 4096, 72 * 1024);
  const auto both = [](const MemoryEstimate& estimate) {
    return static_cast<double>(estimate.activations + estimate.workspace);
  };
  EXPECT_LE(both(cut), 0.5 * both(whole));
  EXPECT_GE(both(cut), 0.2 * both(whole));  // one sequence is there as a whole
}

TEST(Chunk, ThePicturesNameThePieces) {
  const Bench bench({.dp = 1, .pp = 2});
  const std::vector<Sequence> sequences{{7, 9000}, {8, 100}};
  PlanOptions options;
  options.batching.micro_batch_sequences = 1;
  options.tuning.policy = TuningPolicy::none;
  options.chunk.tokens = 4096;
  const Plan plan = plan_step(0, bench.cost, *bench.coverage, sequences, options, {});
  const std::string svg = schedule_svg({{"a", &plan}}, bench.cost), trace = schedule_trace(plan, bench.cost);
  EXPECT_NE(svg.find("sequence 7, tokens 0 to 3072"), std::string::npos);
  EXPECT_NE(svg.find("sequence 7, tokens 6144 to 9000"), std::string::npos);
  EXPECT_NE(trace.find("\"piece\":[3072,6144]"), std::string::npos);
}

// The bars of the study, with fewer steps.
TEST(Chunk, PipelinesOfThePaper) {
  struct Case {
    int dp, pp;
    int64_t sequences;
    const char* pool;
    double least;
  };
  for (const Case& c : {Case{2, 4, 2, "chatqa2-like", 1.85}, Case{2, 4, 2, "longalign-like", 1.8},
                        Case{4, 4, 1, "chatqa2-like", 2.15}, Case{4, 4, 1, "longalign-like", 2.3},
                        Case{1, 8, 1, "chatqa2-like", 1.7}, Case{1, 8, 1, "longalign-like", 1.7}}) {
    const Bench bench({.dp = c.dp, .pp = c.pp, .comm = false, .head = false});
    const auto pool = find_lengths(c.pool);
    const SimulateInput input{bench.cost, *bench.coverage, pool, 16, 40, 1, [] { return 0.0; }};
    BatchingOptions batching;
    batching.micro_batch_sequences = c.sequences;
    const auto policies = standard_policies(batching, 0.1);
    const auto named = [&](const char* name) {
      return simulate_policy(input, *std::ranges::find(policies, name, &SimulatedPolicy::name));
    };
    const SimulatedRow plain = named("sab+order+chunk"), tuned = named("sab+order+chunk+optimal");
    EXPECT_GE(plain.speedup, c.least) << c.pool << " dp " << c.dp;
    EXPECT_GE(tuned.speedup, plain.speedup) << c.pool << " dp " << c.dp;
    EXPECT_GE(tuned.worst_mean_difference, -1e-12);
    EXPECT_GT(plain.cut_share, 0.9);
  }
}

}  // namespace
}  // namespace sb
