#include "model/stage/stage.h"

#include <gtest/gtest.h>

#include <cmath>

#include "attention/cpu/dense_attention.h"
#include "tests/model/reference_model.h"
#include "tests/model/whole_stage.h"

namespace sb::test {
namespace {

std::vector<double> as_double(const std::vector<float>& x) {
  return {x.begin(), x.end()};
}

double relative_difference(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0, squares = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    squares += b[i] * b[i];
  }
  return a.size() == b.size() ? std::sqrt(difference / squares) : INFINITY;
}

ModelConfig with_all_biases(ModelConfig config) {
  config.qkv_bias = config.output_bias = true;
  return config;
}

// --- against the fp64 reference

class ReferenceTest : public testing::TestWithParam<ModelConfig> {};

TEST_P(ReferenceTest, LogitsAndLoss) {
  const ModelConfig& config = GetParam();
  const MicroBatch batch = random_batch({9, 1, 5}, config.vocab_size, 3);
  Whole<> whole(config, whole_model(config, batch.size()));
  const ReferenceModel reference(config, whole.stage.parameters());
  EXPECT_LT(relative_difference(as_double(all_logits(whole.stage, whole.run.exec, batch)), reference.logits(batch)),
            1e-5);
  EXPECT_NEAR(whole.stage.loss(0).weighted / reference.loss(batch), 1, 1e-5);
}

// Central differences of the fp64 reference: their own error is far below the engine's fp32.
TEST_P(ReferenceTest, GradientsMatchFiniteDifferences) {
  const ModelConfig& config = GetParam();
  const MicroBatch batch = random_batch({5, 1, 4}, config.vocab_size, 4);
  Whole<> whole(config, whole_model(config, batch.size(), Recompute::attention));
  whole.step(batch);
  ReferenceModel reference(config, whole.stage.parameters());
  Tensors expected;
  for (auto& [name, values] : reference.tensors()) {
    for (double& value : values) {
      const double original = value, h = 1e-5;
      value = original + h;
      const double above = reference.loss(batch);
      value = original - h;
      const double below = reference.loss(batch);
      value = original;
      expected[name].push_back(static_cast<float>((above - below) / (2 * h)));
    }
  }
  EXPECT_LT(largest_relative_difference(hf_gradients(whole.stage.parameters()), expected), 1e-4);
}

ModelConfig with_rope(RopeConfig::Type type) {
  ModelConfig config = tiny_config(ModelConfig::Family::llama);
  config.rope.type = type;
  config.rope.theta = 50;  // low, so that the few positions of the test reach every band
  config.rope.factor = 4;
  config.rope.original_max_position_embeddings = 8;
  config.tie_word_embeddings = true;
  return config;
}

INSTANTIATE_TEST_SUITE_P(Families, ReferenceTest,
                         testing::Values(tiny_config(ModelConfig::Family::qwen2),
                                         tiny_config(ModelConfig::Family::llama),
                                         with_all_biases(tiny_config(ModelConfig::Family::llama)),
                                         tiny_config(ModelConfig::Family::qwen3),
                                         with_all_biases(tiny_config(ModelConfig::Family::qwen3))));
INSTANTIATE_TEST_SUITE_P(Ropes, ReferenceTest,
                         testing::Values(with_rope(RopeConfig::Type::linear), with_rope(RopeConfig::Type::llama3),
                                         with_rope(RopeConfig::Type::yarn)));

// --- arrangements that must not change the result

TEST(StageTest, RecomputeLevelsGiveTheSameBits) {
  for (const ModelConfig::Family family : kFamilies) {
    const ModelConfig config = tiny_config(family);
    const MicroBatch batch = random_batch({17, 3}, config.vocab_size, 7),
                     other = random_batch({6}, config.vocab_size, 8);
    std::vector<Tensors> gradients;
    std::vector<double> losses;
    for (const Recompute level : kLevels) {
      Whole<DenseAttention> whole(config, whole_model(config, 32, level));
      whole.step(batch);
      whole.step(other);
      gradients.push_back(hf_gradients(whole.stage.parameters()));
      losses.push_back(whole.stage.loss(0).weighted);
    }
    EXPECT_EQ(gradients[0], gradients[1]);
    EXPECT_EQ(gradients[0], gradients[2]);
    EXPECT_EQ(losses[0], losses[1]);
    EXPECT_EQ(losses[0], losses[2]);
  }
}

// Micro-batches of different sizes, one after the other and in flight at the same time.
TEST(StageTest, LayerInputsInHostMemoryGiveTheSameBits) {
  for (const ModelConfig::Family family : kFamilies) {
    ModelConfig config = tiny_config(family);
    config.layers = 5;
    const MicroBatch batches[] = {random_batch({11}, 13, 1), random_batch({2, 5}, 13, 2), random_batch({16}, 13, 3)};
    for (const Recompute level : kLevels) {
      StageOptions options = whole_model(config, 16, level);
      options.slots = 2;
      Tensors expected;
      double expected_loss = 0;
      EXPECT_EQ(Stage::most_offload(options), 3);
      for (int offload = 0; offload <= 3; ++offload) {
        SCOPED_TRACE(offload);
        options.offload = offload;
        Whole<DenseAttention> whole(config, options);
        whole.step(batches[0]);
        const Exec& exec = whole.run.exec;
        for (int i : {0, 1}) whole.stage.forward(exec, batches[1 + i], i, {});
        for (int i : {0, 1}) whole.stage.backward(exec, batches[1 + i], i, {});
        const Tensors gradients = hf_gradients(whole.stage.parameters());
        const double loss = whole.stage.loss(0).weighted + whole.stage.loss(1).weighted;
        if (offload == 0) {
          expected = gradients;
          expected_loss = loss;
        }
        EXPECT_EQ(gradients, expected);
        EXPECT_EQ(loss, expected_loss);
      }
    }
  }
}

TEST(StageTest, ChunksChangeNothingButRounding) {
  for (const ModelConfig::Family family : kFamilies) {
    const ModelConfig config = tiny_config(family);
    const MicroBatch batch = random_batch({17, 3}, config.vocab_size, 7);
    Whole<DenseAttention> expected(config, whole_model(config, 20, Recompute::layer));
    expected.step(batch);
    Tensors first_level;
    for (const Recompute level : kLevels) {
      for (const int64_t chunk : {1, 7, 19, 20}) {
        StageOptions options = whole_model(config, 20, level);
        options.layer_chunk = chunk;
        Whole<DenseAttention> whole(config, options);
        whole.step(batch);
        EXPECT_NEAR(whole.stage.loss(0).weighted / expected.stage.loss(0).weighted, 1, 1e-6);
        const Tensors gradients = hf_gradients(whole.stage.parameters());
        EXPECT_LT(largest_relative_difference(gradients, hf_gradients(expected.stage.parameters())), 1e-5);
        // What is recomputed has the same bits in pieces, too.
        if (chunk != 7) continue;
        if (level == Recompute::none) first_level = gradients;
        EXPECT_EQ(gradients, first_level);
      }
    }
  }
}

// Over several micro-batches, whole and in pieces, the first of them without a target.
TEST(StageTest, WritingTheFirstGradientsGivesTheBitsOfAddingToZeros) {
  for (const bool tied : {true, false}) {
    ModelConfig config = with_all_biases(tiny_config(ModelConfig::Family::qwen3));
    config.tie_word_embeddings = tied;
    MicroBatch first = random_batch({11, 4}, config.vocab_size, 1);
    const MicroBatch second = random_batch({20}, config.vocab_size, 2);
    for (const bool targets : {true, false}) {
      if (!targets) std::fill(first.labels.begin(), first.labels.end(), kIgnoredLabel);
      StageOptions options = whole_model(config, 20, Recompute::attention);
      options.layer_chunk = 7;
      Whole<> added(config, options), written(config, options);
      const TensorView gradients = written.stage.parameters().gradients();
      std::fill_n(gradients.f32(), gradients.elements(), NAN);
      written.stage.parameters().begin_gradients(written.run.exec);
      for (Whole<>* whole : {&added, &written}) {
        whole->step(first);
        whole->step(second);
      }
      EXPECT_EQ(host_values(gradients), host_values(added.stage.parameters().gradients()));  // padding, too
    }
  }
}

TEST(StageTest, AttentionRunsTwiceOnlyWhenTheLayerIsRecomputed) {
  const ModelConfig config = tiny_config(ModelConfig::Family::llama);
  const MicroBatch batch = random_batch({4}, config.vocab_size, 1);
  for (const Recompute level : kLevels) {
    Whole<> whole(config, whole_model(config, 8, level));
    whole.step(batch);
    std::vector<std::pair<int, bool>> calls;
    for (const NaiveAttention::Call& call : whole.attention.forward_calls) calls.emplace_back(call.layer, call.replay);
    std::vector<std::pair<int, bool>> expected = {{0, false}, {1, false}};
    if (level == Recompute::layer) expected.insert(expected.end(), {{1, true}, {0, true}});
    EXPECT_EQ(calls, expected);
    EXPECT_EQ(whole.attention.backward_calls.size(), 2u);
  }
}

TEST(StageTest, MicroBatchesInFlightKeepTheirSlots) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen3);
  const MicroBatch batches[] = {random_batch({11}, 13, 1), random_batch({2, 5}, 13, 2), random_batch({16}, 13, 3)};
  for (const Recompute level : kLevels) {
    Whole<> one(config, whole_model(config, 16, level));
    StageOptions options = whole_model(config, 16, level);
    options.slots = 3;
    Whole<> several(config, options);
    double loss = 0, loss_several = 0;
    for (const MicroBatch& batch : batches) {
      one.step(batch);
      loss += one.stage.loss(0).weighted;
    }
    // All forward first, then all backward: every parameter sums in the same order.
    for (int i = 0; i < 3; ++i) several.stage.forward(several.run.exec, batches[i], i, {});
    for (int i = 0; i < 3; ++i) loss_several += several.stage.loss(i).weighted;
    for (int i = 0; i < 3; ++i) several.stage.backward(several.run.exec, batches[i], i, {});
    EXPECT_EQ(loss, loss_several);
    EXPECT_EQ(hf_gradients(one.stage.parameters()), hf_gradients(several.stage.parameters()));
  }
}

