// Low-rank adapters in a stage: what they compute, and what must not change it.
#include <gtest/gtest.h>

#include <cmath>

#include "attention/cpu/dense_attention.h"
#include "tests/model/reference_model.h"
#include "tests/model/whole_stage.h"

namespace sb::test {
namespace {

LoraConfig lora_of(int rank, std::initializer_list<LoraModule> targets = {}) {
  LoraConfig lora;
  lora.rank = rank;
  lora.alpha = 3;
  if (targets.size() == 0) return lora;
  lora.targets = {};
  for (const LoraModule target : targets) lora.targets[static_cast<size_t>(target)] = true;
  return lora;
}

StageOptions lora_model(const ModelConfig& config, int64_t tokens, const LoraConfig& lora,
                        Recompute recompute = Recompute::none) {
  StageOptions options = whole_model(config, tokens, recompute);
  options.lora = lora;
  return options;
}

template <typename AttentionType = NaiveAttention>
struct WholeLora : Whole<AttentionType> {
  WholeLora(const ModelConfig& config, const StageOptions& options) : Whole<AttentionType>(config, options) {
    randomize(this->stage.frozen_parameters(), 6);
  }
};

// The model with its adapters as a product of matrices in fp64, by PEFT's names.
class LoraReference {
 public:
  LoraReference(const ModelConfig& config, Stage& stage)
      : model_(config, stage.frozen_parameters()),
        scale_(stage.options().lora.scale()),
        rank_(stage.options().lora.rank) {
    const std::string prefix(kPeftPrefix);
    for (const auto& [name, values] : hf_values(stage.parameters())) {
      const std::string own = name.substr(prefix.size());
      if (name.find(".lora_") == std::string::npos)
        model_.tensors()[own] = {values.begin(), values.end()};
      else
        adapters_[name] = {values.begin(), values.end()};
    }
    base_ = model_.tensors();
    for (const auto& [name, values] : adapters_)
      if (name.ends_with("lora_A.weight")) merge(name);
  }

  // Gradients of all trained tensors by central differences.
  Tensors gradients(const MicroBatch& batch) {
    Tensors result;
    const auto differentiate = [&](const std::string& name, double& value, const auto& changed) {
      const double original = value, h = 1e-5;
      value = original + h;
      changed();
      const double above = model_.loss(batch);
      value = original - h;
      changed();
      const double below = model_.loss(batch);
      value = original;
      changed();
      result[name].push_back(static_cast<float>((above - below) / (2 * h)));
    };
    for (auto& [name, values] : adapters_)
      for (double& value : values) differentiate(name, value, [&, &name = name] { merge(name); });
    return result;
  }
  // Of a tensor of the model itself.
  std::vector<float> base_gradient(const std::string& name, const MicroBatch& batch) {
    std::vector<float> result;
    for (double& value : model_.tensors().at(name)) {
      const double original = value, h = 1e-5;
      value = original + h;
      const double above = model_.loss(batch);
      value = original - h;
      const double below = model_.loss(batch);
      value = original;
      result.push_back(static_cast<float>((above - below) / (2 * h)));
    }
    return result;
  }
  const ReferenceModel& model() const { return model_; }

 private:
  // W + scale · B·A of the module that an adapter's tensor belongs to.
  void merge(const std::string& adapter) {
    const std::string module = adapter.substr(0, adapter.find(".lora_"));
    const std::vector<double>&a = adapters_.at(module + ".lora_A.weight"), &b = adapters_.at(module + ".lora_B.weight");
    const std::string name = module.substr(kPeftPrefix.size()) + ".weight";
    const std::vector<double>& base = base_.at(name);
    std::vector<double>& merged = model_.tensors().at(name);
    const auto rank = static_cast<size_t>(rank_), in = a.size() / rank, out = b.size() / rank;
    for (size_t o = 0; o < out; ++o) {
      for (size_t i = 0; i < in; ++i) {
        double sum = 0;
        for (size_t r = 0; r < rank; ++r) sum += b[o * rank + r] * a[r * in + i];
        merged[o * in + i] = base[o * in + i] + scale_ * sum;
      }
    }
  }

