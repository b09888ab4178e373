#include "run/config/run_config_balance.h"

#include <gtest/gtest.h>

#include "core/errors.h"
#include "train/make_planner.h"

namespace sb {
namespace {

constexpr const char* kRun =
    "model: { init: { hidden_size: 32, num_hidden_layers: 2 } }\n"
    "data: { synthetic: { task: chunk_recall, length: 64, vocab_size: 64 } }\n"
    "attention: { pattern: topk, budget: 1024 }\n"
    "balance: { batching: sab, ordering: auto, tuning: optimal, p: 0.2, target: 0.25, max_budget: 3072, adapt: off,\n"
    "           profile: here.json, replay: runs/old/plan.jsonl }\n";

std::string error_of(const std::vector<std::string>& overrides) {
  try {
    parse_run_config(kRun, "run.yaml", overrides);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(RunConfigBalance, ReadsAndPrintsEveryOption) {
  const RunConfig config = parse_run_config(kRun, "run.yaml");
  EXPECT_EQ(config.balance.batching, BatchingPolicy::sab);
  EXPECT_EQ(config.balance.ordering, BalanceOptions::Ordering::automatic);
  EXPECT_EQ(config.balance.tuning, TuningPolicy::optimal);
  EXPECT_EQ(config.balance.p, 0.2);
  EXPECT_EQ(config.balance.target, 0.25);
  EXPECT_EQ(config.balance.max_budget, 3072);
  EXPECT_FALSE(config.balance.adapt);
  EXPECT_EQ(config.balance.profile, "here.json");
  EXPECT_EQ(config.balance.replay, "runs/old/plan.jsonl");
  for (const std::vector<std::string>& overrides : std::vector<std::vector<std::string>>{
           {},
           {"balance.target=equal_coverage"},
           {"balance.target=equal_coverage", "balance.tuning=anchor", "balance.anchor=max", "balance.adapt=on"},
           {"balance={batching: in_order, ordering: none, tuning: none, target: equal_coverage}"}}) {
    const RunConfig once = parse_run_config(kRun, "run.yaml", overrides);
    EXPECT_EQ(print_run_config(parse_run_config(print_run_config(once), "printed")), print_run_config(once));
  }
}

TEST(RunConfigBalance, MemoryIsPlannedForWhatTuningMayGive) {
  const auto largest = [](const std::vector<std::string>& overrides) {
    const RunConfig config = parse_run_config(kRun, "run.yaml", overrides);
    EXPECT_EQ(attention_spec(config).max_budget, largest_budget(config));
    return largest_budget(config);
  };
  EXPECT_EQ(largest({}), 3072);
  EXPECT_EQ(largest({"balance.max_budget=0"}), 4 * 1024);
  // Plans that are used again may have been tuned.
  const std::vector<std::string> off = {"balance.tuning=none", "balance.target=equal_coverage", "balance.max_budget=0"};
  EXPECT_EQ(largest(off), 4 * 1024);
  EXPECT_EQ(largest({off[0], off[1], off[2], "balance.replay=''"}), 0);
  EXPECT_EQ(largest({off[0], off[1], off[2], "attention.pattern=dense"}), 0);
}

TEST(RunConfigBalance, SaysWhatDoesNotFit) {
  EXPECT_NE(error_of({"balance.anchor=min"}).find("balance.anchor: only applies to tuning: anchor"), std::string::npos);
  EXPECT_NE(error_of({"balance.tuning=anchor"}).find("balance.target: only applies to tuning: optimal"),
            std::string::npos);
  EXPECT_NE(error_of({"balance.target=1.5"}).find("balance.target: must be at most 1"), std::string::npos);
  EXPECT_NE(error_of({"balance.target=some"}).find("expected equal_coverage or a number from 0 to 1, found 'some'"),
            std::string::npos);
  EXPECT_NE(error_of({"balance.p=1"}).find("balance.p: must be below 1"), std::string::npos);
  EXPECT_NE(error_of({"attention.budget=2147483648"}).find("attention.budget"), std::string::npos);
  EXPECT_NE(error_of({"attention.pattern=dense"}).find("topk or mass"), std::string::npos);
  EXPECT_NE(error_of({"balance.profile=''"}).find("sparsebalance profile --run"), std::string::npos);
  EXPECT_NE(error_of({"balance.adapt=on", "attention.coverage_rows=0"}).find("measured coverage"), std::string::npos);
  EXPECT_NE(error_of({"balance.max_budget=512"}).find("balance.max_budget: 512 is below attention.budget (1024)"),
            std::string::npos);
  EXPECT_NE(error_of({"balance.tuning=none", "balance.target=equal_coverage", "balance.replay=''"})
                .find("balance.max_budget: only applies to balance.tuning and balance.replay"),
            std::string::npos);
  EXPECT_NE(error_of({"balance.tuning=best"}).find("optimal"), std::string::npos);
  // Plans that are used again need no latencies.
  EXPECT_EQ(error_of({"balance.profile=''", "balance.batching=in_order", "balance.ordering=none", "balance.tuning=none",
                      "balance.target=equal_coverage"}),
            "");
  // What an older run.yaml may have.
  for (const char* word : {"length", "quadratic", "wlb"})
    EXPECT_EQ(error_of({fmt::format("balance.batching={}", word)}),
              fmt::format("--set: balance.batching: {} is no longer available for training, only in `sparsebalance "
                          "simulate`; set sab, with a balance.profile, or in_order",
                          word));
}

TEST(RunConfigBalance, WhatNeedsPiecesOrAGpuSaysSo) {
  EXPECT_NE(error_of({"train.recompute=chunk"}).find("set balance.chunk to their size in tokens"), std::string::npos);
  EXPECT_NE(error_of({"train.recompute=chunk", "balance.chunk=auto"}).find("set balance.chunk"), std::string::npos);
  EXPECT_NE(error_of({"train.recompute=chunk", "balance.chunk=1024", "parallel.pp=2"}).find("parallel.pp 2"),
            std::string::npos);
  EXPECT_EQ(error_of({"train.recompute=chunk", "balance.chunk=1024"}), "");
  EXPECT_NE(error_of({"balance.chunk=1024", "parallel.cp=2", "parallel.placement=zigzag"}).find("triangular"),
            std::string::npos);
  EXPECT_EQ(error_of({"balance.chunk=1024", "parallel.cp=2", "parallel.placement=striped"}), "");
  EXPECT_NE(error_of({"train.offload_optimizer=true"}).find("in host memory anyway"), std::string::npos);
  EXPECT_NE(error_of({"train.offload_optimizer=true", "device=cuda", "train.precision=float32"}).find("float32"),
            std::string::npos);
  EXPECT_EQ(error_of({"train.offload_optimizer=true", "device=cuda"}), "");
}

TEST(RunConfigBalance, Fp8IsForWholeModelsOnAGpu) {
  const std::string fp8 = "train.precision=fp8", cuda = "device=cuda";
  EXPECT_NE(error_of({fp8}).find("set device: cuda"), std::string::npos);
  EXPECT_NE(error_of({fp8, cuda, "lora.rank=4"}).find("remove lora"), std::string::npos);
  EXPECT_NE(error_of({cuda, "train.fp8_skip=[first]"}).find("train.fp8_skip: only applies to train.precision: fp8"),
            std::string::npos);
  EXPECT_NE(error_of({fp8, cuda, "train.fp8_skip=first"}).find("a list of layers"), std::string::npos);
  EXPECT_NE(error_of({fp8, cuda, "train.fp8_skip=[middle]"}).find("train.fp8_skip"), std::string::npos);
  EXPECT_EQ(error_of({fp8, cuda, "train.fp8_skip=[first, 1, last]"}), "");
}

}  // namespace
}  // namespace sb
