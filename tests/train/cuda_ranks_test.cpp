// Several ranks on GPUs. Ranks are threads that share one GPU, their data goes through host memory: the same loss and
// gradients as one rank, and the same runs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>

#include "attention/gpu/cuda_attention.h"
#include "comm/device/device_communicator.h"
#include "comm/thread_communicator.h"
#include "core/errors.h"
#include "device/cuda.h"
#include "tests/data/temporary_folder.h"
#include "tests/model/model_fixture.h"
#include "tests/train/arranged_ranks.h"
#include "tests/train/cuda_run.h"
#include "train/rank_model.h"
#include "train/sums/step_sums.h"
#include "train/training_run.h"

namespace sb::test {
namespace {

struct Outcome {
  LossSums loss;
  double norm = 0;
  Tensors gradients;                             // of the whole model
  Tensors weights, moments;                      // what a checkpoint would hold after an update
  std::vector<std::vector<float>> weights_read;  // by the operations of every rank
};

ModelConfig model_of(bool tied) {
  ModelConfig model = tiny_config(ModelConfig::Family::qwen2);
  model.layers = 4;
  model.hidden_size = 128;
  model.heads = 4;
  model.kv_heads = 2;
  model.head_dim = 64;
  model.intermediate_size = 192;
  model.max_position_embeddings = 1024;
  model.tie_word_embeddings = tied;
  // Small enough that roundings stay what they are: with 0.3 another order of sums changes gradients by 3e-5 in fp32.
  model.initializer_range = 0.05f;
  return model;
}

Outcome run(const ModelConfig& config, const std::vector<std::vector<int32_t>>& sequences, DType dtype,
            const GridShape& grid, const Arrangement& arrangement) {
  RankModelOptions options;
  options.model = config;
  options.first_layers = split_layers_evenly(config.layers, grid.pp);
  options.grid = grid;
  options.device = DeviceKind::cuda;
  options.dtype = dtype;
  options.loss_chunk = 100;
  for (const auto& sequence : sequences) {
    options.max_micro_batch_tokens += std::ssize(sequence);
    options.max_sequence_length = std::max(options.max_sequence_length, std::ssize(sequence));
  }
  Outcome outcome;
  outcome.weights_read.resize(static_cast<size_t>(grid.ranks()));
  std::mutex mutex;
  run_thread_ranks(grid.ranks(), [&](Communicator& world) {
    const TestExec run(1, DeviceKind::cuda);
    const auto data = make_staged_communicator(world, {DeviceKind::cuda, run.exec.stream}, 1 << 16);
    SelectionConfig dense;
    dense.pattern = SelectionPattern::dense;
    const auto attention = make_cuda_attention({.attention = {dense, config.layers, 0}});
    RankModel model(options, *attention, world, data.get());
    model.stage().initialize(7);

    const std::vector<MicroBatch> batches = own_batches(model, arrangement, sequences);
    const Pipeline::Result result = model.forward_backward(run.exec, batches, {});
    const LossSums loss = sum_over_ranks(world, result.loss);
    const double norm = model.reduce(run.exec);
    const std::vector<float> gradients = host_values(model.stage().parameters().gradients());
    const ModelLayout layout(config, options.first_layers, grid.dp, ModelLayout::kBucketElements, {}, grid.tp);
    {
      std::lock_guard lock(mutex);
      add_own_gradients(model, layout, gradients, outcome.gradients);
      if (world.rank() == 0) outcome.loss = loss, outcome.norm = norm;
    }
    model.update(run.exec, {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1, 1.0f});
    model.settle();
    const ParameterSet& parameters = model.stage().parameters();
    outcome.weights_read[static_cast<size_t>(world.rank())] =
        host_values(dtype == DType::f32 ? parameters.values() : parameters.rounded_weights());
    Tensors weights, moments;
    add_own_tensors(model, weights, moments);
    std::lock_guard lock(mutex);
    outcome.weights.merge(weights);
    outcome.moments.merge(moments);
  });
  return outcome;
}

class CudaRanks : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
};

INSTANTIATE_TEST_SUITE_P(Types, CudaRanks, testing::Values(DType::f32, DType::bf16),
                         [](const auto& given) { return std::string(dtype_name(given.param)); });

// Nothing but the order of sums differs. In bf16 another algorithm of a product may round activations, of 8 bits, the
// other way; ranks that share products round each one's part of a sum.
TEST_P(CudaRanks, AnyGridGivesTheGradientsOfOneRank) {
  const double loss_tolerance = GetParam() == DType::f32 ? 1e-5 : 2e-3;
  for (const bool tied : {true, false}) {
    const ModelConfig config = model_of(tied);
    const auto sequences = random_sequences(
        sized<std::vector<int64_t>>({9, 200, 65, 130, 2, 317, 80}, {9, 70, 33, 65, 2, 130, 40}), config.vocab_size, 11);
    const Arrangement alone = {{{3, 6}, {5}, {0, 1}, {2, 4}}}, two = {{{3}, {0, 6}}, {{5}, {4, 1, 2}}};
    const std::vector<std::pair<GridShape, Arrangement>> grids = {
        {{2, 1}, two},         {{1, 2}, alone},       {{1, 3}, alone},    {{2, 2}, two},
        {{1, 1, 1, 2}, alone}, {{1, 1, 1, 4}, alone}, {{2, 2, 1, 2}, two}};
    for (const auto& [grid, arrangement] : grids) {
      SCOPED_TRACE(fmt::format("tied {}, dp {}, pp {}, tp {}", tied, grid.dp, grid.pp, grid.tp));
      const double gradient_tolerance = GetParam() == DType::f32 ? 1e-5 : grid.tp > 1 ? 0.15 : 2e-2;
      // One rank with the micro-batches of all of them.
      Arrangement together(1);
      for (const auto& rank : arrangement) together[0].insert(together[0].end(), rank.begin(), rank.end());
      const Outcome one = run(config, sequences, GetParam(), {1, 1}, together);
      const Outcome got = run(config, sequences, GetParam(), grid, arrangement);
      EXPECT_NEAR(got.loss.weighted, one.loss.weighted, loss_tolerance * one.loss.weighted);
      EXPECT_EQ(got.loss.targets, one.loss.targets);
      EXPECT_NEAR(got.norm, one.norm, gradient_tolerance * one.norm);
      EXPECT_LT(largest_relative_difference(got.gradients, one.gradients), gradient_tolerance);
      // Copies are bit-equal after an update, and a checkpoint has what one rank's would have.
      for (int dp = 1; dp < grid.dp; ++dp)
        for (int rank = 0; rank < grid.pp * grid.tp; ++rank)
          EXPECT_EQ(got.weights_read[static_cast<size_t>(dp * grid.pp * grid.tp + rank)],
                    got.weights_read[static_cast<size_t>(rank)]);
      EXPECT_LT(largest_relative_difference(got.moments, one.moments), 2 * gradient_tolerance);
      EXPECT_EQ(got.weights.size(), one.weights.size());
    }
  }
}

// What is saved is the fp32 values that the ranks' pieces were updated to.
TEST_P(CudaRanks, TheCheckpointHasEveryRanksPieces) {
  const ModelConfig config = model_of(true);
  const auto sequences = random_sequences({100, 100}, config.vocab_size, 5);
  // Both ranks have the same sequence: the mean of their gradients is that of each, whatever the number of ranks.
  const Outcome one = run(config, {sequences[0], sequences[0]}, GetParam(), {1, 1}, {{{0}, {1}}});
  const Outcome two = run(config, {sequences[0], sequences[0]}, GetParam(), {2, 1}, {{{0}}, {{1}}});
  EXPECT_LT(largest_relative_difference(two.weights, one.weights), 1e-4);
  ASSERT_EQ(two.weights.count("model.embed_tokens.weight"), 1u);
}

// Values and moments shrink with the ranks; the weights that the operations read do not.
TEST_P(CudaRanks, MemoryFallsWithTheRanks) {
  SelectionConfig dense;
  dense.pattern = SelectionPattern::dense;
  const auto attention = make_cuda_attention({.attention = {dense, 4, 0}});
  std::map<int, int64_t> fp32, rounded;
  for (const int dp : {1, 2, 4}) {
    RankModelOptions options;
    options.model = model_of(true);
    options.first_layers = {0, 4};
    options.grid = {dp, 1, 1};
    options.device = DeviceKind::cuda;
    options.dtype = GetParam();
    options.max_micro_batch_tokens = options.max_sequence_length = 100;
    const MemoryPlan plan = RankModel::memory_plan(options, *attention, 0);
    for (const MemoryPlan::Item& item : plan.items()) {
      if (item.name == "optimizer" || item.name == "weights") fp32[dp] += item.bytes;
      if (item.name == "rounded weights") rounded[dp] = item.bytes;
    }
  }
  if (GetParam() == DType::f32) {
    EXPECT_NEAR(static_cast<double>(fp32[2]) / static_cast<double>(fp32[1]), 2.0 / 3, 1e-2);
  } else {
    EXPECT_NEAR(static_cast<double>(fp32[2]) / static_cast<double>(fp32[1]), 1.0 / 2, 1e-2);
    EXPECT_NEAR(static_cast<double>(fp32[4]) / static_cast<double>(fp32[1]), 1.0 / 4, 1e-2);
    EXPECT_NEAR(static_cast<double>(rounded[4]) / static_cast<double>(rounded[1]), 1, 1e-2);
  }
}

int64_t last_step() {
  return std::min<int64_t>(run_steps().all, 20);
}

RunConfig config_of(const std::string& output, const std::vector<std::string>& overrides) {
  std::vector<std::string> all = {"device=cuda", fmt::format("train.max_steps={}", last_step()), "train.threads=1"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return small_run(output, all);
}

std::map<int64_t, double> train(const RunConfig& config) {
  const int ranks = config.parallel.grid().ranks();
  std::FILE* out = std::fopen("/dev/null", "w");
  run_thread_ranks(ranks, [&](Communicator& world) {
    run_training(config, out, false, [] { return false; }, {&world, ranks, world.rank()});
  });
  std::fclose(out);
  return losses_by_step(config);
}

class CudaRuns : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
  TemporaryFolder folder_;
};

void expect_close(const std::map<int64_t, double>& got, const std::map<int64_t, double>& expected, double tolerance) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [step, loss] : expected) EXPECT_NEAR(got.at(step) / loss, 1, tolerance) << "step " << step;
}