TEST(StageTest, PackingChangesNothingButRounding) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  const auto sequences = random_sequences({8, 1, 13, 2}, config.vocab_size, 6);
  const int64_t targets = count_targets(sequences);
  Whole<> packed(config, whole_model(config, 24)), split(config, whole_model(config, 24));
  packed.step(pack(sequences, targets));
  double loss = 0;
  for (const auto& sequence : sequences) {
    split.step(pack({sequence}, targets));
    loss += split.stage.loss(0).weighted;
  }
  EXPECT_NEAR(loss, packed.stage.loss(0).weighted, 1e-6 * loss);
  EXPECT_LT(
      largest_relative_difference(hf_gradients(split.stage.parameters()), hf_gradients(packed.stage.parameters())),
      1e-5);
}

// Two stages, each with its part of the layers, and a whole model with the same values.
class TwoStagesTest : public testing::TestWithParam<bool> {
 protected:
  static ModelConfig make_config(bool tied) {
    ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
    config.layers = 3;
    config.tie_word_embeddings = tied;
    return config;
  }
  static StageOptions part(const ModelConfig& config, int first, int last) {
    StageOptions options = whole_model(config, 20, Recompute::attention);
    options.first_layer = first;
    options.last_layer = last;
    options.slots = 2;
    return options;
  }
  static void copy_values(ParameterSet& from, ParameterSet& to) {
    const Tensors values = hf_values(from);
    for (int i = 0; i < to.count(); ++i) {
      for (const Parameter::Part& p : to.parameter(i).parts) {
        const TensorView rows = to.value(i).rows(p.row_begin, p.row_end);
        std::copy(values.at(p.hf_name).begin(), values.at(p.hf_name).end(), rows.f32());
      }
    }
  }

