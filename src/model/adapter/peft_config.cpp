#include "model/adapter/peft_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "core/errors.h"
#include "core/files/regular_file.h"
#include "core/utf8.h"

namespace sb {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMostRank = 1 << 16;

std::string value_text(const Json& value) {
  return value.is_structured() ? value.type_name() : printable(value.dump(), 80);
}

// Whether a field says that what it names is not used.
bool says_nothing(const Json& value) {
  return value.is_null() || value == false || ((value.is_array() || value.is_object()) && value.empty());
}

// The fields of one file, each of which is asked for once; what is left is not known.
class Fields {
 public:
  explicit Fields(const std::filesystem::path& file) : file_(file) {
    const std::string text = read_regular_file(file);
    try {
      object_ = Json::parse(text, [&](int depth, Json::parse_event_t, Json&) {
        SB_USER_CHECK(depth <= 8, "{}: nested too deep for an adapter's configuration", file.string());
        return true;
      });
    } catch (const Json::exception& error) {
      throw UserError("{}: not valid JSON: {}", file.string(), printable(error.what(), 200));
    }
    SB_USER_CHECK(object_.is_object(), "{}: not a JSON object", file.string());
    for (const auto& [name, value] : object_.items()) left_.insert(name);
  }

  Json take(const std::string& name) {
    left_.erase(name);
    return object_.contains(name) ? object_[name] : Json();
  }
  double number(const std::string& name, double standard) {
    const Json value = take(name);
    if (value.is_null()) return standard;
    SB_USER_CHECK(value.is_number(), "{}: {}: a number is expected, this is {}", file_.string(), name,
                  value_text(value));
    return value.get<double>();
  }
  bool flag(const std::string& name) {
    const Json value = take(name);
    SB_USER_CHECK(value.is_null() || value.is_boolean(), "{}: {}: true or false is expected, this is {}",
                  file_.string(), name, value_text(value));
    return value == true;
  }
  std::vector<std::string> texts(const std::string& name) {
    const Json value = take(name);
    if (value.is_null()) return {};
    SB_USER_CHECK(value.is_array() && std::ranges::all_of(value, [](const Json& item) { return item.is_string(); }),
                  "{}: {}: a list of names is expected, this is {}", file_.string(), name, value_text(value));
    return value.get<std::vector<std::string>>();
  }
  // What we do not have may be there as long as it is not used; `as` is what not using it looks like besides.
  void refuse(const std::string& name, const std::string& why, const Json& as = nullptr) {
    const Json value = take(name);
    SB_USER_CHECK(says_nothing(value) || value == as, "{}: {}: {}: {}", file_.string(), name, value_text(value), why);
  }
  void refuse_rest() {
    for (const std::string& name : left_)
      SB_USER_CHECK(says_nothing(object_[name]),
                    "{}: {}: {}: a field that this version does not know and that may change what the adapter "
                    "computes; train or convert the adapter without it",
                    file_.string(), printable(name, 80), value_text(object_[name]));
  }
  const std::filesystem::path& file() const { return file_; }

 private:
  std::filesystem::path file_;
  Json object_;
  std::set<std::string> left_;
};

void read_targets(Fields& fields, LoraConfig& lora) {
  const Json value = fields.take("target_modules");
  lora.targets = {};
  if (value == "all-linear") return lora.targets.fill(true);
  SB_USER_CHECK(value.is_array() && !value.empty(),
                "{}: target_modules: a list of names is expected, this is {}; patterns are not read",
                fields.file().string(), value_text(value));
  for (const Json& name : value) {
    const int module = name.is_string() ? find_lora_module(name.get<std::string>()) : kLoraModules;
    SB_USER_CHECK(module < kLoraModules, "{}: target_modules: '{}' is none of {}", fields.file().string(),
                  name.is_string() ? printable(name.get<std::string>(), 80) : value_text(name),
                  fmt::join(LoraConfig().target_names(), ", "));
    lora.targets[static_cast<size_t>(module)] = true;
  }
}

// People, and some readers, expect 64 and not 64.0.
nlohmann::ordered_json whole_where_it_is(double number) {
  const auto whole = static_cast<int64_t>(number);
  if (static_cast<double>(whole) == number) return whole;
  return number;
}

// The norms of a layer and of the model, by the names of their modules.
std::vector<std::string> norm_names(const ModelConfig& model) {
  std::vector<std::string> names = {"input_layernorm", "post_attention_layernorm", "norm"};
  if (model.qk_norm) names.insert(names.end(), {"q_norm", "k_norm"});
  return names;
}

// PEFT saves every module whose name ends with one of these.
void read_modules_to_save(Fields& fields, const ModelConfig& model, LoraConfig& lora) {
  const std::vector<std::string> saved = fields.texts("modules_to_save"), norms = norm_names(model);
  const auto covered = [&](const std::string& module) {
    return std::ranges::any_of(saved, [&](const std::string& name) { return module.ends_with(name); });
  };
  lora.embedding = covered("embed_tokens");
  lora.head = covered("lm_head");
  lora.norms = std::ranges::any_of(norms, covered);
  for (const std::string& name : saved) {
    const auto ends = [&](const std::string& module) { return module.ends_with(name); };
    SB_USER_CHECK(ends("embed_tokens") || ends("lm_head") || std::ranges::any_of(norms, ends),
                  "{}: modules_to_save: '{}' cannot be honoured: only norms, embed_tokens and lm_head can be trained "
                  "beside adapters",
                  fields.file().string(), printable(name, 80));
  }
  for (const std::string& norm : norms)
    SB_USER_CHECK(!lora.norms || covered(norm),
                  "{}: modules_to_save: some norms but not '{}'; all norms are trained, or none",
                  fields.file().string(), norm);
  if (!model.tie_word_embeddings) return;
  SB_USER_CHECK(!lora.head || lora.embedding,
                "{}: modules_to_save: 'lm_head' without 'embed_tokens', but this model's head is its embedding",
                fields.file().string());
  lora.head = false;  // one tensor
}

}  // namespace