TEST_F(CudaRuns, FollowOneRank) {
  const auto one = train(config_of(folder_.path("one"), {}));
  ASSERT_EQ(one.size(), static_cast<size_t>(last_step()));
  EXPECT_LT(one.at(last_step()), one.at(1));
  expect_close(train(config_of(folder_.path("dp"), {"parallel.dp=2"})), one, 0.03);
  expect_close(train(config_of(folder_.path("pp"), {"parallel.pp=2"})), one, 0.03);
  expect_close(train(config_of(folder_.path("both"), {"parallel.dp=2", "parallel.pp=2"})), one, 0.03);
  expect_close(train(config_of(folder_.path("tp"), {"parallel.tp=2"})), one, 0.03);
  expect_close(train(config_of(folder_.path("tp and pp"), {"parallel.tp=2", "parallel.pp=2"})), one, 0.03);
}

std::string sequences(int shortest, int longest) {
  return fmt::format("data={{synthetic: {{task: chunk_recall, vocab_size: 64, length: {}, min_length: {}, chunk: 4}}}}",
                     longest, shortest);
}

TEST_F(CudaRuns, SharedSequencesFollowOneRank) {
  const auto one = train(config_of(folder_.path("one"), {sequences(longest_sequence() * 4 / 7, longest_sequence())}));
  expect_close(train(config_of(folder_.path("cp"),
                               {sequences(longest_sequence() * 4 / 7, longest_sequence()), "parallel.cp=2"})),
               one, 0.03);
  expect_close(train(config_of(folder_.path("lists"), {sequences(longest_sequence() * 4 / 7, longest_sequence()),
                                                       "parallel.cp=2", "parallel.ring_lists=host"})),
               one, 0.03);
  expect_close(train(config_of(folder_.path("both"), {sequences(longest_sequence() * 4 / 7, longest_sequence()),
                                                      "parallel.cp=2", "parallel.dp=2"})),
               one, 0.03);
  expect_close(train(config_of(folder_.path("tp"), {sequences(longest_sequence() * 4 / 7, longest_sequence()),
                                                    "parallel.cp=2", "parallel.tp=2"})),
               one, 0.03);
}