  ReferenceModel model_;
  double scale_;
  int rank_;
  std::map<std::string, std::vector<double>> adapters_, base_;
};

class LoraReferenceTest : public testing::TestWithParam<ModelConfig::Family> {};

TEST_P(LoraReferenceTest, LogitsLossAndGradients) {
  ModelConfig config = tiny_config(GetParam());
  config.tie_word_embeddings = GetParam() != ModelConfig::Family::llama;
  const MicroBatch batch = random_batch({5, 1, 4}, config.vocab_size, 4);
  using enum LoraModule;
  for (LoraConfig lora : {lora_of(2), lora_of(1, {q, v}), lora_of(3, {k, o, up}), lora_of(5, {down, gate})}) {
    lora.rslora = lora.rank == 3;
    SCOPED_TRACE(fmt::format("rank {}", lora.rank));
    WholeLora<> whole(config, lora_model(config, batch.size(), lora, Recompute::attention));
    LoraReference reference(config, whole.stage);
    const std::vector<double> expected = reference.model().logits(batch);
    EXPECT_LT(relative_difference(all_logits(whole.stage, whole.run.exec, batch), {expected.begin(), expected.end()}),
              1e-5);
    EXPECT_NEAR(whole.stage.loss(0).weighted / reference.model().loss(batch), 1, 1e-5);
    whole.step(batch);
    EXPECT_LT(largest_relative_difference(hf_gradients(whole.stage.parameters()), reference.gradients(batch)), 1e-4);
  }
}

TEST_P(LoraReferenceTest, NormsEmbeddingAndHeadAreTrainedWhereAskedFor) {
  for (const bool tied : {false, true}) {
    ModelConfig config = tiny_config(GetParam());
    config.tie_word_embeddings = tied;
    const MicroBatch batch = random_batch({5, 3}, config.vocab_size, 4);
    LoraConfig lora = lora_of(2, {LoraModule::q});
    lora.norms = lora.embedding = true;
    lora.head = !tied;
    WholeLora<> whole(config, lora_model(config, batch.size(), lora, Recompute::layer));
    LoraReference reference(config, whole.stage);
    whole.step(batch);
    Tensors expected = reference.gradients(batch);
    const std::string prefix(kPeftPrefix);
    for (const auto& [name, gradient] : hf_gradients(whole.stage.parameters()))
      if (name.find(".lora_") == std::string::npos)
        expected[name] = reference.base_gradient(name.substr(prefix.size()), batch);
    EXPECT_TRUE(expected.contains(prefix + "model.embed_tokens.weight"));
    EXPECT_TRUE(expected.contains(prefix + "model.norm.weight"));
    EXPECT_EQ(expected.contains(prefix + "lm_head.weight"), !tied);
    EXPECT_LT(largest_relative_difference(hf_gradients(whole.stage.parameters()), expected), 1e-4);
  }
}

INSTANTIATE_TEST_SUITE_P(Families, LoraReferenceTest, testing::ValuesIn(kFamilies));

TEST(LoraStage, StartsAsTheModelItself) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  const MicroBatch batch = random_batch({9, 4}, config.vocab_size, 4);
  Whole<> plain(config, whole_model(config, batch.size()));
  plain.stage.initialize(3);
  Whole<> adapted(config, lora_model(config, batch.size(), lora_of(4)));
  adapted.stage.initialize(3);
  EXPECT_EQ(all_logits(adapted.stage, adapted.run.exec, batch), all_logits(plain.stage, plain.run.exec, batch));
  double squares = 0, most = 0;
  int64_t count = 0;
  for (const auto& [name, values] : hf_values(adapted.stage.parameters())) {
    for (const float value : values) {
      EXPECT_TRUE(!name.ends_with("lora_B.weight") || value == 0);
      if (name.ends_with("q_proj.lora_A.weight")) {
        squares += double{value} * value;
        most = std::max(most, std::abs(double{value}));
        ++count;
      }
    }
  }
  // Uniform in ±1/√8: a third of the largest square on average.
  EXPECT_LT(most, 1 / std::sqrt(8.0));
  EXPECT_NEAR(squares / static_cast<double>(count), 1.0 / 24, 0.012);
}

LoraConfig dropping() {
  LoraConfig lora = lora_of(2);
  lora.dropout = 0.3;
  return lora;
}

TEST(LoraStage, RecomputeLevelsDropTheSame) {
  for (const ModelConfig::Family family : kFamilies) {
    const ModelConfig config = tiny_config(family);
    MicroBatch batch = random_batch({17, 3}, config.vocab_size, 7);
    batch.dropout_key = 5;
    std::vector<Tensors> gradients;
    for (const Recompute level : kLevels) {
      WholeLora<DenseAttention> whole(config, lora_model(config, 32, dropping(), level));
      whole.step(batch);
      gradients.push_back(hf_gradients(whole.stage.parameters()));
    }
    EXPECT_EQ(gradients[0], gradients[1]);
    EXPECT_EQ(gradients[0], gradients[2]);
  }
}

// Each sequence by itself, both packed in either order, in pieces of the layer: what is dropped follows the sequence.
TEST(LoraStage, PackingAndChunksDropTheSame) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen3);
  const auto sequences = random_sequences({17, 6}, config.vocab_size, 9);
  const auto batch_of = [&](std::vector<size_t> members) {
    std::vector<std::vector<int32_t>> chosen;
    for (const size_t member : members) chosen.push_back(sequences[member]);
    MicroBatch batch = pack(chosen, count_targets(sequences));
    batch.sequence_ids.assign(members.begin(), members.end());
    batch.dropout_key = 11;
    return batch;
  };
  const auto gradients_of = [&](const std::vector<std::vector<size_t>>& batches, int64_t chunk) {
    StageOptions options = lora_model(config, 32, dropping(), Recompute::attention);
    options.layer_chunk = chunk;
    WholeLora<DenseAttention> whole(config, options);
    for (const auto& members : batches) whole.step(batch_of(members));
    return hf_gradients(whole.stage.parameters());
  };
  const Tensors expected = gradients_of({{0}, {1}}, 1000);
  EXPECT_LT(largest_relative_difference(gradients_of({{0, 1}}, 1000), expected), 1e-5);
  EXPECT_LT(largest_relative_difference(gradients_of({{1, 0}}, 1000), expected), 1e-5);
  EXPECT_LT(largest_relative_difference(gradients_of({{1, 0}}, 5), expected), 1e-5);
}

