#include "run/checkpoint/checkpoint.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "comm/self_communicator.h"
#include "comm/thread_communicator.h"
#include "core/files/durable_file.h"
#include "plan/planner/balance_state.h"
#include "run/checkpoint/checkpoint_files.h"
#include "run/checkpoint/new_directory.h"
#include "run/checkpoint/optimizer_files.h"
#include "run/checkpoint/selection_file.h"
#include "run/checkpoint_saver.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/tiny_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// Parameters and moments with values that all differ, without a model around them.
struct Contents {
  ModelConfig model = *tiny_run("unused").model.init;
  ParameterSet parameters;
  std::vector<float> first, second;
  TrainState state;
  std::string run_config = "train: {}\n";

  explicit Contents(int64_t step = 7) {
    parameters.declare("qkv.weight", {6, 4}, {{"q", 0, 3}, {"k", 3, 5}, {"v", 5, 6}});
    parameters.declare("norm.weight", {5}, {{"norm", 0, 5}});
    parameters.end_group(2);
    parameters.allocate(false);
    first.resize(static_cast<size_t>(parameters.flat_elements()), 0.0f);
    second = first;
    for (int i = 0; i < parameters.count(); ++i) {
      const Parameter& p = parameters.parameter(i);
      for (int64_t e = 0; e < p.elements(); ++e) {
        const auto at = static_cast<size_t>(p.offset + e);
        parameters.value(i).f32()[e] = 1.0f / static_cast<float>(3 + at);
        first[at] = 0.1f / static_cast<float>(7 + at);
        second[at] = 1e-9f * static_cast<float>(1 + at);
      }
    }
    LearnedSelection selection;
    selection.planes = {{}, {12.5, std::vector<double>(16, 0.1f), std::vector<double>(16, -3e-9f), {}}};
    for (int i = 0; i < 16; ++i) selection.planes[1].key_squares.push_back(1.0f / static_cast<float>(i + 3));
    selection.thresholds = {{{0, 12, -1}, {-3.5f, 0.3f, 0.1f}}, {{1, 17, 6}, {0.7f, 4.0f, -1.0f}}};
    state = {step, 6, 123456789012345, "curriculum \"state\"\n", 99, 1, 1, selection, "plan\n", "2 files"};
  }
  TensorView moment(std::vector<float>& values) const { return {values.data(), {parameters.flat_elements()}}; }
  ShardLayout layout(int shards = 1) const { return ShardLayout(parameters, shards, 1); }
  RankTensors tensors() {
    RankTensors all;
    for (const FlatTensor& tensor : parameters.flat_tensors()) {
      all.weights.push_back({tensor.name, tensor.shape, parameters.values().f32() + tensor.begin});
      all.moments.push_back({first_moment_name(tensor.name), tensor.shape, first.data() + tensor.begin});
      all.moments.push_back({second_moment_name(tensor.name), tensor.shape, second.data() + tensor.begin});
    }
    return all;
  }
  // What rank `rank` of several writes: every so many-th tensor.
  RankTensors tensors_of(int rank, int ranks) {
    const RankTensors all = tensors();
    RankTensors own;
    for (size_t i = 0; i < all.moments.size(); ++i) {
      if (static_cast<int>(i) % ranks != rank) continue;
      own.moments.push_back(all.moments[i]);
      if (i < all.weights.size()) own.weights.push_back(all.weights[i]);
    }
    own.weights_file = own.moments_file = {rank + 1, ranks};
    return own;
  }
  fs::path save(const fs::path& directory, int ranks = 1) {
    const CheckpointPlace place = {directory, state.step, 12 * parameters.elements()};
    const CheckpointContents contents = {model, state, run_config, {}};
    const fs::path temporary = begin_checkpoint(place);
    std::vector<TensorFile> files;
    for (int rank = 0; rank < ranks; ++rank)
      for (TensorFile& file : unpack_files(
               pack_files(write_tensors(temporary, place, ranks == 1 ? tensors() : tensors_of(rank, ranks), contents))))
        files.push_back(std::move(file));
    return finish_checkpoint(temporary, place, files, contents);
  }
};

