#include "run/run_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "run/disk_room.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/tiny_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// A directory in which a run has begun.
void begin_run(const RunConfig& config) {
  const RunDirectory directory(config);
  write_bytes(directory.path() / "metrics.jsonl", "{\"step\":1}\n");
}

void expect_refused(const RunConfig& config, const std::vector<std::string>& words) {
  const std::string message = user_error_of([&] { RunDirectory directory(config); });
  for (const std::string& word : words) EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
}

TEST(FlattenYaml, NamesEveryValueByItsPath) {
  const auto flat = flatten_yaml("a: 1\nb: {c: x, d: {e: [1, 2]}}\n");
  EXPECT_EQ(flat, (std::map<std::string, std::string>{{"a", "1"}, {"b.c", "x"}, {"b.d.e", "[1, 2]"}}));
  const auto list = flatten_yaml("a: [{path: x, weight: 2}, y]\n");
  EXPECT_EQ(list, (std::map<std::string, std::string>{{"a", "[{path: x, weight: 2}, y]"}}));
}

TEST(CompareRuns, TellsHarmlessChangesFromAnotherRun) {
  const auto difference =
      compare_runs("train: {max_steps: 1, seed: 1, gone: 2}\nmodel: {path: a, save_dtype: float32}\nbatch: {loss: x}",
                   "train: {max_steps: 2, seed: 2}\nmodel: {path: b, save_dtype: bfloat16}\nbatch: {loss: x}");
  std::vector<std::string> forbidden, allowed;
  for (const auto& change : difference.forbidden) forbidden.push_back(change.key);
  for (const auto& change : difference.allowed) allowed.push_back(change.key);
  EXPECT_EQ(forbidden, (std::vector<std::string>{"model.path", "train.seed"}));
  EXPECT_EQ(allowed, (std::vector<std::string>{"model.save_dtype", "train.max_steps", "train.gone"}));
}

// What is measured and saved beside training is no other run.
TEST(CompareRuns, AttentionMayBeLookedAtLater) {
  const auto difference = compare_runs(
      "attention: {budget: 256, coverage_rows: 4, dump_index: '', dump_index_step: 1, layer_metrics: false}",
      "attention: {budget: 512, coverage_rows: 0, dump_index: lists, dump_index_step: 9, layer_metrics: true}");
  ASSERT_EQ(difference.forbidden.size(), 1u);
  EXPECT_EQ(difference.forbidden[0].key, "attention.budget");
  EXPECT_EQ(difference.allowed.size(), 4u);
}

TEST(RunDirectory, IsCreatedAndSaysWhatRuns) {
  ScratchDirectory scratch;
  const RunConfig config = tiny_run(scratch / "a" / "b");
  const RunDirectory directory(config);
  EXPECT_EQ(read_bytes(scratch / "a" / "b" / "run.yaml"), print_run_config(config));
  EXPECT_EQ(directory.resume_from(), std::nullopt);
}

TEST(RunDirectory, OneThatCannotBeWrittenToIsRefused) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may write anywhere";
  ScratchDirectory scratch;
  fs::create_directory(scratch / "closed");
  fs::permissions(scratch / "closed", fs::perms::owner_read | fs::perms::owner_exec);
  for (const char* name : {"", "below", "far/below"})
    expect_refused(tiny_run(scratch / "closed" / name), {"train.output_dir", "closed", "cannot be written to: "});
  fs::permissions(scratch / "closed", fs::perms::owner_all);
}

TEST(RunDirectory, OneProcessAtATime) {
  ScratchDirectory scratch;
  const RunConfig config = tiny_run(scratch / "run");
  {
    const RunDirectory directory(config);
    expect_refused(config, {"another process is training there"});
  }
  const RunDirectory again(config);
}

TEST(RunDirectory, AnotherRunIsRefusedWithTheOptionsThatDiffer) {
  ScratchDirectory scratch;
  begin_run(tiny_run(scratch / "run"));
  expect_refused(
      tiny_run(scratch / "run", {"train.seed=2", "batch.global_batch_size=8", "train.max_steps=50"}),
      {"already holds another run", "train.seed: 1 there, 2 here", "batch.global_batch_size: 4 there, 8 here"});
  expect_refused(tiny_run(scratch / "run", {"data.synthetic.chunk=5"}), {"data.synthetic.chunk"});
  expect_refused(tiny_run(scratch / "run", {"model.init.num_hidden_layers=3"}), {"num_hidden_layers"});
  const RunDirectory still_there(tiny_run(scratch / "run"));
}

