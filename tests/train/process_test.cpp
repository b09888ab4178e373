// The real program, started, signalled and killed.
#include <gtest/gtest.h>

#include "core/random.h"
#include "device/cuda.h"
#include "run/checkpoint/checkpoint.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/training_process.h"

namespace sb {
namespace {

namespace fs = std::filesystem;
using Milliseconds = std::chrono::milliseconds;

bool is_saving(const fs::path& directory) {
  std::error_code gone;  // entries come and go while we look
  for (auto entry = fs::directory_iterator(directory / "run", gone); !gone && entry != fs::directory_iterator();
       entry.increment(gone))
    if (entry->path().filename().string().starts_with(".saving-checkpoint")) return true;
  return false;
}

// Killed again and again, at random moments and in the middle of saves, a run ends with the bytes of one that was left
// alone. The seed is fixed, the moments are not: what is tested is that no moment matters.
TEST(Process, KilledAtAnyMomentItEndsTheSame) {
  ScratchDirectory undisturbed, killed;
  ASSERT_EQ(train(undisturbed.path()), 0);
  Random random(20);
  int kills = 0, kills_in_save = 0;
  for (int round = 0; round < 16; ++round) {
    Training training(killed.path(), {});
    if (round % 2 == 0) {
      // Into a save: the directory under its temporary name is there.
      wait_for(training, [&] { return is_saving(killed.path()); });
      std::this_thread::sleep_for(std::chrono::microseconds(random.below(1500)));
    } else {
      const auto moment = std::chrono::steady_clock::now() + Milliseconds(random.below(120));
      wait_for(training, [&] { return std::chrono::steady_clock::now() >= moment; });
    }
    training.signal(SIGKILL);
    const int code = training.wait();
    if (code == 0) break;
    EXPECT_EQ(code, -SIGKILL) << training.output();
    ++kills;
    kills_in_save += is_saving(killed.path());
    // What has a checkpoint's name is intact, however the process ended.
    for (const int64_t step : checkpoint_steps(killed / "run"))
      EXPECT_EQ(find_damage(checkpoint_path(killed / "run", step)), std::nullopt) << step;
  }
  EXPECT_GT(kills, 0);
  EXPECT_GT(kills_in_save, 0);
  ASSERT_EQ(train(killed.path()), 0);
  EXPECT_EQ(final_weights(killed.path()), final_weights(undisturbed.path()));
  EXPECT_EQ(read_bytes(killed / "run" / "checkpoint-40" / "state.json"),
            read_bytes(undisturbed / "run" / "checkpoint-40" / "state.json"));
  EXPECT_FALSE(is_saving(killed.path()));

  // The record has every step once, with the numbers of the undisturbed run.
  EXPECT_EQ(losses(killed.path()).size(), 40u);
  EXPECT_EQ(losses(killed.path()), losses(undisturbed.path()));
}

// The same with long sequences in pieces, their forwards run again.
TEST(Process, KilledWithPiecesInFlightItEndsTheSame) {
  ScratchDirectory undisturbed, killed;
  const std::vector<std::string> pieces = {
      "--set", "data.synthetic={length: 300, curriculum: {start_length: 200}}",
      "--set", "attention={pattern: topk, block: 64, budget: 192, dense_below: 0, local_blocks: 1}",
      "--set", "balance.chunk=64",
      "--set", "train.recompute=chunk",
      "--set", "train.max_steps=12",
      "--set", "train.validation_steps=5"};
  ASSERT_EQ(train(undisturbed.path(), pieces), 0);
  Random random(21);
  int kills = 0;
  for (int round = 0; round < 6; ++round) {
    Training training(killed.path(), pieces);
    const auto moment = std::chrono::steady_clock::now() + Milliseconds(40 + random.below(250));
    wait_for(training, [&] { return std::chrono::steady_clock::now() >= moment; });
    training.signal(SIGKILL);
    if (training.wait() == 0) break;
    ++kills;
  }
  EXPECT_GT(kills, 0);
  ASSERT_EQ(train(killed.path(), pieces), 0);
  EXPECT_EQ(final_weights(killed.path()), final_weights(undisturbed.path()));
  EXPECT_EQ(losses(killed.path()), losses(undisturbed.path()));
  EXPECT_EQ(losses(killed.path()).size(), 12u);
}

class StopSignals : public testing::TestWithParam<int> {};

TEST_P(StopSignals, SavesExitsWithZeroAndGoesOnExactly) {
  ScratchDirectory undisturbed, stopped;
  const std::vector<std::string> rarely = {"--set", "train.save_steps=0"};
  ASSERT_EQ(train(undisturbed.path(), rarely), 0);
  {
    Training training(stopped.path(), rarely);
    ASSERT_TRUE(wait_for(training, [&] { return metric_lines(stopped.path()) >= 4; }));
    training.signal(GetParam());
    if (GetParam() == SIGUSR1) training.signal(GetParam());  // launchers and schedulers pass it on more than once
    EXPECT_EQ(training.wait(), 0) << training.output();
    EXPECT_TRUE(contains(training.output(), "stopped after step")) << training.output();
    EXPECT_TRUE(contains(training.output(), "stopping after this micro-batch")) << training.output();
    EXPECT_TRUE(contains(training.output(), "the same command resumes from there"));
  }
  EXPECT_FALSE(fs::exists(stopped / "run" / "final"));
  ASSERT_EQ(checkpoint_steps(stopped / "run").size(), 1u);
  EXPECT_EQ(train(stopped.path(), rarely), 0);
  EXPECT_EQ(final_weights(stopped.path()), final_weights(undisturbed.path()));
}

INSTANTIATE_TEST_SUITE_P(Signals, StopSignals, testing::Values(SIGTERM, SIGINT, SIGUSR1));

TEST(Process, ADamagedCheckpointIsNamedAndSkipped) {
  ScratchDirectory undisturbed, damaged;
  ASSERT_EQ(train(undisturbed.path()), 0);
  ASSERT_EQ(train(damaged.path(), {"--set", "train.save_steps=15"}), 0);
  ASSERT_EQ(checkpoint_steps(damaged / "run"), (std::vector<int64_t>{30, 40}));
  fs::resize_file(damaged / "run" / "checkpoint-40" / "optimizer.safetensors", 1000);
  fs::remove_all(damaged / "run" / "final");
  Training again(damaged.path(), {});
  EXPECT_EQ(again.wait(), 0);
  EXPECT_TRUE(contains(again.output(), "checkpoint-40, which is damaged: optimizer.safetensors has 1000 bytes"))
      << again.output();
  EXPECT_TRUE(contains(again.output(), "resumed from " + (damaged / "run" / "checkpoint-30").string()));
  EXPECT_EQ(final_weights(damaged.path()), final_weights(undisturbed.path()));
}

TEST(Process, AFullDiskEndsTheRunWithAClearErrorAndTheOldCheckpoint) {
  ScratchDirectory undisturbed, full;
  ASSERT_EQ(train(undisturbed.path()), 0);
  {
    Training training(full.path(), {"--set", "train.save_steps=7"});
    // Any of them: the first is gone soon, on a busy machine before anybody looks.
    ASSERT_TRUE(wait_for(training, [&] { return !checkpoint_steps(full / "run").empty(); }));
    training.signal(SIGKILL);
    training.wait();
  }
  const int64_t newest = checkpoint_steps(full / "run").back();
  {
    // The weights take more than this: the next save fails as on a full disk.
    Training training(full.path(), {}, 20'000);
    EXPECT_EQ(training.wait(), 2);
    EXPECT_TRUE(contains(training.output(), "could not be saved")) << training.output();
    EXPECT_TRUE(contains(training.output(), "checkpoint-" + std::to_string(newest) + " is intact"))
        << training.output();
  }
  EXPECT_EQ(checkpoint_steps(full / "run").back(), newest);
  EXPECT_EQ(train(full.path()), 0);
  EXPECT_EQ(final_weights(full.path()), final_weights(undisturbed.path()));
}

TEST(Process, AnotherRunsDirectoryAndASecondProcessAreRefused) {
  ScratchDirectory scratch;
  {
    Training first(scratch.path(), {"--set", "train.max_steps=100000"});
    ASSERT_TRUE(wait_for(first, [&] { return metric_lines(scratch.path()) >= 2; }));
    ScratchDirectory elsewhere;  // for its output
    Training second(elsewhere.path(), {"--set", "train.output_dir=" + (scratch / "run").string()});
    EXPECT_EQ(second.wait(), 2);
    EXPECT_TRUE(contains(second.output(), "another process is training there")) << second.output();
  }
  Training other(scratch.path(), {"--set", "train.seed=7"});
  EXPECT_EQ(other.wait(), 2);
  EXPECT_TRUE(contains(other.output(), "already holds another run")) << other.output();
  EXPECT_TRUE(contains(other.output(), "train.seed: 1 there, 7 here"));
}

TEST(Process, PrintConfigPrintsAndStops) {
  ScratchDirectory scratch;
  Training training(scratch.path(), {"--print-config", "--set", "train.seed=9"});
  EXPECT_EQ(training.wait(), 0);
  EXPECT_TRUE(contains(training.output(), "seed: 9"));
  EXPECT_FALSE(fs::exists(scratch / "run"));
}

TEST(Process, WhatThisBuildCannotDoIsRefused) {
  for (const std::string option : {"device=cuda", "parallel.dp=2"}) {
    if (option == "device=cuda" && cuda::problem().empty()) continue;  // it can
    ScratchDirectory scratch;
    Training training(scratch.path(), {"--set", option});
    EXPECT_EQ(training.wait(), 2) << option << training.output();
    EXPECT_FALSE(fs::exists(scratch / "run")) << option;
  }
}

TEST(Process, ItSaysWhatItDoesFromHeaderToResults) {
  ScratchDirectory scratch;
  Training training(scratch.path(), {"--set", "train.max_steps=3"});
  ASSERT_EQ(training.wait(), 0);
  const std::string out = training.output();
  size_t at = 0;
  for (const char* part : {"layout", "1 process, 2 threads", "memory plan", "optimizer", "total", "estimate    about",
                           "validation at step 0", "step 1/3", "GFLOP/s", "step 3/3", "validation at step 3",
                           "tokens/s", "before:", "after:", "final", "metrics.jsonl"}) {
    const size_t found = out.find(part, at);
    ASSERT_NE(found, std::string::npos) << part << " after\n" << out.substr(0, at);
    at = found;
  }
  EXPECT_EQ(out.find("output_dir:"), std::string::npos) << "the configuration is in run.yaml and with --print-config";
  for (size_t begin = out.find("step 1/3"), end = 0; begin < out.size(); begin = end + 1) {
    end = std::min(out.find('\n', begin), out.size());
    if (out.compare(begin, 5, "step ") == 0) {
      EXPECT_LE(end - begin, 120u) << out.substr(begin, end - begin);
    }
  }
}

}  // namespace
}  // namespace sb
