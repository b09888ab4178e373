#pragma once

#include <cstdint>

#include "model/model_config.h"

namespace sb {

// Widths of a layer's tensors, in columns per token.
struct LayerWidths {
  int64_t hidden, query, key, qkv, intermediate, heads, kv_heads;

  explicit LayerWidths(const ModelConfig& config)
      : hidden(config.hidden_size),
        query(int64_t{config.heads} * config.head_dim),
        key(int64_t{config.kv_heads} * config.head_dim),
        qkv(query + 2 * key),
        intermediate(config.intermediate_size),
        heads(config.heads),
        kv_heads(config.kv_heads) {}
};

}  // namespace sb
