// Faults that once cost a file, a checkpoint or an answer.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "core/files/mapped_file.h"
#include "run/checkpoint/checkpoint.h"
#include "tests/faults/faulty_program.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRun = R"(
model:
  init: {model_type: qwen2, vocab_size: 16, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
         num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
data:
  synthetic: {task: chunk_recall, vocab_size: 16, length: 48, chunk: 4}
batch: {global_batch_size: 4, micro_batch_sequences: 2}
train: {max_steps: 4, save_steps: 1, save_total_limit: 3, threads: 2}
)";

class Faults : public testing::Test {
 protected:
  std::vector<std::string> training(const std::vector<std::string>& options = {}) const {
    write_bytes(folder_ / "run.yaml", kRun);
    std::vector<std::string> words = {"train", folder_ / "run.yaml", "--set",
                                      "train.output_dir=" + (folder_ / "run").string()};
    for (const std::string& option : options) words.insert(words.end(), {"--set", option});
    return words;
  }
  // A run of four steps with its files.
  void train() const {
    const FaultyResult result = run_faulty(training());
    ASSERT_EQ(result.code, 0) << result.output;
  }
  fs::path run() const { return folder_ / "run"; }
  // Puts a disk of this size where the run is, which the new process alone sees. Ends it with 77 where that is not
  // permitted.
  std::function<void()> mounted(const std::string& size) const {
    return [this, options = "size=" + size] {
      if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
          mount("none", run().c_str(), "tmpfs", 0, options.c_str()) != 0)
        _exit(77);
    };
  }
  std::string make_pipe(const std::string& name) const {
    EXPECT_EQ(mkfifo((folder_ / name).c_str(), 0600), 0);
    return folder_ / name;
  }

  ScratchDirectory folder_;
};

TEST_F(Faults, MetricsThatCannotBeReadStayAsTheyAre) {
  train();
  const std::string before = read_bytes(run() / "metrics.jsonl");
  for (const auto& fault : {always("read", EIO, "metrics.jsonl"), always("open", EACCES, "metrics.jsonl")}) {
    const FaultyResult result = run_faulty(training({"train.max_steps=6"}), fault);
    EXPECT_EQ(result.code, 2) << result.output;
    EXPECT_TRUE(result.says("metrics.jsonl: cannot be")) << result.output;
    EXPECT_EQ(read_bytes(run() / "metrics.jsonl"), before);
  }
  EXPECT_EQ(run_faulty(training({"train.max_steps=6"})).code, 0);
}

TEST_F(Faults, AReportOfWhatCannotBeReadIsNotWritten) {
  train();
  for (const std::string name : {"metrics.jsonl", "run.yaml"}) {
    const FaultyResult result = run_faulty({"report", run()}, always("read", EIO, name));
    EXPECT_EQ(result.code, 2) << result.output;
    EXPECT_TRUE(result.says(name)) << result.output;
    EXPECT_FALSE(fs::exists(run() / "report.html"));
  }
}

TEST_F(Faults, AnUnreadableCheckpointIsNotADamagedOne) {
  train();
  for (const std::string name :
       {"checkpoint-4/manifest.json", "checkpoint-4/state.json", "checkpoint-4/model.safetensors"}) {
    for (const auto& fault : {always("read", EIO, name), always("open", EACCES, name)}) {
      const FaultyResult result = run_faulty(training({"train.max_steps=6"}), fault);
      EXPECT_EQ(result.code, 2) << result.output;
      EXPECT_TRUE(result.says(name + ": cannot be")) << result.output;
      EXPECT_TRUE(result.says("move ")) << result.output;
      EXPECT_FALSE(result.says("damaged")) << result.output;
      EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{2, 3, 4}));
      EXPECT_EQ(find_damage(run() / "checkpoint-4"), std::nullopt);
    }
  }
  const FaultyResult after = run_faulty(training({"train.max_steps=6"}));
  EXPECT_EQ(after.code, 0);
  EXPECT_TRUE(after.says("checkpoint-4 after step 4")) << after.output;
}

