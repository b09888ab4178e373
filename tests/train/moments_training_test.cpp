// optimizer.moments: bfloat16, from configuration to checkpoint.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "data/synthetic/synthetic.h"
#include "run/checkpoint/checkpoint.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/tiny_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

const std::string kBf16 = "optimizer.moments=bfloat16", kFp32 = "optimizer.moments=float32";

// Sequences that a tiny model learns by heart.
ListSource few_sequences() {
  std::vector<TokenSequence> sequences;
  for (int64_t id = 0; id < 4; ++id) {
    TokenSequence sequence;
    sequence.id = id;
    for (int64_t i = 0; i < 24; ++i) sequence.tokens.push_back(static_cast<int32_t>((i * i + 3 * id) % 13));
    sequence.labels.assign(sequence.tokens.begin() + 1, sequence.tokens.end());
    sequence.labels.push_back(kIgnoredLabel);
    sequences.push_back(sequence);
  }
  return ListSource(sequences);
}

std::vector<double> losses(const std::vector<std::string>& overrides, int steps) {
  ScratchDirectory scratch;
  ListSource source = few_sequences();
  std::vector<std::string> all = overrides;
  all.insert(all.end(), {"train.max_steps=1000", "train.save_steps=0", "optimizer.learning_rate=2.0e-3"});
  TinyTrainer trainer(tiny_run(scratch / "run", all), {nullptr, &source, [] { return false; }});
  std::vector<double> result;
  for (int step = 0; step < steps; ++step) {
    EXPECT_TRUE(trainer->step());
    result.push_back(trainer->last_step().loss);
  }
  return result;
}

// Both with the default and with a long memory, in which a step changes the second moment by a thousandth.
TEST(MomentsTraining, TheLossFollowsThatOfFp32) {
  for (const char* betas : {"optimizer.betas=[0.9, 0.95]", "optimizer.betas=[0.9, 0.999]"}) {
    const int steps = 200;
    const std::vector<double> exact = losses({betas}, steps), rounded = losses({betas, kBf16}, steps);
    EXPECT_NE(exact, rounded);
    EXPECT_LT(exact.back(), 0.1 * exact.front());
    const auto mean = [](const std::vector<double>& all, int begin) {
      return std::accumulate(all.begin() + begin, all.begin() + begin + 10, 0.0) / 10;
    };
    // Never more than four of the two hundred steps ahead or behind: the loss falls by up to five percent a step.
    for (int begin = 10; begin + 20 <= steps; begin += 10) {
      EXPECT_LT(mean(rounded, begin), mean(exact, begin - 4)) << betas << " step " << begin;
      EXPECT_GT(mean(rounded, begin), mean(exact, begin + 4)) << betas << " step " << begin;
    }
  }
}

bool bf16_holds(float x) {
  return (std::bit_cast<uint32_t>(x) & 0xffff) == 0;
}

TEST(MomentsTraining, TwentyStepsOrTenAndTenGiveTheSameBytes) {
  ScratchDirectory scratch;
  TinyTrainer(tiny_run(scratch / "whole", {kBf16}))->run();
  TinyTrainer(tiny_run(scratch / "halves", {kBf16, "train.max_steps=10"}))->run();
  TinyTrainer(tiny_run(scratch / "halves", {kBf16}))->run();
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json"})
    EXPECT_TRUE(read_bytes(scratch / "whole/checkpoint-20" / file) ==
                read_bytes(scratch / "halves/checkpoint-20" / file))
        << file;
  const std::vector<float> moments = moments_of(checkpoint_path(scratch / "whole", 20));
  EXPECT_TRUE(std::all_of(moments.begin(), moments.end(), bf16_holds));
  EXPECT_GT(std::count_if(moments.begin(), moments.end(), [](float x) { return x != 0; }), std::ssize(moments) / 2);
}

// From fp32 with the nearest, to fp32 with the very same values: a checkpoint of either type is one of the other.
TEST(MomentsTraining, AResumedRunMayChangeTheType) {
  ScratchDirectory scratch;
  const fs::path run = scratch / "run";
  TinyTrainer(tiny_run(run, {kFp32, "train.max_steps=8"}))->run();
  const std::vector<float> exact = moments_of(checkpoint_path(run, 8));
  EXPECT_FALSE(std::all_of(exact.begin(), exact.end(), bf16_holds));
  const auto saved_again = [&](const std::string& name, int step, const std::string& type) {
    TinyTrainer(tiny_run(scratch / name, {type, "train.max_steps=" + std::to_string(step),
                                          "train.resume=" + checkpoint_path(run, step).string()}))
        ->run();
    return moments_of(checkpoint_path(scratch / name, step));
  };
  const std::vector<float> rounded = saved_again("rounded", 8, kBf16);
  ASSERT_EQ(rounded.size(), exact.size());
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_TRUE(bf16_holds(rounded[i]));
    EXPECT_NEAR(rounded[i], exact[i], std::ldexp(std::abs(exact[i]), -8));
  }
  TinyTrainer(tiny_run(run, {kBf16, "train.max_steps=14"}))->run();
  EXPECT_EQ(saved_again("exact", 14, kFp32), moments_of(checkpoint_path(run, 14)));
  EXPECT_EQ(TinyTrainer(tiny_run(run, {kFp32}))->run().steps, 20);
}

TEST(MomentsTraining, TheMemoryPlanHasHalfOfTheMoments) {
  const auto planned = [](const std::string& type) {
    const RunConfig config = tiny_run("unused", {type});
    DenseAttention attention;
    const auto source = make_synthetic_source(*config.data.synthetic, 1);
    Console console(stdout, false, 1);
    return Trainer::memory_plan(config,
                                {run_model_config(config), attention, *source, {}, console, [] { return false; }});
  };
  const MemoryPlan exact = planned(kFp32), half = planned(kBf16);
  int64_t weights = 0;
  for (const MemoryPlan::Item& item : exact.items())
    if (item.name == "weights") weights = item.bytes;
  EXPECT_EQ(exact.total() - half.total(), weights);
}

}  // namespace
}  // namespace sb