// The same tensors as a saver gets them, from a buffer that holds one at a time.
OwnTensors given_one_by_one(const RankTensors& tensors, std::vector<float>& buffer) {
  OwnTensors own{tensors, {}, 0};
  std::vector<SafetensorsTensor> all;
  for (std::vector<SafetensorsTensor>* kind : {&own.tensors.weights, &own.tensors.moments})
    for (SafetensorsTensor& tensor : *kind) {
      all.push_back(tensor);
      tensor.data = nullptr;
    }
  own.rounds = all.size();
  own.next = [&buffer, all, at = size_t{0}](float* into) mutable {
    const SafetensorsTensor& tensor = all[at++];
    if (into == nullptr) buffer.resize(static_cast<size_t>(tensor.elements()));
    float* values = into == nullptr ? buffer.data() : into;
    std::copy_n(tensor.data, tensor.elements(), values);
    return static_cast<const float*>(values);
  };
  return own;
}

std::vector<float> copy(TensorView view) {
  return {view.f32(), view.f32() + view.elements()};
}

void expect_everything_back(int ranks) {
  ScratchDirectory scratch;
  Contents saved;
  const fs::path path = saved.save(scratch.path(), ranks);
  EXPECT_EQ(path.filename(), "checkpoint-7");
  EXPECT_EQ(find_damage(path), std::nullopt);
  EXPECT_EQ(read_bytes(path / "run.yaml"), saved.run_config);

  Contents loaded(0);
  std::memset(loaded.parameters.values().raw(), 0xff, static_cast<size_t>(loaded.parameters.values().bytes()));
  std::fill(loaded.first.begin(), loaded.first.end(), 5.0f);
  std::fill(loaded.second.begin(), loaded.second.end(), 5.0f);
  TrainState state = load_checkpoint(path, loaded.parameters, loaded.layout(), 0, loaded.moment(loaded.first),
                                     loaded.moment(loaded.second));
  FoundSelection found = read_selection_of(path, saved.model);
  EXPECT_EQ(found.problem, "");
  state.selection = std::move(found.learned);
  EXPECT_EQ(state, saved.state);
  EXPECT_EQ(loaded.first, saved.first);  // padding included
  EXPECT_EQ(loaded.second, saved.second);
  for (int i = 0; i < saved.parameters.count(); ++i)
    EXPECT_EQ(copy(loaded.parameters.value(i)), copy(saved.parameters.value(i)));
}

TEST(Checkpoint, EverythingComesBackBitByBit) {
  expect_everything_back(1);
}

TEST(Checkpoint, EverythingComesBackFromTheFilesOfSeveralRanks) {
  for (const int ranks : {2, 3, 4}) expect_everything_back(ranks);
}

TEST(Checkpoint, EarlierVersionsCanReadWhatOneRankWrote) {
  ScratchDirectory scratch;
  const std::string one = read_bytes(Contents(1).save(scratch.path()) / "manifest.json");
  EXPECT_NE(one.find("\"format\": 1"), std::string::npos) << one;
  const std::string two = read_bytes(Contents(2).save(scratch.path(), 2) / "manifest.json");
  EXPECT_NE(two.find("\"format\": 2"), std::string::npos) << two;
}

TEST(Checkpoint, AFileOfSeveralThatIsMissingCutOrAlteredIsNamed) {
  constexpr int kRanks = 3;
  for (const std::string stem : {"model", "optimizer"}) {
    for (int rank = 1; rank <= kRanks; ++rank) {
      const std::string name = fmt::format("{}-{:05}-of-{:05}.safetensors", stem, rank, kRanks);
      SCOPED_TRACE(name);
      ScratchDirectory scratch;
      const auto damage_of = [&](const std::function<void(const fs::path& file)>& apply) {
        const fs::path path = Contents(7).save(scratch.path(), kRanks);
        EXPECT_EQ(find_damage(path), std::nullopt);
        apply(path / name);
        return find_damage(path).value_or("");
      };
      EXPECT_EQ(damage_of([](const fs::path& file) { fs::remove(file); }), name + " is missing");
      const std::string cut = damage_of([](const fs::path& file) { fs::resize_file(file, fs::file_size(file) - 1); });
      EXPECT_TRUE(cut.starts_with(name + " has ") && cut.find(" bytes instead of ") != std::string::npos) << cut;
      EXPECT_EQ(damage_of([](const fs::path& file) {
                  std::string bytes = read_bytes(file);
                  bytes.back() ^= 1;
                  write_bytes(file, bytes);
                }),
                name + " has a wrong checksum");
    }
  }
}