// Written while training goes on: it is said all the same, and nothing half-written is left.
TEST_F(Faults, ACheckpointThatCannotBeWrittenEndsTheRun) {
  const FaultyResult result =
      run_faulty(training({"train.max_steps=1000", "train.save_steps=2"}), always("write", ENOSPC, "checkpoint-4"));
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_TRUE(result.says("the checkpoint of step 4 could not be saved")) << result.output;
  EXPECT_TRUE(result.says("checkpoint-2 is intact")) << result.output;
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{2}));
  EXPECT_FALSE(fs::exists(run() / ".saving-checkpoint-4"));
}

TEST_F(Faults, AKillWhileACheckpointIsWrittenLosesThatOneAlone) {
  train();
  const std::string expected = read_bytes(run() / "final/model.safetensors");
  for (const std::string operation : {"write", "fsync", "rename"}) {
    fs::remove_all(run());
    auto fault = always(operation, 1, ".saving-checkpoint-3");
    fault["SB_FAULT"] = operation + ":1:kill";
    const FaultyResult killed = run_faulty(training(), fault);
    EXPECT_EQ(killed.code, -SIGKILL) << operation << killed.output;
    EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{1, 2})) << operation;
    for (const int64_t step : checkpoint_steps(run()))
      EXPECT_EQ(find_damage(checkpoint_path(run(), step)), std::nullopt) << step;
    const FaultyResult after = run_faulty(training());
    EXPECT_EQ(after.code, 0) << after.output;
    EXPECT_TRUE(read_bytes(run() / "final/model.safetensors") == expected) << operation;
  }
}

// Each rank at its part, and the first one at what completes them.
TEST_F(Faults, AKillOfARankWhileItSavesLosesThatCheckpointAlone) {
#if !defined(SB_SEVERAL_PROCESSES)
  GTEST_SKIP() << "built without MPI";
#endif
  std::vector<std::string> two = training({"parallel.dp=2", "train.threads=1"});
  two.insert(two.end(), {"--ranks", "2"});
  const FaultyResult undisturbed = run_faulty(two);
  ASSERT_EQ(undisturbed.code, 0) << undisturbed.output;
  const std::string expected = read_bytes(run() / "final/model.safetensors");
  for (const auto& [operation, path] : {std::pair<std::string, std::string>{"write", "/model-00002-of-00002"},
                                        {"fsync", "/optimizer-00002-of-00002"},
                                        {"write", "/optimizer-00001-of-00002"},
                                        {"write", "/manifest.json"},
                                        {"rename", ""}}) {
    SCOPED_TRACE(operation + path);
    fs::remove_all(run());
    auto fault = always(operation, 1, ".saving-checkpoint-3" + path);
    fault["SB_FAULT"] = operation + ":1:kill";
    const FaultyResult killed = run_faulty(two, fault);
    EXPECT_FALSE(killed.hung);
    EXPECT_NE(killed.code, 0) << killed.output;
    EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{1, 2}));
    for (const int64_t step : checkpoint_steps(run()))
      EXPECT_EQ(find_damage(checkpoint_path(run(), step)), std::nullopt) << step;
    const FaultyResult after = run_faulty(two);
    EXPECT_EQ(after.code, 0) << after.output;
    EXPECT_TRUE(after.says("checkpoint-2 after step 2")) << after.output;
    EXPECT_TRUE(read_bytes(run() / "final/model.safetensors") == expected);
  }
}

// A full disk of one rank's host: said by that rank, and the others end.
TEST_F(Faults, APartThatCannotBeWrittenEndsTheRunOfAllRanks) {
#if !defined(SB_SEVERAL_PROCESSES)
  GTEST_SKIP() << "built without MPI";
#endif
  std::vector<std::string> two = training({"parallel.dp=2", "train.threads=1", "train.max_steps=1000"});
  two.insert(two.end(), {"--ranks", "2"});
  const FaultyResult result = run_faulty(two, always("write", ENOSPC, ".saving-checkpoint-3/optimizer-00002"));
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_TRUE(result.says("rank 1 on ")) << result.output;
  EXPECT_TRUE(result.says(" ended the job: the checkpoint of step 3 could not be saved")) << result.output;
  EXPECT_TRUE(result.says("checkpoint-2 is intact")) << result.output;
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{1, 2}));
}