  TwoStagesTest()
      : config_(make_config(GetParam())),
        whole_(config_, whole_model(config_, 20, Recompute::attention)),
        front_(config_, part(config_, 0, 2), attention_, 2),
        back_(config_, part(config_, 2, 3), attention_, 2) {
    copy_values(whole_.stage.parameters(), front_.parameters());
    copy_values(whole_.stage.parameters(), back_.parameters());
  }

  ModelConfig config_;
  NaiveAttention attention_;
  Whole<> whole_;
  Stage front_, back_;
};

TEST_P(TwoStagesTest, EqualOne) {
  EXPECT_TRUE(front_.first() && !front_.last() && !back_.first() && back_.last());
  const MicroBatch batches[] = {random_batch({12, 4}, 13, 1), random_batch({20}, 13, 2)};
  const Exec& exec = whole_.run.exec;
  for (const MicroBatch& batch : batches) whole_.step(batch);
  // Both in flight on both stages, as a pipeline has them.
  for (int i = 0; i < 2; ++i) {
    const TensorView between = front_.forward(exec, batches[i], i, {});
    EXPECT_TRUE(back_.forward(exec, batches[i], i, between).empty());
  }
  for (int i = 0; i < 2; ++i) {
    const TensorView gradient = back_.backward(exec, batches[i], i, {});
    EXPECT_TRUE(front_.backward(exec, batches[i], i, gradient).empty());
  }
  EXPECT_EQ(back_.loss(1).weighted, whole_.stage.loss(0).weighted);

  Tensors gradients = hf_gradients(front_.parameters());
  for (const auto& [name, values] : hf_gradients(back_.parameters())) {
    std::vector<float>& sum = gradients[name];
    sum.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i];  // the tied embedding has a part on both
  }
  EXPECT_LT(largest_relative_difference(gradients, hf_gradients(whole_.stage.parameters())), 1e-6);
}