// What another rank has written, and the first one does not see.
TEST(Checkpoint, IsNotCompletedWithoutTheFilesOfAllRanks) {
  ScratchDirectory scratch;
  Contents(5).save(scratch.path());
  Contents contents(7);
  const CheckpointPlace place = {scratch.path(), 7, 0};
  const CheckpointContents rest = {contents.model, contents.state, contents.run_config, {}};
  const fs::path temporary = begin_checkpoint(place);
  const std::vector<TensorFile> files = write_tensors(temporary, place, contents.tensors_of(0, 2), rest);
  fs::remove(temporary / files[1].name);
  const std::string error = user_error_of([&] { finish_checkpoint(temporary, place, files, rest); });
  EXPECT_NE(error.find(files[1].name), std::string::npos) << error;
  EXPECT_NE(error.find("do all ranks see the same directory?"), std::string::npos) << error;
  EXPECT_EQ(checkpoint_steps(scratch.path()), (std::vector<int64_t>{5}));
  EXPECT_FALSE(fs::exists(temporary));
}

TEST(Checkpoint, WhatSelectionLearnedOfAnotherModelOrNotFiniteIsNamed) {
  ScratchDirectory scratch;
  Contents saved;
  ModelConfig other = saved.model;
  other.head_dim *= 2;
  EXPECT_NE(read_selection_of(saved.save(scratch.path()), other).problem.find("another model"), std::string::npos);
  other = saved.model;
  other.layers = 3;
  EXPECT_NE(read_selection_of(saved.save(scratch.path()), other).problem.find("another model"), std::string::npos);
  saved.state.selection.planes[1].key_sums[3] = std::numeric_limits<double>::infinity();
  const FoundSelection found = read_selection_of(saved.save(scratch.path()), saved.model);
  EXPECT_NE(found.problem.find("tensor 'planes.key_sums' holds inf at element 19"), std::string::npos)  // 16 a layer
      << found.problem;
  EXPECT_EQ(found.learned, LearnedSelection());
  // Of a run that learned nothing there is no file.
  saved.state.selection = {};
  EXPECT_FALSE(fs::exists(saved.save(scratch.path()) / "selection.safetensors"));
}

TEST(Checkpoint, AShardGetsItsOwnPieces) {
  ScratchDirectory scratch;
  Contents saved;
  const fs::path path = saved.save(scratch.path());
  const ShardLayout halves = saved.layout(2);
  const auto half = static_cast<size_t>(halves.shard_elements());
  for (const int shard : {0, 1}) {
    std::vector<float> first(half, 5.0f), second(half, 5.0f);
    read_optimizer_files(path, saved.parameters, halves, shard, {first.data(), {halves.shard_elements()}},
                         {second.data(), {halves.shard_elements()}});
    const auto begin = static_cast<std::ptrdiff_t>(half) * shard;
    EXPECT_EQ(first, std::vector<float>(saved.first.begin() + begin, saved.first.begin() + begin + std::ssize(first)));
    EXPECT_EQ(second,
              std::vector<float>(saved.second.begin() + begin, saved.second.begin() + begin + std::ssize(second)));
  }
}

TEST(Checkpoint, OfAnotherModelIsRefused) {
  ScratchDirectory scratch;
  Contents saved;
  const fs::path path = saved.save(scratch.path());
  ParameterSet other;
  other.declare("q.weight", {3, 4}, {{"q", 0, 3}});
  other.declare("bias", {2}, {{"bias", 0, 2}});
  other.end_group(1);
  other.allocate(false);
  std::vector<float> moments(static_cast<size_t>(other.flat_elements()));
  const TensorView view(moments.data(), {other.flat_elements()});
  EXPECT_NE(user_error_of([&] {
              read_optimizer_files(path, other, ShardLayout(other, 1, 1), 0, view, view);
            }).find("exp_avg.bias is missing"),
            std::string::npos);

  ParameterSet wider;
  wider.declare("q.weight", {3, 5}, {{"q", 0, 3}});
  wider.end_group(1);
  wider.allocate(false);
  moments.resize(static_cast<size_t>(wider.flat_elements()));
  const TensorView wide(moments.data(), {wider.flat_elements()});
  EXPECT_NE(user_error_of([&] {
              read_optimizer_files(path, wider, ShardLayout(wider, 1, 1), 0, wide, wide);
            }).find("the model needs F32 [3, 5]"),
            std::string::npos);
}

