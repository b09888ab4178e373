// Whole runs whose sequences several ranks share.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "comm/thread_communicator.h"
#include "tests/train/scratch_directory.h"
#include "tests/train/tiny_run.h"
#include "train/training_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

struct Grid3 {
  int dp, pp, cp, node_size;
};

TrainSummary train(const fs::path& directory, const Grid3& grid, std::vector<std::string> overrides) {
  overrides.insert(overrides.begin(), {"model.init.num_hidden_layers=3", "batch.global_batch_size=6", "train.threads=1",
                                       "train.max_steps=6", "train.save_steps=3", "train.validation_steps=3",
                                       "data.max_sequence_length=512", "data.synthetic.length=448",
                                       "data.synthetic.min_length=64", "attention.block=64"});
  overrides.insert(overrides.end(),
                   {fmt::format("parallel.dp={}", grid.dp), fmt::format("parallel.pp={}", grid.pp),
                    fmt::format("parallel.cp={}", grid.cp), fmt::format("parallel.node_size={}", grid.node_size)});
  const RunConfig config = tiny_run(directory, overrides);
  TrainSummary summary;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> out(std::fopen("/dev/null", "w"), std::fclose);
  run_thread_ranks(grid.dp * grid.pp * grid.cp, [&](Communicator& world) {
    const TrainSummary own = run_training(config, out.get(), false, [] { return false; }, {&world, world.size()});
    if (world.rank() == 0) summary = own;
  });
  return summary;
}

std::vector<nlohmann::json> metrics_of(const fs::path& run) {
  std::istringstream in(read_bytes(run / "metrics.jsonl"));
  std::vector<nlohmann::json> lines;
  std::string line;
  while (std::getline(in, line)) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

void expect_same_record(const fs::path& got, const fs::path& expected, double tolerance) {
  const auto a = metrics_of(got), b = metrics_of(expected);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    for (const char* key : {"step", "tokens", "targets", "attention_pairs"})
      EXPECT_EQ(a[i].value(key, -1), b[i].value(key, -1)) << key << " of line " << i;
    for (const char* key : {"loss", "grad_norm", "validation_loss", "density"}) {
      ASSERT_EQ(a[i].contains(key), b[i].contains(key)) << key;
      if (!b[i].contains(key)) continue;
      const double value = b[i][key].get<double>();
      EXPECT_NEAR(a[i][key].get<double>(), value, tolerance * std::max(std::abs(value), 1e-3)) << key << " " << i;
    }
  }
}

TEST(ContextRanks, LearnWhatOneRankLearns) {
  ScratchDirectory scratch;
  train(scratch / "alone", {1, 1, 1, 0}, {"attention.pattern=dense"});
  for (const Grid3& grid : {Grid3{1, 1, 2, 0}, Grid3{1, 1, 3, 0}, Grid3{2, 1, 2, 0}, Grid3{1, 2, 2, 0},
                            Grid3{1, 1, 4, 2}, Grid3{2, 2, 2, 1}}) {
    SCOPED_TRACE(fmt::format("dp {} pp {} cp {} nodes of {}", grid.dp, grid.pp, grid.cp, grid.node_size));
    const fs::path run = scratch / fmt::format("{}-{}-{}-{}", grid.dp, grid.pp, grid.cp, grid.node_size);
    EXPECT_EQ(train(run, grid, {"attention.pattern=dense"}).steps, 6);
    expect_same_record(run, scratch / "alone", 1e-5);
  }
}

TEST(ContextRanks, ChooseWhatOneRankChooses) {
  ScratchDirectory scratch;
  for (const char* pattern : {"topk", "mass"}) {
    const std::vector<std::string> sparse = {fmt::format("attention.pattern={}", pattern), "attention.budget=320",
                                             "attention.dense_below=64", "attention.coverage_rows=0"};
    const fs::path alone = scratch / fmt::format("{}-alone", pattern);
    train(alone, {1, 1, 1, 0}, sparse);
    for (const Grid3& grid : {Grid3{1, 1, 2, 0}, Grid3{1, 1, 4, 2}}) {
      SCOPED_TRACE(fmt::format("{} cp {}", pattern, grid.cp));
      const fs::path run = scratch / fmt::format("{}-{}", pattern, grid.cp);
      train(run, grid, sparse);
      expect_same_record(run, alone, 1e-4);
    }
  }
}

TEST(ContextRanks, ResumeOnAnotherGrid) {
  ScratchDirectory scratch;
  train(scratch / "saved", {1, 1, 3, 0}, {"attention.pattern=dense"});
  const fs::path checkpoint = scratch / "saved" / "checkpoint-6";
  train(scratch / "loaded", {2, 1, 1, 0}, {"attention.pattern=dense", "train.resume=" + checkpoint.string()});
  for (const char* file : {"model.safetensors", "optimizer.safetensors"})
    EXPECT_EQ(read_bytes(scratch / "loaded/checkpoint-6" / file), read_bytes(checkpoint / file)) << file;
}

TEST(ContextRanks, RefuseWhatDoesNotFit) {
  ScratchDirectory scratch;
  const auto refusal = [&](std::vector<std::string> overrides) {
    return user_error_of([&] { tiny_run(scratch / "run", overrides); });
  };
  EXPECT_NE(refusal({"parallel.cp=4", "parallel.node_size=3"}).find("parallel.node_size"), std::string::npos);
  EXPECT_NE(refusal({"parallel.cp=2", "attention.query_block=48"}).find("attention.query_block"), std::string::npos);
  EXPECT_NE(refusal({"parallel.cp=2", "attention.pattern=mass", "attention.selection=lookahead"}).find("attention."),
            std::string::npos);
}

}  // namespace
}  // namespace sb
