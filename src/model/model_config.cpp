#include "model/model_config.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/errors.h"
#include "core/files/regular_file.h"
#include "core/log.h"
#include "model/rope_json.h"

namespace sb {

namespace {

using nlohmann::ordered_json;

struct FamilyName {
  ModelConfig::Family family;
  const char* model_type;
  const char* architecture;
};
constexpr FamilyName kFamilies[] = {
    {ModelConfig::Family::qwen2, "qwen2", "Qwen2ForCausalLM"},
    {ModelConfig::Family::llama, "llama", "LlamaForCausalLM"},
    {ModelConfig::Family::qwen3, "qwen3", "Qwen3ForCausalLM"},
};

const FamilyName& names_of(ModelConfig::Family family) {
  return *std::find_if(std::begin(kFamilies), std::end(kFamilies),
                       [&](const FamilyName& known) { return known.family == family; });
}

ordered_json parse_object(const std::string& text, const std::string& where) {
  constexpr int kMaxDepth = 32;  // writing it again walks the nesting on the stack
  const auto check_depth = [&](int depth, ordered_json::parse_event_t, ordered_json&) {
    SB_USER_CHECK(depth <= kMaxDepth, "{}: nested deeper than {} levels", where, kMaxDepth);
    return true;
  };
  try {
    ordered_json parsed = ordered_json::parse(text, check_depth);
    SB_USER_CHECK(parsed.is_object(), "{}: not a JSON object", where);
    return parsed;
  } catch (const ordered_json::exception& error) {
    throw UserError("{}: not valid JSON: {}", where, std::string_view(error.what()).substr(0, 200));
  }
}

ModelConfig::Family read_family(const JsonObject& json) {
  const std::string model_type = json.text("model_type");
  const auto* known = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                   [&](const FamilyName& name) { return model_type == name.model_type; });
  SB_USER_CHECK(known != std::end(kFamilies), "{}: model_type '{}' is not supported; supported are qwen2, llama, qwen3",
                json.where(), model_type);
  if (json.has("architectures")) {
    const ordered_json& list = json.at("architectures");
    SB_USER_CHECK(list.is_array() && list.size() == 1 && list[0].is_string(),
                  "{}: architectures must be a list of one name", json.where());
    SB_USER_CHECK(list[0] == known->architecture,
                  "{}: architecture '{}' is not supported; with model_type '{}' it is {}", json.where(),
                  list[0].get<std::string>(), model_type, known->architecture);
  }
  return known->family;
}

void refuse_unsupported(const JsonObject& json, const ModelConfig& config) {
  const std::string activation = json.text_or("hidden_act", "silu");
  SB_USER_CHECK(activation == "silu", "{}: hidden_act '{}' is not supported, only silu is", json.where(), activation);
  SB_USER_CHECK(!json.has("quantization_config"),
                "{}: quantization_config: quantized checkpoints are not supported; use the full-precision one",
                json.where());
  SB_USER_CHECK(!json.flag_or("mlp_bias", false), "{}: mlp_bias is not supported", json.where());
  SB_USER_CHECK(json.number_or("partial_rotary_factor", 1.0) == 1.0, "{}: partial_rotary_factor is not supported",
                json.where());
  if (json.number_or("attention_dropout", 0.0) != 0.0) {
    log::warning("{}: attention_dropout is not applied", json.where());
  }
  // Sliding windows: newer files list the type of every layer, older ones give a first layer.
  if (json.has("layer_types")) {
    const ordered_json& types = json.at("layer_types");
    SB_USER_CHECK(types.is_array() && std::ssize(types) == config.layers, "{}: layer_types must list {} layers",
                  json.where(), config.layers);
    for (const ordered_json& type : types) {
      SB_USER_CHECK(type == "full_attention", "{}: layer_types: {} is not supported, only \"full_attention\" is",
                    json.where(), type.dump());
    }
  } else if (json.flag_or("use_sliding_window", false) && !json.is_null("sliding_window")) {
    // What `transformers` takes for keys that are missing.
    const int64_t first = json.integer_or("max_window_layers", 28), window = json.integer_or("sliding_window", 4096);
    SB_USER_CHECK(first >= config.layers,
                  "{}: use_sliding_window with sliding_window {} on the layers from {} is not supported; "
                  "set use_sliding_window to false to train with full attention",
                  json.where(), window, first);
  }
}

std::vector<int32_t> read_eos(const JsonObject& json) {
  if (!json.has("eos_token_id")) return {};
  const ordered_json& value = json.at("eos_token_id");
  std::vector<int32_t> ids;
  for (const ordered_json& id : value.is_array() ? value : ordered_json::array({value})) {
    SB_USER_CHECK(id.is_number_integer() && id >= 0 && id <= INT32_MAX,
                  "{}: eos_token_id must be a token id or a list of them", json.where());
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

ModelConfig config_from_json(const ordered_json& parsed, const std::string& where) {
  const JsonObject json(parsed, where);
  ModelConfig config;
  config.family = read_family(json);
  config.vocab_size = json.integer("vocab_size");
  config.hidden_size = json.integer("hidden_size");
  config.intermediate_size = json.integer("intermediate_size");
  config.layers = json.small_integer("num_hidden_layers");
  config.heads = json.small_integer("num_attention_heads");
  config.kv_heads = json.has("num_key_value_heads") ? json.small_integer("num_key_value_heads") : config.heads;
  // What `transformers` takes where it is missing.
  config.max_position_embeddings =
      json.integer_or("max_position_embeddings", config.family == ModelConfig::Family::llama ? 2048 : 32768);
  SB_USER_CHECK(config.max_position_embeddings > 0, "{}: max_position_embeddings must be positive", where);
  SB_USER_CHECK(config.heads > 0, "{}: num_attention_heads must be positive", where);
  if (json.has("head_dim")) {
    config.head_dim = json.small_integer("head_dim");
  } else {  // Qwen3's default in transformers does not follow from the other sizes
    config.head_dim = config.family == ModelConfig::Family::qwen3
                          ? 128
                          : static_cast<int>(std::min<int64_t>(config.hidden_size / config.heads, INT32_MAX));
  }
  config.rms_norm_eps = static_cast<float>(json.number_or("rms_norm_eps", 1e-6));
  config.initializer_range = static_cast<float>(json.number_or("initializer_range", 0.02));
  config.tie_word_embeddings = json.flag_or("tie_word_embeddings", false);
  const bool attention_bias = json.flag_or("attention_bias", false);
  config.qkv_bias = config.family == ModelConfig::Family::qwen2 || attention_bias;
  config.output_bias = config.family != ModelConfig::Family::qwen2 && attention_bias;
  config.qk_norm = config.family == ModelConfig::Family::qwen3;
  config.eos_token_ids = read_eos(json);
  config.rope = read_rope(json, config.max_position_embeddings);
  check_model_config(config, where);
  refuse_unsupported(json, config);
  return config;
}

}  // namespace

ModelConfig read_model_config(const std::filesystem::path& path) {
  SB_USER_CHECK(std::filesystem::exists(path) || !std::filesystem::exists(path.parent_path() / "adapter_config.json"),
                "{0}: a LoRA adapter (adapter_config.json), not a whole model; put it into its base model first, "
                "`sparsebalance merge BASE {0} NEW`, and name that folder, or name BASE and give the adapter beside it "
                "(eval: --adapter, train: lora.adapter)",
                path.parent_path().string());
  std::error_code unknown;
  SB_USER_CHECK(std::filesystem::exists(path, unknown) || unknown,
                "{}: not there; a Hugging Face model directory has a config.json (models are not downloaded by name: "
                "`hf download NAME --local-dir DIR` does that)",
                path.string());
  constexpr int64_t kMostBytes = int64_t{16} << 20;
  return parse_model_config(read_regular_file(path, kMostBytes), path.string());
}

ModelConfig parse_model_config(const std::string& text, const std::string& where) {
  ModelConfig config = config_from_json(parse_object(text, where), where);
  config.source_json = text;
  return config;
}

int64_t longest_sequence(const ModelConfig& config) {
  // Not by the factor of llama3: Llama-3.2 has 32 times 8,192 and is meant for 131,072.
  if (config.rope.type != RopeConfig::Type::yarn) return config.max_position_embeddings;
  const double scaled = static_cast<double>(config.rope.original_max_position_embeddings) * config.rope.factor;
  return std::max<int64_t>(config.max_position_embeddings, std::llround(scaled));
}

ModelConfig rank_config(const ModelConfig& config, const TensorShare& share) {
  SB_CHECK(config.heads % share.ranks == 0 && config.intermediate_size % share.ranks == 0 &&
               (config.kv_heads % share.ranks == 0 || share.ranks % config.kv_heads == 0),
           "{} heads, {} key/value heads and {} channels for {} ranks", config.heads, config.kv_heads,
           config.intermediate_size, share.ranks);
  ModelConfig own = config;
  own.heads /= share.ranks;
  own.kv_heads = std::max(1, own.kv_heads / share.ranks);
  own.intermediate_size /= share.ranks;
  return own;
}

void check_model_config(const ModelConfig& config, const std::string& where) {
  constexpr int64_t kLimit = int64_t{1} << 31;  // keeps every product of two sizes inside 64 bits
  const auto positive = [&](int64_t value, const char* key) {
    SB_USER_CHECK(0 < value && value < kLimit, "{}: {} must be positive and below 2^31, got {}", where, key, value);
  };
  positive(config.vocab_size, "vocab_size");
  positive(config.hidden_size, "hidden_size");
  positive(config.intermediate_size, "intermediate_size");
  positive(config.layers, "num_hidden_layers");
  // Their parameters are listed before the memory that they take is known.
  constexpr int kMostLayers = 4096;
  SB_USER_CHECK(config.layers <= kMostLayers, "{}: num_hidden_layers is {}; at most {} work", where, config.layers,
                kMostLayers);
  positive(config.heads, "num_attention_heads");
  positive(config.kv_heads, "num_key_value_heads");
  positive(config.head_dim, "head_dim");
  SB_USER_CHECK(config.heads % config.kv_heads == 0,
                "{}: num_attention_heads {} must be a multiple of num_key_value_heads {}", where, config.heads,
                config.kv_heads);
  SB_USER_CHECK(config.head_dim % 2 == 0, "{}: head_dim must be even, got {}", where, config.head_dim);
  positive((int64_t{config.heads} + 2 * int64_t{config.kv_heads}) * config.head_dim, "the width of q, k and v");
  SB_USER_CHECK(config.rms_norm_eps > 0 && std::isfinite(config.rms_norm_eps),
                "{}: rms_norm_eps must be positive, got {}", where, config.rms_norm_eps);
  SB_USER_CHECK(config.initializer_range > 0 && std::isfinite(config.initializer_range),
                "{}: initializer_range must be positive, got {}", where, config.initializer_range);
  check_rope(config.rope, where);
}

std::string write_model_config(const ModelConfig& config, const std::string& torch_dtype) {
  const bool scratch = config.source_json.empty();
  ordered_json json = scratch ? ordered_json::object() : parse_object(config.source_json, "config.json");
  // Only what differs is touched, so that the source's numbers keep their spelling.
  std::optional<ModelConfig> source;
  if (!scratch) source = config_from_json(json, "config.json");
  const auto put = [&](const char* key, auto ModelConfig::*field) {
    if (!source || (*source).*field != config.*field) json[key] = config.*field;
  };
  // The shortest decimal that reads back as this float.
  const auto put_float = [&](const char* key, float ModelConfig::*field) {
    if (!source || (*source).*field != config.*field) json[key] = std::stod(fmt::format("{}", config.*field));
  };

  const FamilyName& names = names_of(config.family);
  if (!json.contains("architectures") || json["architectures"].is_null()) {
    json["architectures"] = ordered_json::array({names.architecture});
  }
  json["model_type"] = names.model_type;
  put("vocab_size", &ModelConfig::vocab_size);
  put("hidden_size", &ModelConfig::hidden_size);
  put("intermediate_size", &ModelConfig::intermediate_size);
  put("num_hidden_layers", &ModelConfig::layers);
  put("num_attention_heads", &ModelConfig::heads);
  put("num_key_value_heads", &ModelConfig::kv_heads);
  put("head_dim", &ModelConfig::head_dim);
  put("max_position_embeddings", &ModelConfig::max_position_embeddings);
  put("tie_word_embeddings", &ModelConfig::tie_word_embeddings);
  put_float("rms_norm_eps", &ModelConfig::rms_norm_eps);
  put_float("initializer_range", &ModelConfig::initializer_range);
  if (config.family != ModelConfig::Family::qwen2) put("attention_bias", &ModelConfig::qkv_bias);
  if (scratch) {
    json["hidden_act"] = "silu";
    json["attention_dropout"] = 0.0;
    json["use_cache"] = true;
    if (config.family != ModelConfig::Family::llama) json["use_sliding_window"] = false;
  }
  if (!source || source->eos_token_ids != config.eos_token_ids) {
    const std::vector<int32_t>& eos = config.eos_token_ids;
    json["eos_token_id"] = eos.empty() ? ordered_json() : eos.size() == 1 ? ordered_json(eos[0]) : ordered_json(eos);
  }
  // Where yarn does not name its original length, that is max_position_embeddings: it has to be named when they change.
  const bool lengths_differ = source && source->max_position_embeddings != config.max_position_embeddings;
  if (!source || source->rope != config.rope || (lengths_differ && config.rope.type == RopeConfig::Type::yarn))
    write_rope(json, config.rope);

  const bool new_spelling = json.contains("rope_parameters");
  if (json.contains("dtype") || (new_spelling && !json.contains("torch_dtype"))) json["dtype"] = torch_dtype;
  if (json.contains("torch_dtype") || !new_spelling) json["torch_dtype"] = torch_dtype;
  return json.dump(2) + "\n";
}

}  // namespace sb
