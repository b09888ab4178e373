#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "attention/cpu/dense_attention.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/tiny_run.h"
#include "train/trainer.h"
#include "train/training_run.h"

namespace sb {
namespace {

TEST(TrainerMemory, PlanCountsTheOptimizer) {
  ScratchDirectory scratch;
  const RunConfig config = tiny_run(scratch / "run");
  DenseAttention attention;
  const auto source = make_synthetic_source(*config.data.synthetic, 1);
  Console console(stdout, false, 1);
  const MemoryPlan plan =
      Trainer::memory_plan(config, {run_model_config(config), attention, *source, {}, console, [] { return false; }});
  std::map<std::string, int64_t> bytes;
  for (const auto& item : plan.items()) bytes[item.name] = item.bytes;
  EXPECT_EQ(bytes.at("optimizer"), 2 * bytes.at("weights"));
  EXPECT_EQ(bytes.at("gradients"), bytes.at("weights"));
}

TEST(TrainerMemory, FromWhatThereIsFollowsHowManyLayersKeepTheirCodes) {
  ScratchDirectory scratch;
  RunConfig config = tiny_run(scratch / "run");
  DenseAttention attention;
  const auto source = make_synthetic_source(*config.data.synthetic, 1);
  Console console(stdout, false, 1);
  TrainerParts parts{run_model_config(config), attention, *source, {}, console, [] { return false; }};
  config.train.precision = TrainOptions::Precision::fp8;  // planned on the CPU, not run
  const auto total = [&](int kept) {
    parts.kept_codes = {kept};
    return Trainer::memory_plan(config, parts).total();
  };
  ASSERT_EQ(parts.model.layers, 2);
  const int64_t none = total(0), one = total(1), both = total(2);
  ASSERT_LT(none, std::min(one, both));
  for (const auto& [memory, kept] :
       {std::pair<int64_t, int>{0, 2}, {both, 2}, {std::min(one, both) - 1, 0}, {none, 0}, {none - 1, 0}})
    EXPECT_EQ(Trainer::kept_codes(config, parts, memory), std::vector<int>{kept}) << memory;
  config.parallel.pp = 2;
  EXPECT_EQ(Trainer::kept_codes(config, parts, 0), (std::vector<int>{1, 1}));
  EXPECT_EQ(Trainer::kept_codes(config, parts, 1), (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace sb
