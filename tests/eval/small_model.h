#pragma once

#include <cstdint>
#include <vector>

#include "core/random.h"
#include "model/model_config.h"

namespace sb {

inline ModelConfig small_model(int head_dim) {
  ModelConfig config;
  config.family = ModelConfig::Family::qwen2;
  config.vocab_size = 61;
  config.hidden_size = 32;
  config.intermediate_size = 48;
  config.layers = 2;
  config.heads = 4;
  config.kv_heads = 2;
  config.head_dim = head_dim;
  config.qkv_bias = true;
  config.initializer_range = 0.3f;  // large, so that attention is far from uniform
  config.max_position_embeddings = 1024;
  config.tie_word_embeddings = true;
  return config;
}

// Of the small model's vocabulary.
inline std::vector<int32_t> random_tokens(int64_t length, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(length));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(61));
  return tokens;
}

}  // namespace sb