TEST_F(Faults, AModelThatCannotBeReplacedIsStillThere) {
  train();
  const std::string before = read_bytes(run() / "final/model.safetensors");
  // Two such renames are of files in the new folder (model.safetensors, config.json), the third is of the folder.
  auto fault = always("rename", EIO, ".saving-final");
  fault["SB_FAULT"] = "rename:3+:" + std::to_string(EIO);
  const FaultyResult result = run_faulty(training({"train.max_steps=6"}), fault);
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_TRUE(result.says(".saving-final] [")) << result.output;
  EXPECT_TRUE(read_bytes(run() / "final/model.safetensors") == before);
  // A file system that cannot exchange two names.
  fault["SB_FAULT"] = "rename:3:" + std::to_string(EINVAL);
  const FaultyResult after = run_faulty(training({"train.max_steps=6"}), fault);
  EXPECT_EQ(after.code, 0) << after.output;
  EXPECT_TRUE(read_bytes(run() / "final/model.safetensors") == read_bytes(run() / "checkpoint-6/model.safetensors"));
}

// OpenBLAS asks for its buffers for ever when the system refuses, out of reach of signals.
TEST_F(Faults, LittleAddressSpaceIsRefusedAndDoesNotHang) {
#if defined(SB_ADDRESS_SANITIZER)
  GTEST_SKIP() << "the sanitizer needs terabytes of address space";
#endif
  bool refused = false;
  for (const rlim_t megabytes : {160, 240, 320, 400, 520, 700}) {
    const FaultyResult result = run_faulty(
        training(), {}, [=] { set_limit(RLIMIT_AS, megabytes << 20); }, std::chrono::seconds(40));
    EXPECT_FALSE(result.hung) << megabytes << " MB: " << result.output;
    EXPECT_TRUE(result.code == 3 || result.code == 127 || result.code == 0)
        << megabytes << " MB: " << result.code << result.output;
    refused |= result.code == 3 && result.says("ulimit -v");
    fs::remove_all(run());
  }
  EXPECT_TRUE(refused);
}

// The least address space that a run needs has no room for a copy of its checkpoints.
TEST_F(Faults, WithoutRoomForACopyTrainingWaitsForItsCheckpoints) {
#if defined(SB_ADDRESS_SANITIZER)
  GTEST_SKIP() << "the sanitizer needs terabytes of address space";
#endif
  const std::vector<std::string> large = {"model.init.hidden_size=256", "model.init.intermediate_size=4096",
                                          "model.init.num_hidden_layers=4", "train.max_steps=1", "train.threads=1"};
  const std::string waits = "training pauses while a checkpoint is saved: host memory has no room for a copy of";
  FaultyResult result;
  for (rlim_t megabytes = 300; megabytes <= 1500; megabytes += 50) {
    result = run_faulty(training(large), {}, [=] { set_limit(RLIMIT_AS, megabytes << 20); });
    if (result.code == 0) break;
    fs::remove_all(run());
  }
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_TRUE(result.says(waits)) << result.output;
  EXPECT_FALSE(result.says("checkpoint copy")) << result.output;
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{1}));
  fs::remove_all(run());
  result = run_faulty(training(large));
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_FALSE(result.says(waits)) << result.output;
  EXPECT_TRUE(result.says("checkpoint copy")) << result.output;
}

TEST_F(Faults, ThreadsThatCannotBeStartedAreAClearError) {
  const FaultyResult result = run_faulty(training({"train.threads=3"}), always("thread", EAGAIN, "any"));
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_TRUE(result.says("3 threads were requested, but the system starts no more than 1")) << result.output;
}

