#include "model/lora/lora_config.h"

#include <cmath>

namespace sb {

std::string_view lora_module_name(LoraModule module) {
  constexpr std::string_view kNames[kLoraModules] = {"q_proj",    "k_proj",  "v_proj",   "o_proj",
                                                     "gate_proj", "up_proj", "down_proj"};
  return kNames[static_cast<size_t>(module)];
}

std::string lora_module_path(LoraModule module) {
  return (module <= LoraModule::o ? "self_attn." : "mlp.") + std::string(lora_module_name(module));
}

double LoraConfig::scale() const {
  return alpha / (rslora ? std::sqrt(static_cast<double>(rank)) : static_cast<double>(rank));
}

std::vector<std::string> LoraConfig::target_names() const {
  std::vector<std::string> names;
  for (int i = 0; i < kLoraModules; ++i)
    if (targets[static_cast<size_t>(i)]) names.emplace_back(lora_module_name(static_cast<LoraModule>(i)));
  return names;
}

}  // namespace sb
