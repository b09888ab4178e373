#pragma once

#include <fmt/format.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/random.h"
#include "data/sequence_source.h"

namespace sb::bench {

// The models that benchmarks of balancing train, from random weights.
struct BenchModel {
  const char* name;
  int layers, hidden, intermediate, heads, kv_heads;  // heads of 64
};

inline BenchModel find_model(const std::string& name) {
  for (const BenchModel& model : {BenchModel{"narrow", 2, 64, 64, 1, 1}, BenchModel{"wide", 4, 512, 1408, 8, 2}})
    if (model.name == name) return model;
  throw UserError("--model: {} is none; narrow or wide", name);
}

// model.init of run.yaml. Weights that make attention's scores as wide at every width: a standard deviation of 4.
inline std::string model_yaml(const BenchModel& model) {
  return fmt::format(
      "{{ model_type: llama, vocab_size: 1024, hidden_size: {}, intermediate_size: {}, num_hidden_layers: {}, "
      "num_attention_heads: {}, num_key_value_heads: {}, head_dim: 64, initializer_range: {} }}",
      model.hidden, model.intermediate, model.layers, model.heads, model.kv_heads, 2 / std::sqrt(model.hidden));
}

// Segments of a sequence draw from two tokens each, so that key blocks differ and attention has something to choose.
inline TokenSequence drawn_sequence(size_t number, int64_t length) {
  Random random(1000 + number);
  TokenSequence sequence;
  sequence.id = static_cast<int64_t>(number);
  constexpr int64_t kSegment = 192, kWords = 2;
  std::vector<int32_t> words(kWords);
  for (int64_t t = 0; t < length; ++t) {
    if (t % kSegment == 0)
      for (int32_t& word : words) word = static_cast<int32_t>(random.below(1024));
    sequence.tokens.push_back(words[random.below(kWords)]);
  }
  sequence.labels.assign(sequence.tokens.begin() + 1, sequence.tokens.end());
  sequence.labels.push_back(kIgnoredLabel);
  return sequence;
}

}  // namespace sb::bench