TEST_F(Faults, AFileSystemWithoutLocksIsWarnedOf) {
  for (const int error : {ENOLCK, EOPNOTSUPP}) {
    const FaultyResult result = run_faulty(training(), always("flock", error, ".lock"));
    EXPECT_EQ(result.code, 0) << result.output;
    EXPECT_TRUE(result.says(".lock: cannot be locked")) << result.output;
    EXPECT_FALSE(result.says("another process"));
    fs::remove_all(run());
  }
}

TEST_F(Faults, OutputThatCannotBeWrittenLeavesTheOldOne) {
  const fs::path json = folder_ / "rows.json";
  write_bytes(json, "older");
  const std::vector<std::string> simulate = {
      "simulate",   "--model",  "qwen2.5-0.5b", "--profile", "h200-analytic",  "--dp", "2",      "--steps", "1",
      "--policies", "in_order", "--threads",    "1",         "--global-batch", "8",    "--json", json};
  const FaultyResult result = run_faulty(simulate, always("write", ENOSPC, folder_.path()));
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_TRUE(result.says("rows.json")) << result.output;
  EXPECT_EQ(read_bytes(json), "older");
  EXPECT_EQ(run_faulty(simulate).code, 0);
  EXPECT_TRUE(read_bytes(json).starts_with("{"));
  // What is no file is written to as it is.
  std::vector<std::string> to_device = simulate;
  to_device.back() = "/dev/null";
  EXPECT_EQ(run_faulty(to_device).code, 0);
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  fs::create_symlink("rows.json", folder_ / "link.json");
  to_device.back() = folder_ / "link.json";
  EXPECT_EQ(run_faulty(to_device).code, 0);
  EXPECT_TRUE(fs::is_symlink(folder_ / "link.json"));
}

TEST_F(Faults, NothingThatARunPromisesIsLostInSilence) {
  for (const std::string name : {"tfevents", "trace.json"}) {
    const FaultyResult result = run_faulty(training({"train.trace=true"}), always("write", ENOSPC, name));
    EXPECT_EQ(result.code, 2) << result.output;
    EXPECT_TRUE(result.says(name)) << result.output;
    fs::remove_all(run());
  }
  write_bytes(folder_ / "config.json",
              R"({"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
                  "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})");
  const FaultyResult result = run_faulty(
      {"profile", "--model", folder_ / "config.json", "--max-tokens", "256", "--repeats", "1", "--held-out", "0",
       "--threads", "1", "--budget", "640", "--out", folder_ / "profile.json", "--samples", folder_ / "samples.csv"},
      always("write", ENOSPC, "samples.csv"));
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_TRUE(result.says("samples.csv")) << result.output;
}