TEST_P(TwoStagesTest, EvaluateAlike) {
  const MicroBatch batch = random_batch({7, 2}, 13, 3);
  const Exec& exec = whole_.run.exec;
  const TensorView between = front_.evaluate(exec, batch, 0, {});
  back_.evaluate(exec, batch, 0, between);
  whole_.stage.evaluate(exec, batch, 0, {});
  EXPECT_EQ(back_.loss(0).weighted, whole_.stage.loss(0).weighted);
}

INSTANTIATE_TEST_SUITE_P(TiedAndUntied, TwoStagesTest, testing::Bool());

// --- evaluation

TEST(StageTest, EvaluationGivesTheLossOfTrainingAndNoGradient) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen3);
  const MicroBatch batch = random_batch({10, 6}, config.vocab_size, 7);
  for (const Recompute level : kLevels) {
    Whole<> whole(config, whole_model(config, 16, level));
    whole.stage.evaluate(whole.run.exec, batch, 0, {});
    const LossSums evaluated = whole.stage.loss(0);
    for (const auto& [name, values] : hf_gradients(whole.stage.parameters())) EXPECT_EQ(norm(values), 0) << name;
    whole.stage.forward(whole.run.exec, batch, 0, {});
    EXPECT_EQ(whole.stage.loss(0).weighted, evaluated.weighted);
    EXPECT_EQ(whole.stage.loss(0).correct, evaluated.correct);
  }
}

TEST(StageTest, StageWithoutTrainingHasNoGradientsAndEvaluates) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  const MicroBatch batch = random_batch({10}, config.vocab_size, 7);
  StageOptions options = whole_model(config, 16);
  Whole<> training(config, options);
  options.training = false;
  Whole<> evaluation(config, options);
  training.stage.forward(training.run.exec, batch, 0, {});
  evaluation.stage.forward(evaluation.run.exec, batch, 0, {});
  EXPECT_EQ(training.stage.loss(0).weighted, evaluation.stage.loss(0).weighted);
  EXPECT_THROW(evaluation.stage.parameters().gradients(), InternalError);
  EXPECT_THROW(evaluation.stage.backward(evaluation.run.exec, batch, 0, {}), InternalError);
}

// --- what attention is told

TEST(StageTest, EveryLayerGetsItsRowOfBudgets) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  MicroBatch batch = random_batch({3, 4, 5}, config.vocab_size, 1);
  batch.budgets = {1, 2, 3, 4, 5, 6};
  Whole<> whole(config, whole_model(config, 16));
  whole.step(batch);
  ASSERT_EQ(whole.attention.forward_calls.size(), 2u);
  EXPECT_EQ(whole.attention.forward_calls[0].budgets, (std::vector<int32_t>{1, 2, 3}));
  EXPECT_EQ(whole.attention.forward_calls[1].budgets, (std::vector<int32_t>{4, 5, 6}));
  EXPECT_EQ(whole.attention.backward_calls[0].budgets, (std::vector<int32_t>{4, 5, 6}));
}

// --- initialisation

TEST(StageTest, InitialisationDependsOnSeedAndNameAlone) {
  ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  config.vocab_size = 5000;  // enough numbers for their statistics
  config.tie_word_embeddings = true;
  NaiveAttention attention;
  StageOptions options = whole_model(config, 8);
  Stage whole(config, options, attention, 1), again(config, options, attention, 1),
      other(config, options, attention, 1);
  options.first_layer = 1;
  Stage back(config, options, attention, 1);
  whole.initialize(11);
  again.initialize(11);
  back.initialize(11);
  other.initialize(12);
  const Tensors values = hf_values(whole.parameters());
  EXPECT_EQ(values, hf_values(again.parameters()));
  EXPECT_NE(values, hf_values(other.parameters()));
  // A last stage's own copy of the tied embedding starts out equal.
  for (const auto& [name, part] : hf_values(back.parameters())) EXPECT_EQ(part, values.at(name)) << name;

  const std::vector<float>& table = values.at("model.embed_tokens.weight");
  double mean = 0, square = 0, fourth = 0;
  for (const float x : table) {
    mean += x;
    square += double{x} * x;
    fourth += std::pow(double{x}, 4);
  }
  const auto count = static_cast<double>(table.size());
  const double deviation = config.initializer_range;
  EXPECT_NEAR(mean / count, 0, 4 * deviation / std::sqrt(count));
  EXPECT_NEAR(square / count / (deviation * deviation), 1, 4 * std::sqrt(2 / count));
  EXPECT_NEAR(fourth / count / std::pow(deviation, 4), 3, 4 * std::sqrt(96 / count));  // a normal's fourth moment
  for (const float x : values.at("model.norm.weight")) EXPECT_EQ(x, 1);
  for (const float x : values.at("model.layers.1.self_attn.k_proj.bias")) EXPECT_EQ(x, 0);
}