TEST(RunDirectory, MoreStepsAndAnotherLearningRateAreTheSameRun) {
  ScratchDirectory scratch;
  begin_run(tiny_run(scratch / "run"));
  const RunConfig changed = tiny_run(scratch / "run", {"train.max_steps=99", "optimizer.learning_rate=1e-3",
                                                       "batch.micro_batch_sequences=1", "train.threads=1"});
  testing::internal::CaptureStderr();
  const RunDirectory directory(changed);
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("train.max_steps: 99 (was 20)"), std::string::npos) << log;
  EXPECT_EQ(read_bytes(scratch / "run" / "run.yaml"), print_run_config(changed));
}

TEST(RunDirectory, SaysResumedOnlyWhenItIs) {
  ScratchDirectory scratch;
  const auto log_of = [&](const std::string& steps) {
    testing::internal::CaptureStderr();
    user_error_of([&] { const RunDirectory directory(tiny_run(scratch / "run", {"train.max_steps=" + steps})); });
    return testing::internal::GetCapturedStderr();
  };
  // A run that was stopped before its first checkpoint.
  begin_run(tiny_run(scratch / "run"));
  const std::string anew = log_of("30");
  EXPECT_NE(anew.find("started again with train.max_steps: 30 (was 20)"), std::string::npos) << anew;
  fs::create_directories(scratch / "run" / "checkpoint-10");
  const std::string damaged = log_of("40");
  EXPECT_NE(damaged.find("damaged"), std::string::npos) << damaged;
  EXPECT_EQ(damaged.find("train.max_steps"), std::string::npos) << damaged;
  write_bytes(scratch / "run" / "checkpoint-10" / "manifest.json", R"({"format": 1, "files": {}})");
  const std::string resumed = log_of("50");
  EXPECT_NE(resumed.find("resumed with train.max_steps: 50 (was 30)"), std::string::npos) << resumed;
}

TEST(RunDirectory, OptionsThatTheRunDidNotKnowYetHaveTheirDefaults) {
  ScratchDirectory scratch;
  begin_run(tiny_run(scratch / "run"));
  std::string old = read_bytes(scratch / "run" / "run.yaml");
  const std::string option = "  loss: token_mean\n";
  ASSERT_NE(old.find(option), std::string::npos);
  old.erase(old.find(option), option.size());
  write_bytes(scratch / "run" / "run.yaml", old);
  { const RunDirectory same(tiny_run(scratch / "run")); }
  write_bytes(scratch / "run" / "run.yaml", old);
  expect_refused(tiny_run(scratch / "run", {"batch.loss=sequence_mean"}), {"batch.loss: token_mean there"});
}

TEST(RunDirectory, NeverResumeRefusesAnyRun) {
  ScratchDirectory scratch;
  begin_run(tiny_run(scratch / "run"));
  expect_refused(tiny_run(scratch / "run", {"train.resume=never"}), {"already holds a run", "train.resume"});
}

TEST(RunDirectory, AnAttemptThatFailedBeforeItsFirstStepIsNoRun) {
  ScratchDirectory scratch;
  { const RunDirectory directory(tiny_run(scratch / "run")); }
  write_bytes(scratch / "run" / "metrics.jsonl", "");
  const RunDirectory corrected(tiny_run(scratch / "run", {"train.seed=2", "train.resume=never"}));
}

TEST(RunDirectory, RefusesToReplayTheRunsOwnLog) {
  ScratchDirectory scratch;
  begin_run(tiny_run(scratch / "run"));
  write_bytes(scratch / "run" / "plan.jsonl", "plans");
  RunConfig replay = tiny_run(scratch / "run");
  replay.balance.replay = scratch.path() / "run" / "." / "plan.jsonl";
  expect_refused(replay, {"is this run's own log"});
  EXPECT_EQ(read_bytes(scratch / "run" / "plan.jsonl"), "plans");
}