TEST_F(Faults, PipesAndFoldersAreRefusedAndNotWaitedFor) {
  const std::string pipe = make_pipe("pipe"), here = folder_.path();
  const std::string tokenizer = fs::path(SB_TEST_DATA) / "tokenizer_qwen2_style/tokenizer.json";
  make_pipe("tokens.idx");
  write_bytes(folder_ / "tokens.bin", "x");
  make_pipe("llmc.bin");
  fs::create_directories(folder_ / "model/config.json");
  const std::vector<std::string> simulate = {"simulate", "--profile", "h200-analytic", "--dp", "2"};
  const auto with = [](std::vector<std::string> words, const std::vector<std::string>& more) {
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const std::vector<std::vector<std::string>> commands = {
      {"config", pipe},
      {"config", here},
      {"data", "stats", folder_ / "tokens"},
      {"data", "stats", folder_ / "llmc.bin"},
      {"profile", "--model", folder_ / "model", "--out", folder_ / "out"},
      {"data", "tokenize", "--tokenizer", pipe, "--input", tokenizer, "--output", folder_ / "out"},
      {"data", "tokenize", "--tokenizer", tokenizer, "--input", pipe, "--output", folder_ / "out"},
      {"data", "lengths", "--pool", pipe, "--output", folder_ / "out"},
      {"data", "lengths", "--pool", here, "--output", folder_ / "out"},
      with(simulate, {"--model", "qwen2.5-0.5b", "--lengths", pipe}),
      with(simulate, {"--model", "qwen2.5-0.5b", "--lengths", here}),
      with(simulate, {"--model", pipe, "--lengths", "chatqa2-like"}),
      training({"data.synthetic.lengths=" + here}),
      training({"data.synthetic.lengths=" + pipe}),
  };
  for (const auto& command : commands) {
    const FaultyResult result = run_faulty(command, {}, {}, std::chrono::seconds(20));
    EXPECT_FALSE(result.hung) << command[0] << " " << command[1];
    EXPECT_EQ(result.code, 2) << testing::PrintToString(command) << result.output;
    EXPECT_TRUE(result.says(folder_.path().string())) << result.output;
  }
}

TEST_F(Faults, NamesThatAreNotUtf8AreNoDefect) {
  const std::string odd = folder_ / "\xff\xfe.json";
  fs::copy_file(fs::path(SB_TEST_DATA) / "tokenizer_qwen2_style/tokenizer.json", odd);
  const std::string text = folder_ / "\xff.jsonl";
  write_bytes(text, "{\"text\": \"some words\"}\n");
  const FaultyResult tokens =
      run_faulty({"data", "tokenize", "--tokenizer", odd, "--input", text, "--output", folder_ / "tokens"});
  EXPECT_EQ(tokens.code, 0) << tokens.output;
  const std::string lengths = folder_ / "\xfd.txt";
  write_bytes(lengths, "100\n200\n");
  const FaultyResult rows = run_faulty({"simulate", "--model", "qwen2.5-0.5b", "--profile", "h200-analytic", "--dp",
                                        "2", "--steps", "1", "--policies", "in_order", "--global-batch", "4",
                                        "--threads", "1", "--lengths", lengths, "--json", folder_ / "rows.json"});
  EXPECT_EQ(rows.code, 0) << rows.output;
  const std::string model = folder_ / "\xfc.json";
  write_bytes(model, R"({"model_type": "qwen2", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
                         "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16})");
  const FaultyResult profile =
      run_faulty({"profile", "--model", model, "--max-tokens", "256", "--repeats", "1", "--held-out", "0", "--threads",
                  "1", "--budget", "640", "--out", folder_ / "profile.json"});
  EXPECT_EQ(profile.code, 0) << profile.output;
}

// Small disks, which are full at different moments.
TEST_F(Faults, AFullDiskIsAnErrorThatNamesTheFolder) {
  fs::create_directories(run());
  const FaultyResult room = run_faulty(training(), {}, mounted("8m"));
  if (room.code == 77) GTEST_SKIP() << "no file systems may be mounted here";
  EXPECT_EQ(room.code, 0) << room.output;
  int refused = 0;
  for (const char* size : {"40k", "200k", "400k", "600k", "800k"}) {
    const FaultyResult full = run_faulty(training(), {}, mounted(size));
    EXPECT_TRUE(full.code == 0 || full.code == 2) << size << full.code << full.output;
    if (full.code == 0) continue;
    ++refused;
    EXPECT_TRUE(full.says("No space left on device")) << size << full.output;
    EXPECT_TRUE(full.says(run().string())) << full.output;
  }
  EXPECT_GT(refused, 1);
}

int64_t blocks_of(const fs::path& folder) {
  int64_t bytes = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    if (struct stat file = {}; stat(entry.path().c_str(), &file) == 0) bytes += 512 * file.st_blocks;
  return bytes;
}

// Room for two of them and the model, not for three.
TEST_F(Faults, TheOldestCheckpointGoesFirstWhereRoomIsShort) {
  train();
  const int64_t checkpoint = blocks_of(run() / "checkpoint-4"), model = blocks_of(run() / "final");
  const int64_t besides = blocks_of(run()) - 3 * checkpoint - model;
  fs::remove_all(run());
  fs::create_directories(run());
  const FaultyResult result = run_faulty(training({"train.save_total_limit=2"}), {},
                                         mounted(std::to_string((besides + 27 * checkpoint / 10) / 4096 * 4096)));
  if (result.code == 77) GTEST_SKIP() << "no file systems may be mounted here";
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_TRUE(result.says("deleting the oldest one before the new one is saved")) << result.output;
}

TEST_F(Faults, TokensThatAreCutWhileTrainingReadsThemAreNamed) {
  ASSERT_EQ(run_faulty({"data", "synth", "--task", "copy", "--vocab-size", "16", "--sequences", "2000", "--length",
                        "48", "--output", folder_ / "tokens"})
                .code,
            0);
  std::thread cut([&] {
    for (int tries = 0; tries < 3000; ++tries, std::this_thread::sleep_for(std::chrono::milliseconds(10)))
      if (std::error_code missing; fs::file_size(run() / "metrics.jsonl", missing) > 0 && !missing) break;
    fs::resize_file(folder_ / "tokens.bin", 100);
  });
  const FaultyResult result = run_faulty(
      training({"data={train: [" + (folder_ / "tokens").string() + "], synthetic: null, max_sequence_length: 48}",
                "train.max_steps=1000000", "train.save_steps=0", "train.validation_steps=0"}));
  cut.join();
  EXPECT_EQ(result.code, 2) << result.output;
  EXPECT_TRUE(result.says("tokens.bin: was truncated while it was being read")) << result.output;
}

// What somebody else's process left and only they can remove.
TEST_F(Faults, LeftoversOfAnotherUserDoNotBlockARun) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can act as two users";
  constexpr uid_t kNobody = 65534;
  const auto as_nobody = [] {
    if (setgid(kNobody) != 0 || setuid(kNobody) != 0) _exit(77);
  };
  fs::permissions(folder_.path(), fs::perms::all);
  const FaultyResult started = run_faulty(training(), {}, as_nobody);
  if (started.code == 77 || started.code == 127) GTEST_SKIP() << "the program cannot be started as another user here";
  ASSERT_EQ(started.code, 0) << started.output;
  for (const std::string name : {".removing-checkpoint-2", ".saving-checkpoint-5", ".removing-checkpoint-3"}) {
    fs::create_directories(run() / name);
    write_bytes(run() / name / "theirs", "x");
  }
  const FaultyResult result = run_faulty(training({"train.max_steps=6"}), {}, as_nobody);
  EXPECT_EQ(result.code, 0) << result.output;
  EXPECT_TRUE(result.says(".removing-checkpoint-2 is left over from an earlier save and cannot be removed"))
      << result.output;
  EXPECT_EQ(checkpoint_steps(run()), (std::vector<int64_t>{4, 5, 6}));
}