// Another step, another seed, another sequence: other elements. Validation drops none.
TEST(LoraStage, DropoutFollowsItsKeyAndStaysOutOfEvaluation) {
  const ModelConfig config = tiny_config(ModelConfig::Family::llama);
  MicroBatch batch = random_batch({20}, config.vocab_size, 9);
  WholeLora<> whole(config, lora_model(config, 32, dropping()));
  const auto loss = [&] {
    whole.step(batch);
    return whole.stage.loss(0).weighted;
  };
  const double first = loss();
  EXPECT_EQ(loss(), first);
  batch.dropout_key = 1;
  EXPECT_NE(loss(), first);
  batch.dropout_key = 0;
  batch.sequence_ids = {8};
  EXPECT_NE(loss(), first);
  WholeLora<> without(config, lora_model(config, 32, lora_of(2)));
  EXPECT_EQ(all_logits(whole.stage, whole.run.exec, batch), all_logits(without.stage, without.run.exec, batch));
}

// The gradient with dropout, by differences of the engine's own loss: the masks are the same at every evaluation.
TEST(LoraStage, GradientsWithDropoutMatchFiniteDifferences) {
  const ModelConfig config = tiny_config(ModelConfig::Family::qwen2);
  MicroBatch batch = random_batch({7, 4}, config.vocab_size, 3);
  batch.dropout_key = 2;
  WholeLora<> whole(config, lora_model(config, 16, dropping()));
  whole.step(batch);
  ParameterSet& parameters = whole.stage.parameters();
  const std::vector<float> gradients = host_values(parameters.gradients());
  double difference = 0, squares = 0;
  for (int i = 0; i < parameters.count(); ++i) {
    const Parameter& parameter = parameters.parameter(i);
    for (int64_t e = parameter.offset; e < parameter.offset + parameter.elements(); e += 5) {
      float& value = parameters.values().f32()[e];
      const float original = value;
      const auto loss_at = [&](float at) {
        value = at;
        whole.step(batch);
        return whole.stage.loss(0).weighted;
      };
      const double h = 2e-3, above = loss_at(original + static_cast<float>(h)),
                   below = loss_at(original - static_cast<float>(h));
      value = original;
      const double expected = (above - below) / (2 * h), got = gradients[static_cast<size_t>(e)];
      difference += (got - expected) * (got - expected);
      squares += expected * expected;
    }
  }
  EXPECT_GT(squares, 0);
  EXPECT_LT(std::sqrt(difference / squares), 2e-3);
}

TEST(LoraStage, FrozenWeightsTakeNoGradientsAndWhatIsUsedIsPlanned) {
  for (const Recompute level : kLevels) {
    ModelConfig config = tiny_config(ModelConfig::Family::qwen3);
    config.layers = 3;
    StageOptions options = lora_model(config, 50, dropping(), level);
    options.layer_chunk = 20;
    NaiveAttention attention;
    Stage stage(config, options, attention, 2);
    stage.initialize(1);
    TestExec run;
    const MicroBatch batch = random_batch({30, 20}, config.vocab_size, 1);
    stage.forward(run.exec, batch, 0, {});
    stage.backward(run.exec, batch, 0, {});
    std::map<std::string, int64_t> planned;
    const MemoryPlan plan = Stage::memory_plan(config, options, attention, 2), used = stage.memory_used();
    for (const auto& item : plan.items()) planned[item.name] = item.bytes;
    for (const auto& item : used.items()) EXPECT_LE(item.bytes, planned.at(item.name)) << item.name;
    EXPECT_EQ(planned["gradients"], Arena::rounded(stage.parameters().flat_bytes()));
    EXPECT_EQ(planned["frozen weights"], Arena::rounded(stage.frozen_parameters().flat_bytes()));
    EXPECT_GT(stage.frozen_parameters().elements(), stage.parameters().elements());
    EXPECT_FALSE(stage.frozen_parameters().has_gradients());
  }
}

}  // namespace
}  // namespace sb::test
