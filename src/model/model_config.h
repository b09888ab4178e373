#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "model/tensor_parallel/tensor_share.h"
#include "ops/rope.h"

namespace sb {

// A decoder-only transformer of the Qwen2 / Llama / Qwen3 family, as `config.json` describes it.
struct ModelConfig {
  enum class Family { qwen2, llama, qwen3 };
  Family family = Family::qwen2;
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int layers = 0;
  int heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  float rms_norm_eps = 1e-6f;
  float initializer_range = 0.02f;
  RopeConfig rope;
  int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;     // qwen2: always; llama: attention_bias
  bool output_bias = false;  // llama attention_bias covers o_proj too
  bool qk_norm = false;      // qwen3
  std::vector<int32_t> eos_token_ids;
  // config.json as read, so that writing keeps every key we do not know; empty for models made from scratch.
  std::string source_json;

  int group() const { return heads / kv_heads; }
};

// Both spellings (rope_theta + rope_scaling; rope_parameters). UserError names the file, the key and what is supported.
ModelConfig read_model_config(const std::filesystem::path& config_json);
ModelConfig parse_model_config(const std::string& json, const std::string& where);
// config.json for `transformers`: the source with our values put in where they differ, in the source's own spelling.
std::string write_model_config(const ModelConfig& config, const std::string& torch_dtype);
// The longest sequence the model is meant for: max_position_embeddings, or farther where its yarn scaling says so.
// Model cards tell to put the scaling into config.json by hand and to leave max_position_embeddings as it was.
int64_t longest_sequence(const ModelConfig& config);
// The model as a rank of those that share its products sees it: with its own heads and channels, but the whole
// vocabulary. Key/value heads that are fewer than the ranks are on several of them.
ModelConfig rank_config(const ModelConfig& config, const TensorShare& share);
// Sizes must be positive and fit each other; UserError otherwise.
void check_model_config(const ModelConfig& config, const std::string& where);

}  // namespace sb
