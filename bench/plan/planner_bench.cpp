// What a plan costs: batching, ordering and tuning together, by layout. Prints the share of the limit last.
//   planner_bench [THREADS [CASE]]     by default one thread and every case, which the list below numbers from 0
// Times are of the processor, so that other work on the machine does not count; with several threads they are those of
// all of them together.
#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iterator>
#include <memory>
#include <string_view>
#include <vector>

#include "plan/coverage/coverage_statistics.h"
#include "plan/plan.h"
#include "plan/simulate/length_pool.h"

namespace {

using namespace sb;

double milliseconds() {
  timespec now = {};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

struct Case {
  const char* pool;
  const char* coverage;
  int dp, pp;
  int64_t per_micro_batch, sequences;
  double limit_ms;
  bool chunk = false;  // long sequences may be cut
};

// Curves as a run has learned them, of all layers and lengths.
std::unique_ptr<CoverageModel> learned_coverage(int layers) {
  auto statistics = std::make_unique<CoverageStatistics>();
  const auto like = layered_coverage(layers);
  for (int64_t tokens = 256; tokens < 500'000; tokens += tokens / 3)
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<int64_t> budgets, ppm;
      for (int64_t budget = 256; budget < tokens; budget *= 2) budgets.push_back(budget);
      budgets.push_back(tokens);
      for (const int64_t budget : budgets)
        ppm.push_back(static_cast<int64_t>(1e6 * like->at({tokens, tokens}, layer, budget)));
      statistics->observe(layer, tokens, budgets, ppm);
    }
  return statistics;
}

double run(const Case& c, int threads) {
  const LatencyModel latency(analytic_profile("h200-analytic", find_model_shape("qwen2.5-3b")));
  AttentionSpec spec;
  spec.block = 256;
  Layout layout;
  layout.dp = c.dp;
  layout.pp = c.pp;
  const CostModel cost(latency, spec, layout);
  const auto coverage = std::string_view(c.coverage) == "learned" ? learned_coverage(cost.layers())
                                                                  : find_coverage(c.coverage, cost.layers());
  const auto pool = find_lengths(c.pool);
  LengthSampler sampler(pool, 1);
  ThreadPool workers(threads);
  PlanOptions options;
  options.batching.micro_batch_sequences = c.per_micro_batch;
  if (c.chunk) options.chunk.tokens = ChunkOptions::kAutomatic;
  ExpectedBudgets expected;
  std::vector<double> all, plain;
  double speedup = 0;
  const int steps = c.sequences > 1000 ? 7 : 41;
  for (int step = 0; step < steps; ++step) {
    const auto sequences = sampler.next(c.sequences);
    options.tuning.policy = TuningPolicy::none;
    double start = milliseconds();
    plan_step(step, cost, *coverage, sequences, options, expected, &workers);
    plain.push_back(milliseconds() - start);
    options.tuning.policy = TuningPolicy::optimal;
    start = milliseconds();
    const Plan plan = plan_step(step, cost, *coverage, sequences, options, expected, &workers);
    all.push_back(milliseconds() - start);
    learn_budgets(plan, spec, sequences, expected);
    speedup += plan.baseline_us / plan.makespan_us / steps;
  }
  const auto median = [](std::vector<double>& v) {
    std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
    return v[v.size() / 2];
  };
  const double without = median(plain), with = median(all);
  fmt::print(
      "{:<16} {:<11} dp {:>3} x pp {}  {:>5} sequences, {} a micro-batch{}: without tuning {:>7.3f} ms, with {:>7.3f} "
      "ms "
      "(limit {:>4}), speed-up {:.3f}\n",
      c.pool, c.coverage, c.dp, c.pp, c.sequences, c.per_micro_batch, c.chunk ? ", cut" : "", without, with, c.limit_ms,
      speedup);
  std::fflush(stdout);
  return with / c.limit_ms;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  fmt::print("planner, qwen2.5-3b (36 layers), {} threads, processor time, median of the steps\n", threads);
  const Case cases[] = {{"chatqa2-like", "power:0.22", 8, 1, 4, 256, 1},
                        {"chatqa2-like", "power:0.22", 8, 4, 4, 256, 1},
                        {"longalign-like", "power:0.22", 8, 4, 4, 256, 1},
                        {"longalign-like", "power:0.22", 16, 4, 1, 256, 1},
                        {"chatqa2-like", "power:0.22", 32, 8, 1, 256, 1},
                        {"chatqa2-like", "power:0.22", 4, 8, 2, 256, 1},
                        {"chatqa2-like", "layered", 8, 4, 4, 256, 1},
                        {"chatqa2-like", "power:0.22", 512, 8, 1, 4096, 30},
                        {"longalign-like", "power:0.22", 512, 8, 1, 4096, 30},
                        {"chatqa2-like", "power:0.22", 512, 8, 2, 4096, 30},
                        {"longalign-like", "layered", 512, 8, 1, 4096, 30},
                        {"chatqa2-like", "learned", 8, 4, 4, 256, 1},
                        {"longalign-like", "learned", 512, 8, 1, 4096, 30},
                        {"chatqa2-like", "power:0.22", 4, 4, 1, 64, 5, true},
                        {"longalign-like", "power:0.22", 1, 8, 1, 64, 5, true},
                        {"longalign-like", "learned", 4, 4, 2, 64, 5, true},
                        {"chatqa2-like", "power:0.22", 512, 8, 1, 4096, 50, true},
                        {"longalign-like", "learned", 512, 8, 1, 4096, 50, true}};
  double worst = 0;
  // A second argument names one case by its number.
  const int only = argc > 2 ? std::atoi(argv[2]) : -1;
  for (int i = 0; i < static_cast<int>(std::size(cases)); ++i)
    if (only < 0 || only == i) worst = std::max(worst, run(cases[i], threads));
  fmt::print("worst share of its limit: {:.2f}\n", worst);
  return 0;
}