// --- misuse

TEST(StageTest, RefusesWhatItWasNotPlannedFor) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  const MicroBatch good = random_batch({6, 2}, config.vocab_size, 1);
  Whole<> whole(config, whole_model(config, 8));
  const auto refuses = [&](const auto& change) {
    MicroBatch batch = good;
    change(batch);
    EXPECT_THROW(whole.stage.forward(whole.run.exec, batch, 0, {}), InternalError);
  };
  refuses([&](MicroBatch& batch) { batch = random_batch({9}, config.vocab_size, 1); });
  refuses([](MicroBatch& batch) { batch = {}; });
  refuses([](MicroBatch& batch) { batch.tokens[3] = 13; });
  refuses([](MicroBatch& batch) { batch.tokens[3] = -1; });
  refuses([](MicroBatch& batch) { batch.labels[3] = 13; });
  refuses([](MicroBatch& batch) { batch.positions[3] = 8; });
  refuses([](MicroBatch& batch) { batch.positions.pop_back(); });
  refuses([](MicroBatch& batch) { batch.weights.pop_back(); });
  refuses([](MicroBatch& batch) { batch.cu_seqlens.back() = 7; });
  refuses([](MicroBatch& batch) { batch.cu_seqlens = {0, 9, 8}; });
  refuses([](MicroBatch& batch) { batch.budgets = {1, 2, 3}; });
  whole.step(good);  // and still works
}

TEST(StageTest, KeepsForwardAndBackwardInStep) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  const MicroBatch batch = random_batch({6}, config.vocab_size, 1);
  Whole<> whole(config, whole_model(config, 8));
  Stage& stage = whole.stage;
  const Exec& exec = whole.run.exec;
  std::vector<float> logits(static_cast<size_t>(6 * config.vocab_size));
  const TensorView view(logits.data(), {6, config.vocab_size});
  EXPECT_THROW(stage.backward(exec, batch, 0, {}), InternalError);
  EXPECT_THROW(stage.forward(exec, batch, 1, {}), InternalError);
  stage.forward(exec, batch, 0, {});
  EXPECT_THROW(stage.forward(exec, batch, 0, {}), InternalError);
  EXPECT_THROW(stage.evaluate(exec, batch, 0, {}), InternalError);
  EXPECT_THROW(stage.logits(exec, 0, 0, 6, view), InternalError);
  stage.backward(exec, batch, 0, {});
  EXPECT_THROW(stage.backward(exec, batch, 0, {}), InternalError);
  stage.evaluate(exec, batch, 0, {});
  EXPECT_THROW(stage.backward(exec, batch, 0, {}), InternalError);
  EXPECT_NO_THROW(stage.logits(exec, 0, 0, 6, view));
}

TEST(StageTest, RefusesImpossibleOptions) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  NaiveAttention attention;
  const auto refuses = [&](const auto& change) {
    StageOptions options = whole_model(config, 8);
    change(options);
    EXPECT_THROW(Stage(config, options, attention, 1), InternalError);
    EXPECT_THROW(Stage::memory_plan(config, options, attention, 1), InternalError);
  };
  refuses([](StageOptions& options) { options.last_layer = 3; });
  refuses([](StageOptions& options) { options.first_layer = 2; });
  refuses([](StageOptions& options) { options.first_layer = -1; });
  refuses([](StageOptions& options) { options.max_micro_batch_tokens = 0; });
  refuses([](StageOptions& options) { options.max_sequence_length = 0; });
  refuses([](StageOptions& options) { options.slots = 0; });
  refuses([](StageOptions& options) { options.loss_chunk = 0; });
}

}  // namespace
}  // namespace sb::test