TEST(RunDirectory, ForeignRunFilesAreRefused) {
  ScratchDirectory scratch;
  fs::create_directories(scratch / "run" / "final");
  expect_refused(tiny_run(scratch / "run"), {"no run.yaml"});
}

TEST(RunDirectory, AFileInItsPlaceIsRefused) {
  ScratchDirectory scratch;
  write_bytes(scratch / "run", "");
  expect_refused(tiny_run(scratch / "run"), {"train.output_dir", "cannot be created"});
}

TEST(RunDirectory, ANamedCheckpointMustBeIntactAndTheNewest) {
  ScratchDirectory scratch;
  const std::string missing = (scratch / "checkpoint-5").string();
  expect_refused(tiny_run(scratch / "run", {"train.resume=" + missing}),
                 {"train.resume", "checkpoint-5 is neither auto, never nor"});
  fs::create_directories(missing);
  expect_refused(tiny_run(scratch / "run", {"train.resume=" + missing}), {"is not an intact checkpoint"});
  begin_run(tiny_run(scratch / "other"));
  expect_refused(tiny_run(scratch / "run", {"train.resume=" + (scratch / "other").string()}),
                 {"is the directory of a run; name one of its checkpoints"});

  begin_run(tiny_run(scratch / "run"));
  fs::create_directories(scratch / "run" / "checkpoint-10");
  const std::string older = (scratch / "run" / "checkpoint-5").string();
  fs::create_directories(older);
  expect_refused(tiny_run(scratch / "run", {"train.resume=" + older}), {"also holds checkpoint-10"});
  const std::string foreign = (scratch / "other" / "checkpoint-10").string();
  fs::create_directories(foreign);
  expect_refused(tiny_run(scratch / "run", {"train.resume=" + foreign}), {"also holds checkpoint-10"});
}

TEST(RunDirectory, TheNewestCheckpointMayBeSpeltInManyWays) {
  ScratchDirectory scratch;
  begin_run(tiny_run(scratch / "run"));
  fs::create_directories(scratch / "run" / "checkpoint-10");
  write_bytes(scratch / "run" / "checkpoint-10" / "manifest.json", R"({"format": 1, "files": {}})");
  fs::create_directory_symlink(scratch / "run", scratch / "link");
  for (const char* spelling : {"run/checkpoint-10", "run/checkpoint-10/", "run/./checkpoint-10//",
                               "run/../run/checkpoint-10/", "link/checkpoint-10/"}) {
    const std::string resume = scratch.path().string() + "/" + spelling;
    const RunDirectory directory(tiny_run(scratch / "run", {"train.resume=" + resume}));
    EXPECT_EQ(directory.resume_from(), fs::path(resume)) << spelling;
  }
}

// What train.resume is for; but who takes other data without meaning to should see it.
TEST(RunDirectory, SaysWhatACheckpointOfAnotherRunWasTrainedWith) {
  ScratchDirectory scratch;
  TinyTrainer(tiny_run(scratch / "first", {"train.max_steps=2"}))->run();
  const std::string resume = "train.resume=" + (scratch / "first" / "checkpoint-2").string();
  const auto log_of = [&](const fs::path& output, std::vector<std::string> overrides) {
    overrides.push_back(resume);
    testing::internal::CaptureStderr();
    { const RunDirectory directory(tiny_run(output, overrides)); }
    return testing::internal::GetCapturedStderr();
  };
  const std::string log =
      log_of(scratch / "second", {"train.max_steps=2", "train.seed=2", "model.init.rope_theta=5e4", "train.threads=1"});
  EXPECT_NE(log.find("warning"), std::string::npos) << log;
  EXPECT_NE(log.find("train.seed was 1 there and is 2 here: its position in the data"), std::string::npos) << log;
  EXPECT_NE(log.find("rope_theta was"), std::string::npos) << log;
  EXPECT_NE(log.find("resumed with train.threads: 1 (was 2)"), std::string::npos) << log;
  EXPECT_EQ(log_of(scratch / "third", {"train.max_steps=2"}), "");
  EXPECT_EQ(log_of(scratch / "first", {"train.max_steps=2"}).find("warning"), std::string::npos);
}