// One way to damage a checkpoint, and a word of what must be said about it.
struct Damage {
  const char* name;
  std::function<void(const fs::path&)> apply;
  const char* reason;
};

std::vector<Damage> damages() {
  return {
      {"a flipped bit",
       [](const fs::path& c) {
         std::string bytes = read_bytes(c / "model.safetensors");
         bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 4);
         write_bytes(c / "model.safetensors", bytes);
       },
       "model.safetensors has a wrong checksum"},
      {"a truncated file", [](const fs::path& c) { fs::resize_file(c / "optimizer.safetensors", 100); },
       "optimizer.safetensors has 100 bytes"},
      {"a missing file", [](const fs::path& c) { fs::remove(c / "state.json"); }, "state.json is missing"},
      {"no manifest", [](const fs::path& c) { fs::remove(c / "manifest.json"); }, "manifest.json"},
      {"an empty manifest", [](const fs::path& c) { write_bytes(c / "manifest.json", ""); }, "manifest.json"},
      {"half a manifest",
       [](const fs::path& c) { fs::resize_file(c / "manifest.json", fs::file_size(c / "manifest.json") / 2); },
       "manifest.json"},
      {"a manifest of another shape", [](const fs::path& c) { write_bytes(c / "manifest.json", "{\"format\":1}"); },
       "manifest.json is damaged"},
      {"a manifest of the future",
       [](const fs::path& c) { write_bytes(c / "manifest.json", "{\"format\":3,\"files\":{}}"); }, "format 3"},
      {"a manifest that nests deeply",
       [](const fs::path& c) {
         write_bytes(c / "manifest.json",
                     "{\"format\":" + std::string(200000, '[') + std::string(200000, ']') + ",\"files\":{}}");
       },
       "format array"},
  };
}

TEST(Checkpoint, DamagedOnesAreNamedAndSkipped) {
  for (const Damage& damage : damages()) {
    SCOPED_TRACE(damage.name);
    ScratchDirectory scratch;
    Contents(5).save(scratch.path());
    damage.apply(Contents(10).save(scratch.path()));
    ASSERT_TRUE(find_damage(scratch / "checkpoint-10").has_value());
    EXPECT_NE(find_damage(scratch / "checkpoint-10")->find(damage.reason), std::string::npos)
        << *find_damage(scratch / "checkpoint-10");
    testing::internal::CaptureStderr();
    const auto found = newest_intact_checkpoint(scratch.path());
    const std::string log = testing::internal::GetCapturedStderr();
    EXPECT_EQ(found, scratch / "checkpoint-5");
    EXPECT_NE(log.find("checkpoint-10, which is damaged"), std::string::npos) << log;
  }
}

TEST(Checkpoint, EveryFileIsInOneShareOfThoseWhoLookForDamageTogether) {
  for (const int parts : {1, 2, 3, 16}) {
    ScratchDirectory scratch;
    const fs::path path = Contents(5).save(scratch.path());
    std::vector<fs::path> files;
    for (const auto& entry : fs::directory_iterator(path))
      if (entry.path().filename() != "manifest.json") files.push_back(entry.path());
    ASSERT_GT(files.size(), 2u);
    for (const fs::path& file : files) {
      const std::string content = read_bytes(file);
      std::string altered = content;
      altered[altered.size() / 2] ^= 1;
      write_bytes(file, altered);
      int found = 0;
      for (int part = 0; part < parts; ++part) {
        const auto damage = find_damage(path, {part, parts});
        found += damage == file.filename().string() + " has a wrong checksum" ? 1 : 0;
      }
      EXPECT_EQ(found, 1) << file << " of " << parts;
      write_bytes(file, content);
    }
    for (int part = 0; part < parts; ++part) EXPECT_EQ(find_damage(path, {part, parts}), std::nullopt);
  }
}