// Of every step: pairs that were computed, and their share of all causal ones.
struct PairsByStep {
  std::map<int64_t, int64_t> pairs;
  double mean_density = 0;
};

PairsByStep pairs_by_step(const RunConfig& config) {
  PairsByStep steps;
  std::ifstream in(config.train.output_dir / "metrics.jsonl");
  for (std::string line; std::getline(in, line);)
    if (const auto json = nlohmann::json::parse(line); json.contains("density")) {
      steps.pairs[json["step"].get<int64_t>()] = json["attention_pairs"].get<int64_t>();
      steps.mean_density += json["density"].get<double>();
    }
  steps.mean_density /= static_cast<double>(std::max<size_t>(steps.pairs.size(), 1));
  return steps;
}

// Lists are selected, used again when layers are computed a second time, and measured. How many pairs topk takes
// follows from the lengths alone, whatever is selected where masses tie.
TEST_F(CudaRuns, SharedSparseSequencesFollowOneRank) {
  const int64_t steps = sized<int64_t>(last_step(), 2);
  const auto with = [&](const char* name, std::vector<std::string> more) {
    for (const char* option : {"attention.pattern=topk", "attention.block=64", "attention.sink_blocks=1",
                               "attention.local_blocks=1", sized("attention.budget=256", "attention.budget=128"),
                               "attention.dense_below=64", "attention.coverage_rows=2", "train.recompute=layer"})
      more.emplace_back(option);
    more.push_back(fmt::format("train.max_steps={}", steps));
    more.push_back(sequences(sized(400, 200), sized(700, 300)));  // more keys than the budget
    return config_of(folder_.path(name), more);
  };
  const RunConfig alone = with("one", {});
  const auto one = train(alone);
  const PairsByStep pairs = pairs_by_step(alone);
  EXPECT_EQ(pairs.pairs.size(), static_cast<size_t>(steps));
  EXPECT_LT(pairs.mean_density, 0.9);
  for (const auto& [name, option] : {std::pair<const char*, std::string>("device", "parallel.ring_lists=device"),
                                     {"host", "parallel.ring_lists=host"},
                                     {"pieces", in_pieces()},
                                     {"pieces, two stages", in_pieces()}}) {
    SCOPED_TRACE(name);
    std::vector<std::string> more = {"parallel.cp=2", option};
    if (std::string(name).ends_with("stages")) more.emplace_back("parallel.pp=2");
    const RunConfig shared = with(name, more);
    expect_close(train(shared), one, 0.03);
    EXPECT_EQ(pairs_by_step(shared).pairs, pairs.pairs);
    EXPECT_NEAR(pairs_by_step(shared).mean_density, pairs.mean_density, 1e-12);
  }
  const RunConfig heads = with("heads", {"parallel.tp=2"});
  expect_close(train(heads), one, 0.03);
  EXPECT_EQ(pairs_by_step(heads).pairs, pairs.pairs);
}