TEST(DiskNeed, TheLimitIsNamedWhereItHelpsAlone) {
  ScratchDirectory scratch;
  const ModelConfig model = *tiny_run(scratch / "run").model.init;
  const auto advice = [&](const std::vector<std::string>& options, const std::vector<int64_t>& saved, int64_t room) {
    return advice_on_room(tiny_run(scratch / "run", options), model, saved, room);
  };
  const std::string ten = "train.max_steps=10", each = "train.save_steps=1";
  const DiskNeed one = disk_need(tiny_run(scratch / "run", {ten, "train.save_steps=0"}), model, {});
  const int64_t two = 2 * one.checkpoint_bytes + one.model_bytes, least = one.total();
  using testing::HasSubstr;
  using testing::Not;
  EXPECT_EQ(advice({ten, each, "train.save_total_limit=1"}, {}, two), "");
  EXPECT_THAT(advice({ten, each, "train.save_total_limit=4"}, {}, two), HasSubstr("lower train.save_total_limit"));
  EXPECT_THAT(advice({ten, each, "train.save_total_limit=0"}, {}, two), HasSubstr("set train.save_total_limit"));
  // One is kept already, or not even that would fit.
  EXPECT_THAT(advice({ten, each, "train.save_total_limit=1"}, {}, least), Not(HasSubstr("save_total_limit")));
  EXPECT_THAT(advice({ten, each, "train.save_total_limit=4"}, {}, least - 1), Not(HasSubstr("save_total_limit")));
  EXPECT_THAT(advice({ten, "train.save_steps=0", "train.save_total_limit=2"}, {}, 1),
              Not(HasSubstr("save_total_limit")));
}

TEST(DiskNeed, CountsWhatIsOnTheDiskAtOnce) {
  ScratchDirectory scratch;
  ModelConfig model;
  model.vocab_size = 10;
  model.hidden_size = 8;
  model.intermediate_size = 6;
  model.layers = 2;
  model.heads = 2;
  model.kv_heads = 1;
  model.head_dim = 4;
  model.tie_word_embeddings = true;
  // Query and output projection 8 x 8, key and value 4 x 8, three of the MLP 6 x 8, two norms of 8; embedding and norm.
  const int64_t parameters = 2 * (2 * 64 + 2 * 32 + 3 * 48 + 2 * 8) + 10 * 8 + 8;
  const auto need = [&](const std::vector<std::string>& options, const std::vector<int64_t>& saved) {
    return disk_need(tiny_run(scratch / "run", options), model, saved);
  };
  const std::string all = "train.save_total_limit=0", ten = "train.max_steps=10";
  EXPECT_EQ(need({all, ten, "train.save_steps=0"}, {}).checkpoint_bytes, 12 * parameters);
  EXPECT_EQ(need({all, ten, "train.save_steps=0"}, {}).model_bytes, 4 * parameters);
  EXPECT_EQ(need({all, ten, "model.save_dtype=bfloat16"}, {}).model_bytes, 2 * parameters);
  EXPECT_EQ(need({all, ten, "train.save_steps=0"}, {}).checkpoints, 1);
  EXPECT_EQ(need({all, ten, "train.save_steps=0"}, {}).total(), 16 * parameters);
  EXPECT_EQ(need({all, ten, "train.save_steps=3"}, {}).checkpoints, 4);  // 3, 6, 9 and 10
  EXPECT_EQ(need({all, ten, "train.save_steps=5"}, {}).checkpoints, 2);
  EXPECT_EQ(need({all, ten, "train.save_steps=3"}, {3, 6}).checkpoints, 2);
  EXPECT_EQ(need({all, ten, "train.save_steps=3"}, {3, 6, 9, 10}).checkpoints, 0);
  // Two are kept, and a third is complete before the oldest goes.
  EXPECT_EQ(need({"train.save_total_limit=2", ten, "train.save_steps=2"}, {}).checkpoints, 3);
  EXPECT_EQ(need({"train.save_total_limit=2", ten, "train.save_steps=2"}, {2, 4}).checkpoints, 1);
  EXPECT_EQ(need({"train.save_total_limit=2", ten, "train.save_steps=2"}, {2, 4, 6, 8}).checkpoints, 1);
  EXPECT_EQ(need({"train.save_total_limit=2", ten, "train.save_steps=2"}, {8, 10}).checkpoints, 0);
}

}  // namespace
}  // namespace sb