TEST(Checkpoint, ItIsSaidWhenReadingOneTakesAWhile) {
  ScratchDirectory scratch;
  const auto log_of = [&](uintmax_t bytes) {
    fs::create_directories(scratch / "checkpoint-1");
    write_bytes(scratch / "checkpoint-1" / "weights", "");
    fs::resize_file(scratch / "checkpoint-1" / "weights", bytes);  // a hole: nothing is written
    // Another size: damaged before a byte is read.
    write_bytes(scratch / "checkpoint-1" / "manifest.json",
                R"({"format": 1, "files": {"weights": {"bytes": 7, "crc32c": "00000000"}}})");
    testing::internal::CaptureStderr();
    EXPECT_TRUE(find_damage(scratch / "checkpoint-1"));
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(log_of(1000), "");
  EXPECT_NE(log_of(uintmax_t{3} << 30).find("checkpoint-1 (3.00 GiB)"), std::string::npos);
}

TEST(Checkpoint, WhenAllAreDamagedTheRunDoesNotStartOver) {
  ScratchDirectory scratch;
  fs::remove(Contents(5).save(scratch.path()) / "manifest.json");
  EXPECT_NE(user_error_of([&] { newest_intact_checkpoint(scratch.path()); }).find("damaged"), std::string::npos);
}

TEST(Checkpoint, NoneIsNoError) {
  ScratchDirectory scratch;
  write_bytes(scratch / "checkpoint-", "");
  write_bytes(scratch / "checkpoint-x1", "");
  write_bytes(scratch / "checkpoint-1x", "");
  EXPECT_EQ(newest_intact_checkpoint(scratch.path()), std::nullopt);
  EXPECT_EQ(newest_intact_checkpoint(scratch / "missing"), std::nullopt);
}

TEST(Checkpoint, KeepsTheNewestCompleteOnes) {
  ScratchDirectory scratch;
  for (const int64_t step : {9, 10, 100, 11}) Contents(step).save(scratch.path());
  fs::remove(scratch / "checkpoint-100" / "state.json");
  remove_old_checkpoints(scratch.path(), 11, 0, 11);
  EXPECT_EQ(checkpoint_steps(scratch.path()), (std::vector<int64_t>{9, 10, 11, 100}));
  remove_old_checkpoints(scratch.path(), 11, 2, 11);
  EXPECT_EQ(checkpoint_steps(scratch.path()), (std::vector<int64_t>{10, 11, 100}));  // the damaged one does not count
  remove_old_checkpoints(scratch.path(), 11, 1, 11);
  EXPECT_EQ(checkpoint_steps(scratch.path()), (std::vector<int64_t>{11, 100}));
  remove_old_checkpoints(scratch.path(), 11, 1, 11);
  EXPECT_EQ(newest_intact_checkpoint(scratch.path()), scratch / "checkpoint-11");
}

// A run that went on from an older checkpoint has found the newer ones damaged, maybe by checksums that nobody looks at
// here: they must not take the places of those it saves.
TEST(Checkpoint, DamagedNewerOnesTakeNoPlaceOfThoseSavedSince) {
  ScratchDirectory scratch;
  for (const int64_t step : {10, 15, 20}) Contents(step).save(scratch.path());
  const fs::path weights = scratch / "checkpoint-20" / "model.safetensors";
  std::string bytes = read_bytes(weights);
  bytes.back() ^= 1;
  write_bytes(weights, bytes);
  remove_old_checkpoints(scratch.path(), 15, 1, 15);
  EXPECT_EQ(checkpoint_steps(scratch.path()), (std::vector<int64_t>{15, 20}));
  EXPECT_EQ(newest_intact_checkpoint(scratch.path()), scratch / "checkpoint-15");
}

TEST(Checkpoint, TheLastOneBeforeAStreakStays) {
  ScratchDirectory scratch;
  for (const int64_t step : {1, 2, 3, 4, 5}) Contents(step).save(scratch.path());
  // Steps 3 to 5 had gradients that were not finite.
  remove_old_checkpoints(scratch.path(), 5, 2, 2);
  EXPECT_EQ(checkpoint_steps(scratch.path()), (std::vector<int64_t>{2, 4, 5}));
  Contents(6).save(scratch.path());
  remove_old_checkpoints(scratch.path(), 6, 2, 2);
  EXPECT_EQ(checkpoint_steps(scratch.path()), (std::vector<int64_t>{2, 5, 6}));
  // It heals: nothing special about step 2 any more.
  Contents(7).save(scratch.path());
  remove_old_checkpoints(scratch.path(), 7, 2, 7);
  EXPECT_EQ(checkpoint_steps(scratch.path()), (std::vector<int64_t>{6, 7}));
}

TEST(Checkpoint, LeftoversOfAKilledProcessGo) {
  ScratchDirectory scratch;
  Contents(3).save(scratch.path());
  fs::create_directories(scratch / ".saving-checkpoint-4" / "x");
  fs::create_directories(scratch / ".removing-checkpoint-1");
  remove_leftovers(scratch.path());
  EXPECT_EQ(std::distance(fs::directory_iterator(scratch.path()), {}), 1);
}

TEST(Checkpoint, SavingTheSameStepAgainReplacesIt) {
  ScratchDirectory scratch;
  const fs::path path = Contents(3).save(scratch.path());
  fs::remove(path / "manifest.json");
  Contents(3).save(scratch.path());
  EXPECT_EQ(find_damage(path), std::nullopt);
}

// Files above a size cannot be written, as on a full disk.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  void (*handler_)(int);
  rlimit before_;
};

