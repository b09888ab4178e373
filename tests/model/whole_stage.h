#pragma once

#include <string>
#include <vector>

#include "core/random.h"
#include "model/stage/stage.h"
#include "tests/model/model_fixture.h"
#include "tests/model/naive_attention.h"

namespace sb::test {

inline constexpr Recompute kLevels[] = {Recompute::none, Recompute::attention, Recompute::layer};
inline constexpr ModelConfig::Family kFamilies[] = {ModelConfig::Family::qwen2, ModelConfig::Family::llama,
                                                    ModelConfig::Family::qwen3};

// Every parameter away from its initial value: norms not one, biases not zero.
inline void randomize(ParameterSet& parameters, uint64_t seed) {
  Random random(seed);
  for (int i = 0; i < parameters.count(); ++i) {
    const TensorView value = parameters.value(i);
    const double offset = parameters.parameter(i).name.find("norm") != std::string::npos ? 1.0 : 0.0;
    for (int64_t e = 0; e < value.elements(); ++e) value.f32()[e] = static_cast<float>(offset + 0.3 * random.normal());
  }
}

inline MicroBatch random_batch(const std::vector<int64_t>& lengths, int64_t vocabulary, uint64_t seed) {
  const auto sequences = random_sequences(lengths, vocabulary, seed);
  return pack(sequences, count_targets(sequences));
}

// A stage with the whole model, random parameters and everything it needs.
template <typename AttentionType = NaiveAttention>
struct Whole {
  Whole(const ModelConfig& config, const StageOptions& options) : stage(config, options, attention, 2) {
    randomize(stage.parameters(), 5);
  }
  void step(const MicroBatch& batch, int slot = 0) {
    stage.forward(run.exec, batch, slot, {});
    stage.backward(run.exec, batch, slot, {});
  }
  TestExec run;
  AttentionType attention;
  Stage stage;
};

}  // namespace sb::test