int find_lora_module(std::string_view name) {
  for (int i = 0; i < kLoraModules; ++i) {
    const auto module = static_cast<LoraModule>(i);
    if (name == lora_module_name(module) || name == lora_module_path(module)) return i;
  }
  return kLoraModules;
}

LoraConfig read_peft_config(const std::filesystem::path& directory, const ModelConfig& model) {
  Fields fields(directory / kAdapterConfigFile);
  const std::string where = fields.file().string();
  const Json type = fields.take("peft_type");
  SB_USER_CHECK(type == "LORA", "{}: peft_type: {}: only LORA adapters are read", where, value_text(type));
  LoraConfig lora;
  const double rank = fields.number("r", 0);
  SB_USER_CHECK(rank >= 1 && rank <= kMostRank && rank == static_cast<int>(rank),
                "{}: r: {}: the rank must be a whole number from 1 on", where, rank);
  lora.rank = static_cast<int>(rank);
  lora.alpha = fields.number("lora_alpha", 8);
  lora.dropout = fields.number("lora_dropout", 0);
  SB_USER_CHECK(0 <= lora.dropout && lora.dropout < 1, "{}: lora_dropout: {} is not in [0, 1)", where, lora.dropout);
  lora.rslora = fields.flag("use_rslora");
  read_targets(fields, lora);
  read_modules_to_save(fields, model, lora);

  fields.refuse("use_dora", "DoRA is not supported; train or convert the adapter without it");
  fields.refuse("bias", "trained biases are not supported", "none");
  fields.refuse("lora_bias", "adapters with a bias are not supported");
  fields.refuse("fan_in_fan_out", "transposed weights are not supported");
  fields.refuse("rank_pattern", "all modules must have the same rank");
  fields.refuse("alpha_pattern", "all modules must have the same alpha");
  fields.refuse("layers_to_transform", "all layers must have adapters");
  fields.refuse("layers_pattern", "all layers must have adapters");
  fields.refuse("layer_replication", "layers that are repeated are not supported");
  fields.refuse("exclude_modules", "modules are named by target_modules alone");
  fields.refuse("target_parameters", "adapters are of modules, not of single parameters");
  fields.refuse("trainable_token_indices", "single rows of the embedding cannot be trained");
  fields.refuse("use_qalora", "quantized adapters are not supported");
  // How it was initialised, by whom and for what does not matter once it has values.
  for (const char* name :
       {"base_model_name_or_path", "task_type", "inference_mode", "peft_version", "revision", "auto_mapping",
        "megatron_core", "qalora_group_size", "runtime_config", "ensure_weight_tying"})
    fields.take(name);
  const Json init = fields.take("init_lora_weights");
  SB_USER_CHECK(init.is_null() || init.is_boolean() || init == "gaussian" || init == "orthogonal",
                "{}: init_lora_weights: {}: such an initialisation changes the model's own weights, which are not in "
                "the adapter; convert it with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)",
                where, value_text(init));
  fields.refuse_rest();
  return lora;
}

std::string write_peft_config(const LoraConfig& lora, const ModelConfig& model, const std::string& base) {
  std::vector<std::string> saved;
  if (lora.norms) saved = norm_names(model);
  if (lora.embedding) saved.emplace_back("embed_tokens");
  if (lora.head || (lora.embedding && model.tie_word_embeddings)) saved.emplace_back("lm_head");
  const nlohmann::ordered_json config = {
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", base.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(base)},
      {"r", lora.rank},
      {"lora_alpha", whole_where_it_is(lora.alpha)},
      {"lora_dropout", lora.dropout},
      {"target_modules", lora.target_names()},
      {"bias", "none"},
      {"fan_in_fan_out", false},
      {"use_rslora", lora.rslora},
      {"use_dora", false},
      {"init_lora_weights", true},
      {"modules_to_save", saved.empty() ? nlohmann::ordered_json() : nlohmann::ordered_json(saved)},
      {"rank_pattern", nlohmann::ordered_json::object()},
      {"alpha_pattern", nlohmann::ordered_json::object()},
      {"inference_mode", true}};
  return config.dump(2) + "\n";
}

}  // namespace sb