TEST_F(CudaRuns, SharedSequencesInFloat32FollowOneRank) {
  const std::vector<std::string> options = {sequences(longest_sequence() * 4 / 7, longest_sequence()),
                                            "train.precision=float32"};
  const auto one = train(config_of(folder_.path("one"), options));
  std::vector<std::string> shared = options;
  shared.emplace_back("parallel.cp=2");
  expect_close(train(config_of(folder_.path("cp"), shared)), one, 1e-3);
}

TEST_F(CudaRuns, DeterministicSharedSequencesRepeatBitByBit) {
  const std::vector<std::string> options = {sequences(longest_sequence() * 4 / 7, longest_sequence()), "parallel.cp=2",
                                            "train.deterministic=true"};
  EXPECT_EQ(train(config_of(folder_.path("first"), options)), train(config_of(folder_.path("again"), options)));
}

// One block of 128 tokens in every micro-batch: three of four ranks have nothing but the keys that pass by.
TEST_F(CudaRuns, RanksWithoutTokensFollowOneRank) {
  const std::vector<std::string> options = {sequences(60, 100), "batch.micro_batch_sequences=1"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), options.begin(), options.end());
    return more;
  };
  const auto one = train(config_of(folder_.path("one"), options));
  expect_close(train(config_of(folder_.path("cp"), with({"parallel.cp=4"}))), one, 0.03);
  expect_close(train(config_of(folder_.path("both"), with({"parallel.cp=2", "parallel.pp=2"}))), one, 0.03);
}

TEST_F(CudaRuns, GoOnWithOtherRanks) {
  const auto whole = train(config_of(folder_.path("whole"), {}));
  const int64_t first = last_step() / 2, second = last_step() * 3 / 4;  // each of the three runs trains some
  ASSERT_TRUE(0 < first && first < second && second < last_step());
  train(config_of(folder_.path("parts"), {"parallel.dp=2", fmt::format("train.max_steps={}", first)}));
  train(config_of(folder_.path("parts"), {"parallel.tp=2", fmt::format("train.max_steps={}", second)}));
  expect_close(train(config_of(folder_.path("parts"), {"parallel.pp=2"})), whole, 0.03);
}

TEST_F(CudaRuns, NcclIsRefusedWhereRanksShareAGpu) {
  if (cuda::device_count() > 1) GTEST_SKIP() << "each rank has a GPU";
  try {
    train(config_of(folder_.path("nccl"), {"parallel.dp=2", "parallel.backend=nccl"}));
    FAIL() << "nothing was thrown";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("2 ranks have 1"));
    EXPECT_THAT(error.what(), testing::HasSubstr("parallel.backend: staged"));
  }
}

TEST_F(CudaRuns, ProcessesShareAGpu) {
  if (std::system("command -v mpirun > /dev/null") != 0) GTEST_SKIP() << "no mpirun on this machine";
  const auto one = train(config_of(folder_.path("one"), {}));
  const RunConfig config = config_of(folder_.path("mpi"), {"parallel.dp=2"});
  const std::string file = folder_.path("run.yaml");
  std::ofstream(file) << print_run_config(config);
  const std::string command = fmt::format("{} train {} --ranks 2 > {} 2>&1", SB_PROGRAM, file, folder_.path("log"));
  ASSERT_EQ(std::system(command.c_str()), 0) << std::ifstream(folder_.path("log")).rdbuf();
  expect_close(losses_by_step(config), one, 0.03);
}

}  // namespace
}  // namespace sb::test
