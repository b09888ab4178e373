// What only a stage on CUDA can show: it agrees with the CPU step after step, recomputes the same bits and uses the
// memory it planned.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <string>

#include "attention/gpu/cuda_attention.h"
#include "core/random.h"
#include "device/cuda.h"
#include "device/memory.h"
#include "model/hf_checkpoint.h"
#include "ops/adamw.h"
#include "tests/device/software_device.h"
#include "tests/model/host_attention.h"
#include "tests/model/model_fixture.h"

namespace sb::test {
namespace {

ModelConfig small_config(ModelConfig::Family family) {
  ModelConfig config = tiny_config(family);
  config.vocab_size = 96;
  config.hidden_size = 32;
  config.intermediate_size = 80;
  config.head_dim = 16;
  config.initializer_range = 0.1f;
  return config;
}

struct Rig {
  Rig(const ModelConfig& config, StageOptions options, DeviceKind device, DType dtype,
      std::unique_ptr<Attention> own_attention = nullptr)
      : run(2, device), attention(std::move(own_attention)) {
    options.device = device;
    options.dtype = dtype;
    if (attention)
      SB_CHECK(device == DeviceKind::cuda, "an attention of the device");
    else if (device == DeviceKind::cuda)
      attention = std::make_unique<HostAttention>();
    else
      attention = std::make_unique<DenseAttention>();
    stage = std::make_unique<Stage>(config, options, *attention, 2);
    stage->initialize(3);
  }
  void step(const MicroBatch& batch) {
    stage->forward(run.exec, batch, 0, {});
    stage->backward(run.exec, batch, 0, {});
  }
  TestExec run;
  std::unique_ptr<Attention> attention;
  std::unique_ptr<Stage> stage;
};

CudaAttentionOptions deterministic_topk(int layers) {
  CudaAttentionOptions options;
  options.attention.selection.budget = sized(384, 256);
  options.attention.selection.block = 128;
  options.attention.layers = layers;
  options.deterministic = true;
  return options;
}

class CudaStageTest : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
};
INSTANTIATE_TEST_SUITE_P(Types, CudaStageTest, testing::Values(DType::f32, DType::bf16),
                         [](const auto& type) { return std::string(dtype_name(type.param)); });

std::vector<double> loss_curve(const ModelConfig& config, const MicroBatch& batch, DeviceKind device, DType dtype,
                               const LoraConfig& lora = {}, float learning_rate = 3e-3f) {
  StageOptions options = whole_model(config, batch.size(), Recompute::attention);
  options.lora = lora;
  Rig rig(config, options, device, dtype);
  const Exec& exec = rig.run.exec;
  ParameterSet& parameters = rig.stage->parameters();
  const int64_t elements = parameters.flat_elements();
  Arena memory = make_arena("moments", 2 * parameters.flat_bytes() + 64, device);
  AdamWBuffers buffers{parameters.values(),
                       parameters.gradients(),
                       memory.allocate(DType::f32, {elements}),
                       memory.allocate(DType::f32, {elements}),
                       parameters.rounded_weights(),
                       memory.allocate(DType::f32, {2})};
  zero_tensor(exec, buffers.m);
  zero_tensor(exec, buffers.v);
  const DecayRange all{0, elements, true};
  std::vector<double> losses;
  for (int64_t step = 1; step <= 100; ++step) {
    parameters.zero_gradients(exec);
    rig.step(batch);
    clip_by_norm(exec, buffers.gradients, 1.0, buffers.clip);
    adamw_update(exec, {learning_rate, 0.9f, 0.95f, 1e-8f, 0.1f, step, 1.0f}, std::span(&all, 1), buffers);
    losses.push_back(rig.stage->loss(0).weighted);
  }
  return losses;
}

TEST_P(CudaStageTest, LossCurveOfAHundredStepsFollowsTheCpu) {
  const ModelConfig config = small_config(ModelConfig::Family::qwen3);
  const auto sequences = random_sequences({40, 17, 33}, config.vocab_size, 5);
  const MicroBatch batch = pack(sequences, count_targets(sequences));
  const std::vector<double> cpu = loss_curve(config, batch, DeviceKind::cpu, DType::f32),
                            got = loss_curve(config, batch, DeviceKind::cuda, GetParam());
  ASSERT_LT(cpu.back(), 0.5 * cpu.front());  // it learns
  const double allowed = GetParam() == DType::f32 ? 1e-3 : 3e-2;
  for (size_t i = 0; i < cpu.size(); ++i) ASSERT_NEAR(got[i], cpu[i], allowed * cpu.front()) << "step " << i;
}

LoraConfig dropping_adapters(bool train_ends) {
  LoraConfig lora;
  lora.rank = 5;
  lora.alpha = 20;
  lora.dropout = 0.2;
  lora.norms = lora.embedding = lora.head = train_ends;
  return lora;
}

// The same elements are dropped on both devices.
TEST_P(CudaStageTest, AdaptersLearnWhatTheyLearnOnTheCpu) {
  for (const bool train_ends : sized<std::vector<bool>>({false, true}, {true})) {
    ModelConfig config = small_config(ModelConfig::Family::qwen3);
    config.tie_word_embeddings = false;
    const auto sequences = random_sequences({40, 17, 33}, config.vocab_size, 5);
    const MicroBatch batch = pack(sequences, count_targets(sequences));
    const LoraConfig lora = dropping_adapters(train_ends);
    // Four times the adapters' product: at 3e-3 a rounding error grows to the bound within the hundred steps.
    const float rate = 1e-3f;
    const std::vector<double> cpu = loss_curve(config, batch, DeviceKind::cpu, DType::f32, lora, rate),
                              got = loss_curve(config, batch, DeviceKind::cuda, GetParam(), lora, rate);
    ASSERT_LT(cpu.back(), 0.98 * cpu.front());  // it learns
    const double allowed = GetParam() == DType::f32 ? 1e-3 : 3e-2;
    for (size_t i = 0; i < cpu.size(); ++i) ASSERT_NEAR(got[i], cpu[i], allowed * cpu.front()) << "step " << i;
  }
}

TEST_P(CudaStageTest, AdaptersRecomputeTheSameBitsInThePlannedMemory) {
  ModelConfig config = small_config(ModelConfig::Family::qwen2);
  const auto sequences = random_sequences({70, 1, 30}, config.vocab_size, 7);
  const MicroBatch batch = pack(sequences, count_targets(sequences));
  std::vector<Tensors> gradients;
  for (const Recompute level : {Recompute::none, Recompute::attention, Recompute::layer}) {
    StageOptions options = whole_model(config, 101, level);
    options.lora = dropping_adapters(false);
    options.layer_chunk = 40;
    Rig rig(config, options, DeviceKind::cuda, GetParam());
    rig.step(batch);
    rig.step(batch);  // now B has a gradient that adds up
    gradients.push_back(hf_gradients(rig.stage->parameters()));
    options.device = DeviceKind::cuda;
    options.dtype = GetParam();
    const MemoryPlan plan = Stage::memory_plan(config, options, *rig.attention, 2), used = rig.stage->memory_used();
    ASSERT_EQ(plan.items().size(), used.items().size());
    for (size_t i = 0; i < plan.items().size(); ++i)
      EXPECT_LE(used.items()[i].bytes, plan.items()[i].bytes) << plan.items()[i].name;
  }
  EXPECT_EQ(gradients[0], gradients[1]);
  EXPECT_EQ(gradients[0], gradients[2]);
}

// The device's own attention in place of the CPU's.
TEST_P(CudaStageTest, AttentionOfTheDeviceAgrees) {
  for (const int head_dim : {16, 64, 128}) {
    SCOPED_TRACE(head_dim);
    ModelConfig config = small_config(ModelConfig::Family::qwen2);
    config.head_dim = head_dim;
    const auto sequences = random_sequences({300, 1, 130}, config.vocab_size, 5);
    const MicroBatch batch = pack(sequences, count_targets(sequences));
    const StageOptions options = whole_model(config, batch.size(), Recompute::layer);
    Rig expected(config, options, DeviceKind::cuda, GetParam());
    expected.step(batch);
    CudaAttentionOptions dense;
    dense.attention.selection.pattern = SelectionPattern::dense;
    dense.attention.layers = config.layers;
    Rig got(config, options, DeviceKind::cuda, GetParam(), make_cuda_attention(dense));
    got.step(batch);
    const bool exact = GetParam() == DType::f32;
    EXPECT_NEAR(got.stage->loss(0).weighted / expected.stage->loss(0).weighted, 1, exact ? 1e-5 : 5e-3);
    EXPECT_LT(largest_relative_difference(hf_gradients(got.stage->parameters()),
                                          hf_gradients(expected.stage->parameters()), 1e-6, exact ? 0 : 0.05),
              exact ? 1e-4 : 4e-2);
  }
}

TEST_P(CudaStageTest, RecomputeLevelsGiveTheSameBits) {
  for (const ModelConfig::Family family : {ModelConfig::Family::qwen2, ModelConfig::Family::qwen3}) {
    const ModelConfig config = small_config(family);
    const auto sequences = random_sequences({70, 1, 30}, config.vocab_size, 7);
    const MicroBatch batch = pack(sequences, count_targets(sequences));
    std::vector<Tensors> gradients;
    for (const Recompute level : {Recompute::none, Recompute::attention, Recompute::layer}) {
      Rig rig(config, whole_model(config, batch.size(), level), DeviceKind::cuda, GetParam());
      rig.step(batch);
      gradients.push_back(hf_gradients(rig.stage->parameters()));
    }
    for (const auto& [name, values] : gradients[0]) {
      EXPECT_EQ(relative_difference(gradients[1].at(name), values), 0) << name;
      EXPECT_EQ(relative_difference(gradients[2].at(name), values), 0) << name;
    }
  }
}

// With the device's attention: lists are kept, or selected once and replayed.
TEST_P(CudaStageTest, RecomputeLevelsGiveTheSameBitsWithSparseAttention) {
  for (const int head_dim : {16, 64, 128}) {
    ModelConfig config = small_config(ModelConfig::Family::qwen2);
    config.head_dim = head_dim;
    CudaAttentionOptions sparse = deterministic_topk(config.layers);
    const auto sequences =
        random_sequences({sized<int64_t>(900, 300), 1, sized<int64_t>(300, 90)}, config.vocab_size, 7);
    const MicroBatch batch = pack(sequences, count_targets(sequences));
    Tensors expected;
    for (const Recompute level : {Recompute::none, Recompute::attention, Recompute::layer}) {
      Rig rig(config, whole_model(config, batch.size(), level), DeviceKind::cuda, GetParam(),
              make_cuda_attention(sparse));
      rig.step(batch);
      const Tensors gradients = hf_gradients(rig.stage->parameters());
      if (level == Recompute::none) expected = gradients;
      for (const auto& [name, values] : expected)
        EXPECT_EQ(gradients.at(name), values) << name << ", heads of " << head_dim;
    }
  }
}

// Pieces of a sequence, one after the other: loss and gradients of the whole, in the memory that was planned.
TEST_P(CudaStageTest, PiecesGiveTheGradientsOfTheWhole) {
  for (const auto& [family, head_dim] :
       {std::pair{ModelConfig::Family::qwen2, 64}, {ModelConfig::Family::qwen3, 128}}) {
    Tensors first;  // of all levels
    for (const Recompute level : {Recompute::none, Recompute::attention, Recompute::layer, Recompute::chunk}) {
      SCOPED_TRACE(fmt::format("heads of {}, level {}", head_dim, static_cast<int>(level)));
      ModelConfig config = small_config(family);
      config.head_dim = head_dim;
      const int64_t tokens = sized<int64_t>(1500, 330), piece = sized<int64_t>(256, 128),
                    count = (tokens + piece - 1) / piece;
      const auto sequences = random_sequences({tokens}, config.vocab_size, 7);
      const MicroBatch batch = pack(sequences, count_targets(sequences));
      Rig whole(config, whole_model(config, tokens, Recompute::attention), DeviceKind::cuda, GetParam(),
                make_cuda_attention(deterministic_topk(config.layers)));
      whole.step(batch);
      StageOptions options = whole_model(config, piece, level);
      options.max_sequence_length = options.max_cut_sequence = tokens;
      options.slots = count;
      Rig cut(config, options, DeviceKind::cuda, GetParam(), make_cuda_attention(deterministic_topk(config.layers)));
      std::vector<MicroBatch> pieces;
      for (int64_t begin = 0; begin < tokens; begin += piece)
        pieces.push_back(cut_piece(batch, begin, std::min(begin + piece, tokens)));
      LossSums loss;
      const auto taken = cuda::allocations();
      for (int64_t i = 0; i < count; ++i) cut.stage->forward(cut.run.exec, pieces[static_cast<size_t>(i)], i, {});
      for (int64_t i = count - 1; i >= 0; --i) {
        cut.stage->backward(cut.run.exec, pieces[static_cast<size_t>(i)], i, {});
        loss += cut.stage->loss(i);
      }
      EXPECT_EQ(cuda::allocations(), taken);
      const Tensors gradients = hf_gradients(cut.stage->parameters());
      if (level == Recompute::none) first = gradients;
      EXPECT_EQ(gradients, first);
      const bool exact = GetParam() == DType::f32;
      EXPECT_NEAR(loss.weighted / whole.stage->loss(0).weighted, 1, exact ? 1e-5 : 5e-3);
      EXPECT_LT(
          largest_relative_difference(gradients, hf_gradients(whole.stage->parameters()), 1e-6, exact ? 1e-3 : 0.05),
          exact ? 1e-4 : 4e-2);
    }
  }
}

TEST_P(CudaStageTest, WritingTheFirstGradientsGivesTheBitsOfAddingToZeros) {
  for (const bool tied : {true, false}) {
    ModelConfig config = small_config(ModelConfig::Family::qwen2);
    config.tie_word_embeddings = tied;
    const auto sequences = random_sequences({70, 1, 30}, config.vocab_size, 7);
    const MicroBatch batch = pack(sequences, count_targets(sequences));
    StageOptions options = whole_model(config, batch.size(), Recompute::layer);
    options.layer_chunk = 64;
    std::vector<float> expected;
    for (const bool write : {false, true}) {
      Rig rig(config, options, DeviceKind::cuda, GetParam());
      ParameterSet& parameters = rig.stage->parameters();
      if (write) {
        const HostCopy poison(parameters.gradients());
        std::fill_n(poison.view().f32(), poison.view().elements(), NAN);
        poison.store();
        parameters.begin_gradients(rig.run.exec);
      }
      for (int i = 0; i < 2; ++i) rig.step(batch);
      const std::vector<float> gradients = host_values(parameters.gradients());
      if (!write) expected = gradients;
      EXPECT_EQ(gradients, expected) << "tied " << tied;
    }
  }
}

// Large enough that a copy takes as long as a layer: a missing wait would show.
TEST_P(CudaStageTest, LayerInputsInHostMemoryGiveTheSameBits) {
  ModelConfig config = small_config(ModelConfig::Family::qwen2);
  config.layers = 6;
  config.hidden_size = sized(512, 128);
  config.intermediate_size = 64;
  config.head_dim = 64;
  CudaAttentionOptions dense;
  dense.attention.selection.pattern = SelectionPattern::dense;
  dense.attention.layers = config.layers;
  dense.deterministic = true;
  const auto long_ones = random_sequences(std::vector<int64_t>(sized<size_t>(160, 4), 100), config.vocab_size, 1),
             short_ones = random_sequences({sized<int64_t>(700, 300), 1, 90}, config.vocab_size, 2);
  const MicroBatch batches[] = {pack(long_ones, count_targets(long_ones)), pack(short_ones, count_targets(short_ones)),
                                pack(long_ones, count_targets(long_ones))};
  for (const Recompute level : {Recompute::attention, Recompute::layer}) {
    StageOptions options = whole_model(config, batches[0].size(), level);
    options.slots = 2;
    Tensors expected;
    for (const int offload : {0, 1, 4}) {
      SCOPED_TRACE(offload);
      options.offload = offload;
      Rig rig(config, options, DeviceKind::cuda, GetParam(), make_cuda_attention(dense));
      rig.step(batches[0]);
      for (int i : {0, 1}) rig.stage->forward(rig.run.exec, batches[1 + i], i, {});
      for (int i : {0, 1}) rig.stage->backward(rig.run.exec, batches[1 + i], i, {});
      const Tensors gradients = hf_gradients(rig.stage->parameters());
      if (offload == 0) expected = gradients;
      for (const auto& [name, values] : expected) EXPECT_EQ(gradients.at(name), values) << name;
    }
  }
}

TEST_P(CudaStageTest, ChunksChangeNothingButRounding) {
  for (const ModelConfig::Family family : {ModelConfig::Family::qwen2, ModelConfig::Family::qwen3}) {
    const ModelConfig config = small_config(family);
    const auto sequences = random_sequences({70, 1, 30}, config.vocab_size, 7);
    const MicroBatch batch = pack(sequences, count_targets(sequences));
    Rig expected(config, whole_model(config, batch.size(), Recompute::none), DeviceKind::cuda, GetParam());
    expected.step(batch);
    for (const Recompute level : {Recompute::none, Recompute::layer}) {
      StageOptions options = whole_model(config, batch.size(), level);
      options.layer_chunk = 33;
      Rig rig(config, options, DeviceKind::cuda, GetParam());
      rig.step(batch);
      const bool exact = GetParam() == DType::f32;
      EXPECT_NEAR(rig.stage->loss(0).weighted / expected.stage->loss(0).weighted, 1, exact ? 1e-5 : 5e-3);
      EXPECT_LT(largest_relative_difference(hf_gradients(rig.stage->parameters()),
                                            hf_gradients(expected.stage->parameters()), 1e-6, exact ? 0 : 0.05),
                exact ? 1e-5 : 2e-2);
    }
  }
}

TEST_P(CudaStageTest, TwoStagesEqualOne) {
  ModelConfig config = small_config(ModelConfig::Family::qwen2);
  config.layers = 3;
  config.tie_word_embeddings = true;
  const auto sequences = random_sequences({25, 30}, config.vocab_size, 2);
  const MicroBatch batch = pack(sequences, count_targets(sequences));
  StageOptions options = whole_model(config, batch.size(), Recompute::attention);
  Rig whole(config, options, DeviceKind::cuda, GetParam());
  options.last_layer = 1;
  Rig front(config, options, DeviceKind::cuda, GetParam());
  options.first_layer = 1;
  options.last_layer = 3;
  Rig back(config, options, DeviceKind::cuda, GetParam());
  whole.step(batch);
  // One stream for both, as the ranks of a process that share it would have to synchronise otherwise.
  const Exec& exec = front.run.exec;
  back.stage->forward(exec, batch, 0, front.stage->forward(exec, batch, 0, {}));
  front.stage->backward(exec, batch, 0, back.stage->backward(exec, batch, 0, {}));
  EXPECT_EQ(back.stage->loss(0).weighted, whole.stage->loss(0).weighted);
  const Tensors expected = hf_gradients(whole.stage->parameters());
  for (Rig* part : {&front, &back}) {
    for (const auto& [name, values] : hf_gradients(part->stage->parameters())) {
      if (name == "model.embed_tokens.weight") continue;  // a part of the gradient on both
      EXPECT_EQ(values, expected.at(name)) << name;
    }
  }
}

TEST_P(CudaStageTest, WhatIsUsedIsWhatWasPlanned) {
  const ModelConfig config = small_config(ModelConfig::Family::qwen3);
  const auto sequences = random_sequences({50}, config.vocab_size, 1);
  const MicroBatch batch = pack(sequences, count_targets(sequences));
  StageOptions options = whole_model(config, 50, Recompute::layer);
  options.slots = 2;
  options.layer_chunk = 17;
  Rig rig(config, options, DeviceKind::cuda, GetParam());
  rig.stage->evaluate(rig.run.exec, batch, 0, {});
  rig.step(batch);
  options.device = DeviceKind::cuda;
  options.dtype = GetParam();
  const MemoryPlan plan = Stage::memory_plan(config, options, *rig.attention, 2), used = rig.stage->memory_used();
  ASSERT_EQ(plan.items().size(), used.items().size());
  for (size_t i = 0; i < plan.items().size(); ++i) {
    EXPECT_EQ(plan.items()[i].name, used.items()[i].name);
    EXPECT_EQ(plan.items()[i].bytes, used.items()[i].bytes) << plan.items()[i].name;
  }
}

// The same codes, whether they are kept between updates or made for every product: the same bits, in the planned
// memory.
TEST(CudaFp8Stage, KeptCodesGiveTheBitsOfCodesMadeForEveryProduct) {
  if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  if (cuda::device_info().major != 9) GTEST_SKIP() << "not a Hopper GPU";
  const ModelConfig config = small_config(ModelConfig::Family::qwen3);
  const auto sequences = random_sequences({70, 1, 30}, config.vocab_size, 7);
  const MicroBatch batch = pack(sequences, count_targets(sequences));
  std::vector<Tensors> expected;
  for (const int kept : {0, 1, -1}) {
    StageOptions options = whole_model(config, batch.size(), Recompute::layer);
    options.fp8 = true;
    options.layer_chunk = 33;
    options.kept_codes = kept;
    Rig rig(config, options, DeviceKind::cuda, DType::bf16);
    std::vector<Tensors> gradients;
    for (const uint64_t seed : {3, 4}) {
      rig.stage->initialize(seed);
      rig.stage->parameters().zero_gradients(rig.run.exec);
      rig.step(batch);
      rig.step(batch);
      gradients.push_back(hf_gradients(rig.stage->parameters()));
    }
    if (kept == 0) expected = gradients;
    EXPECT_NE(gradients[0], gradients[1]);
    EXPECT_EQ(gradients, expected) << "codes of " << kept << " layers";
    options.device = DeviceKind::cuda;
    options.dtype = DType::bf16;
    const MemoryPlan plan = Stage::memory_plan(config, options, *rig.attention, 2), used = rig.stage->memory_used();
    ASSERT_EQ(plan.items().size(), used.items().size());
    for (size_t i = 0; i < plan.items().size(); ++i) {
      const MemoryPlan::Item &planned = plan.items()[i], &taken = used.items()[i];
      EXPECT_EQ(taken.name, planned.name);
      EXPECT_LE(taken.bytes, planned.bytes) << planned.name;
      EXPECT_TRUE(taken.bytes == planned.bytes || !planned.name.starts_with("fp8 weights")) << planned.name;
    }
  }
}

// Scratch and lists of the device's attention are part of the plan: the scratch is used up to what was planned at most,
// and nothing is taken when the steps run.
TEST_P(CudaStageTest, SparseAttentionStaysWithinThePlan) {
  ModelConfig config = small_config(ModelConfig::Family::qwen2);
  config.head_dim = 64;
  const int64_t tokens = sized(2000, 500);
  const auto one = random_sequences({tokens}, config.vocab_size, 1),
             several = random_sequences(sized<std::vector<int64_t>>({700, 64, 900, 336}, {200, 64, 180, 56}),
                                        config.vocab_size, 2);
  StageOptions options = whole_model(config, tokens, Recompute::layer);
  options.slots = 2;
  CudaAttentionOptions sparse = deterministic_topk(config.layers);
  sparse.attention.coverage_rows = 2;
  Rig rig(config, options, DeviceKind::cuda, GetParam(), make_cuda_attention(sparse));
  options.device = DeviceKind::cuda;
  options.dtype = GetParam();
  const cuda::Allocations allocations = cuda::allocations();
  for (const auto& sequences : {one, several}) rig.step(pack(sequences, count_targets(sequences)));
  EXPECT_TRUE(cuda::allocations() == allocations);
  const MemoryPlan plan = Stage::memory_plan(config, options, *rig.attention, 2), used = rig.stage->memory_used();
  ASSERT_EQ(plan.items().size(), used.items().size());
  for (size_t i = 0; i < plan.items().size(); ++i)
    EXPECT_LE(used.items()[i].bytes, plan.items()[i].bytes) << plan.items()[i].name;
}

// Packed sequences of ever-changing lengths, dense and sparse ones, with layer inputs in host memory.
TEST_P(CudaStageTest, TwoHundredStepsOfChangingLengthsTakeNoMemory) {
  ModelConfig config = small_config(ModelConfig::Family::qwen2);
  config.layers = 4;
  config.hidden_size = 128;
  config.head_dim = 64;
  const int64_t tokens = sized(4096, 400);
  CudaAttentionOptions sparse;
  sparse.attention.selection.budget = sized(640, 256);
  sparse.attention.selection.block = 128;
  sparse.attention.selection.dense_layers = {1};
  sparse.attention.layers = config.layers;
  StageOptions options = whole_model(config, tokens, Recompute::attention);
  options.offload = 2;
  options.layer_chunk = 1000;
  Rig rig(config, options, DeviceKind::cuda, GetParam(), make_cuda_attention(sparse));
  ParameterSet& parameters = rig.stage->parameters();
  const Exec& exec = rig.run.exec;
  Arena memory = make_arena("moments", 2 * Arena::rounded(parameters.flat_bytes()) + 64, DeviceKind::cuda);
  const int64_t elements = parameters.flat_elements();
  const AdamWBuffers buffers{parameters.values(),
                             parameters.gradients(),
                             memory.allocate(DType::f32, {elements}),
                             memory.allocate(DType::f32, {elements}),
                             parameters.rounded_weights(),
                             memory.allocate(DType::f32, {2})};
  zero_tensor(exec, buffers.m);
  zero_tensor(exec, buffers.v);
  const DecayRange all{0, elements, true};
  Random random(3);
  const cuda::Allocations allocations = cuda::allocations();
  int64_t free_early = 0;
  // Under the memory checker fewer, in which every kind of step comes already, and with others on the GPU.
  const bool brief = std::getenv("SB_TEST_SHORT") != nullptr;
  for (int64_t step = 1; step <= sized(brief ? 40 : 200, 24); ++step) {
    std::vector<int64_t> lengths;
    int64_t left = step == 17
                       ? tokens
                       : 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(tokens)));  // the largest, once
    while (left > 0) {
      lengths.push_back(1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(left))));
      left -= lengths.back();
    }
    const auto sequences = random_sequences(lengths, config.vocab_size, static_cast<uint64_t>(step));
    const MicroBatch batch = pack(sequences, std::max<int64_t>(1, count_targets(sequences)));
    parameters.zero_gradients(exec);
    rig.step(batch);
    clip_by_norm(exec, buffers.gradients, 1.0, buffers.clip);
    adamw_update(exec, {1e-3f, 0.9f, 0.95f, 1e-8f, 0.1f, step, 1.0f}, std::span(&all, 1), buffers);
    ASSERT_TRUE(std::isfinite(rig.stage->loss(0).weighted)) << "step " << step;
    if (step == 20) free_early = cuda::device_info().free_bytes;
  }
  EXPECT_TRUE(cuda::allocations() == allocations);
  // Kernels are loaded when they are first used, and new lengths may need other products.
  const int64_t growth = free_early - cuda::device_info().free_bytes;
  RecordProperty("growth_bytes", std::to_string(growth));
  EXPECT_TRUE(brief || growth <= int64_t{64} << 20) << growth;
}

TEST_P(CudaStageTest, WeightsGoToDiskAndBackUnchanged) {
  const ModelConfig config = small_config(ModelConfig::Family::llama);
  const StageOptions options = whole_model(config, 8);
  Rig there(config, options, DeviceKind::cuda, GetParam()), cpu(config, options, DeviceKind::cpu, DType::f32),
      again(config, options, DeviceKind::cuda, GetParam());
  EXPECT_EQ(hf_values(there.stage->parameters()), hf_values(cpu.stage->parameters()));  // the same initialisation
  TemporaryDirectory directory;
  write_hf_model(directory.path(), config, there.stage->parameters(), {});
  again.stage->initialize(99);
  read_hf_weights(directory.path(), again.stage->parameters());
  EXPECT_EQ(hf_values(again.stage->parameters()), hf_values(there.stage->parameters()));
  if (GetParam() == DType::bf16) {
    EXPECT_EQ(host_values(again.stage->parameters().rounded_weights()),
              host_values(there.stage->parameters().rounded_weights()));
  }
}

}  // namespace
}  // namespace sb::test