TEST(Checkpoint, AFullDiskIsAClearErrorAndThePreviousOneStays) {
  for (const rlim_t bytes : {0, 10, 300, 700}) {  // fails at the first file, or a later one
    ScratchDirectory scratch;
    Contents(5).save(scratch.path());
    std::string message;
    {
      const FileSizeLimit limit(bytes);
      message = user_error_of([&] { Contents(10).save(scratch.path()); });
    }
    EXPECT_NE(message.find("the checkpoint of step 10 could not be saved"), std::string::npos) << message;
    EXPECT_NE(message.find("File too large"), std::string::npos) << message;
    EXPECT_NE(message.find("checkpoint-5 is intact"), std::string::npos) << message;
    EXPECT_EQ(newest_intact_checkpoint(scratch.path()), scratch / "checkpoint-5");
    EXPECT_EQ(std::distance(fs::directory_iterator(scratch.path()), {}), 1) << "nothing half-written is left";
  }
}

TEST(Checkpoint, ABalanceStateThatNestsDeeplyIsRefused) {
  const std::string deep =
      "{\"version\":1,\"states\":[{\"step\":" + std::string(200000, '[') + std::string(200000, ']') + "}]}";
  const std::string error = user_error_of([&] { parse_balance_states(deep, "state.json"); });
  EXPECT_NE(error.find("state.json: the balance state holds array"), std::string::npos) << error;
}

std::map<std::string, std::string> files_of(const fs::path& folder) {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::directory_iterator(folder)) files[entry.path().filename()] = read_bytes(entry.path());
  return files;
}

TEST(CheckpointSaver, WhatChangesAfterwardsIsNotInTheCheckpoint) {
  ScratchDirectory scratch;
  Contents contents(7);
  const RunConfig config = tiny_run(scratch / "run", {"train.save_total_limit=2"});
  const int64_t copy = 12 * contents.parameters.elements();
  const auto world = make_self_communicator();
  fs::create_directories(scratch / "run");
  std::map<std::string, std::string> expected;
  std::vector<float> buffer;
  {
    CheckpointSaver now(config, contents.model, *world, 0);
    now.save(given_one_by_one(contents.tensors(), buffer), contents.state, "");
    expected = files_of(scratch / "run/checkpoint-7");
    fs::remove_all(scratch / "run/checkpoint-7");
  }
  CheckpointSaver saver(config, contents.model, *world, copy);
  saver.save(given_one_by_one(contents.tensors(), buffer), contents.state, "coverage");
  buffer.assign(buffer.size(), -1.0f);
  const TrainState before = contents.state;
  contents.state.step = 8;
  std::ranges::fill(contents.first, -1.0f);
  saver.save(given_one_by_one(contents.tensors(), buffer), contents.state, "");  // waits for the first
  EXPECT_TRUE(fs::exists(scratch / "run/checkpoint-7"));
  saver.wait();
  EXPECT_TRUE(files_of(scratch / "run/checkpoint-7") == expected);
  EXPECT_EQ(read_train_state(scratch / "run/checkpoint-7").step, before.step);
  EXPECT_EQ(read_bytes(scratch / "run/coverage.json"), "coverage");
  EXPECT_EQ(find_damage(scratch / "run/checkpoint-8"), std::nullopt);
}