TEST_F(Faults, AFileSizeLimitIsAnErrorThatNamesTheFile) {
  train();
  const auto little = [] { set_limit(RLIMIT_FSIZE, 100); };
  const std::string tokenizer = fs::path(SB_TEST_DATA) / "tokenizer_qwen2_style/tokenizer.json";
  std::string lines;
  for (int i = 0; i < 400; ++i) lines += "{\"text\": \"some words that take some room\"}\n";
  write_bytes(folder_ / "text.jsonl", lines);
  for (const std::vector<std::string>& command : {std::vector<std::string>{"report", run()},
                                                  {"data", "tokenize", "--tokenizer", tokenizer, "--input",
                                                   folder_ / "text.jsonl", "--output", folder_ / "tokens"}}) {
    // The limit holds for its output, too, which is short.
    const FaultyResult result = run_faulty(command, {}, little);
    EXPECT_EQ(result.code, 2) << command[0] << result.output;
  }
}

TEST(MappedFileDeathTest, OneThatGetsShorterEndsTheProgramWithItsName) {
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  ScratchDirectory scratch;
  const std::string path = scratch / "tokens.bin";
  const auto read_after_cut = [&] {
    write_bytes(path, std::string(64 * 4096, 'x'));
    const MappedFile file(path);
    fs::resize_file(path, 4096);
    volatile unsigned char sum = 0;
    for (int64_t i = 0; i < file.size(); i += 4096) sum = static_cast<unsigned char>(sum + file.data()[i]);
  };
  EXPECT_EXIT(read_after_cut(), testing::ExitedWithCode(2), "tokens.bin: was truncated while it was being read");
}

}  // namespace
}  // namespace sb
