#pragma once

#include <filesystem>
#include <string>

#include "model/lora/lora_config.h"
#include "model/model_config.h"

namespace sb {

inline constexpr const char* kAdapterConfigFile = "adapter_config.json";
inline constexpr const char* kAdapterFile = "adapter_model.safetensors";

// adapter_config.json as PEFT writes it. What it asks for and we cannot do (DoRA, other ranks in some layers, modules
// to save that are not norms, embedding or head, fields that nobody knows) is refused by name: passing over it would
// give another model.
LoraConfig read_peft_config(const std::filesystem::path& directory, const ModelConfig& model);

// `base`: where the model is, for those who load the adapter; empty: not known.
std::string write_peft_config(const LoraConfig& lora, const ModelConfig& model, const std::string& base);

// A target by its name ("q_proj", "self_attn.q_proj"); kLoraModules: none of a model's is called so.
int find_lora_module(std::string_view name);

}  // namespace sb