TEST(CheckpointSaver, AFailureIsThrownByALaterCallOnce) {
  ScratchDirectory scratch;
  Contents contents(7);
  const RunConfig config = tiny_run(scratch / "run");
  const auto world = make_self_communicator();
  std::vector<float> buffer;
  CheckpointSaver saver(config, contents.model, *world, 12 * contents.parameters.elements());
  // Without a folder it is said at once.
  const auto save = [&] { saver.save(given_one_by_one(contents.tensors(), buffer), contents.state, ""); };
  EXPECT_NE(user_error_of(save).find("the checkpoint of step 7 could not be saved"), std::string::npos);
  fs::create_directories(scratch / "run");
  {
    const FileSizeLimit limit(300);
    save();
    EXPECT_THROW(saver.wait(), UserError);
  }
  saver.advance();
  saver.wait();
  EXPECT_TRUE(fs::is_empty(scratch / "run"));
  save();
  saver.wait();
  EXPECT_EQ(checkpoint_steps(scratch / "run"), (std::vector<int64_t>{7}));
}

// Three ranks, in the background and not: complete when all have written, and not before.
TEST(CheckpointSaver, SeveralRanksWriteOneCheckpoint) {
  constexpr int kRanks = 3;
  for (const bool in_background : {false, true}) {
    ScratchDirectory scratch;
    const RunConfig config = tiny_run(scratch / "run");
    fs::create_directories(scratch / "run");
    Contents together(7);
    const fs::path expected = together.save(scratch.path(), kRanks);
    run_thread_ranks(kRanks, [&](Communicator& world) {
      Contents contents(7);
      std::vector<float> buffer;
      CheckpointSaver saver(config, contents.model, world, in_background ? 12 * contents.parameters.elements() : 0);
      OwnTensors own = given_one_by_one(contents.tensors_of(world.rank(), kRanks), buffer);
      // Not all have equally many, and every rank is asked as often.
      const size_t count = own.rounds;
      own.rounds = static_cast<size_t>(world.all_reduce(static_cast<int64_t>(count), ReduceOp::max));
      size_t calls = 0;
      own.next = [&calls, count, next = own.next](float* into) -> const float* {
        return calls++ < count ? next(into) : nullptr;
      };
      saver.save(own, contents.state, "");
      EXPECT_EQ(calls, own.rounds);
      saver.advance();
      saver.advance();
      saver.wait();
      if (world.rank() > 0) return;
      const auto got = files_of(scratch / "run/checkpoint-7"), wanted = files_of(expected);
      for (const auto& [name, bytes] : wanted) {
        if (name == "run.yaml" || name == "manifest.json") continue;
        EXPECT_TRUE(got.at(name) == bytes) << name;
      }
      EXPECT_EQ(got.size(), wanted.size());
      EXPECT_EQ(find_damage(scratch / "run/checkpoint-7"), std::nullopt);
    });
  }
}

// Damage of the disk between a write and the manifest is found, too: its checksums are of what was written.
TEST(Checkpoint, ChecksumsAreOfWhatWasWritten) {
  ScratchDirectory scratch;
  DurableFile file(scratch / "written");
  file.write("1234", 4);
  file.write("56789", 5);
  EXPECT_EQ(file.checksum(), 0xe3069283u);  // the check value of CRC-32C
  file.close();
}

}  // namespace
}  // namespace sb
