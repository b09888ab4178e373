#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

namespace sb {

// The products of a layer that can have an adapter, as Hugging Face names them.
enum class LoraModule { q, k, v, o, gate, up, down };
inline constexpr int kLoraModules = 7;
// "q_proj"; and with the part of the layer it belongs to, "self_attn.q_proj".
std::string_view lora_module_name(LoraModule module);
std::string lora_module_path(LoraModule module);

// Low-rank adapters (LoRA): the model's own weights stay as they are, and of every product y = W·x that is a target
// y + scale · B·A·dropout(x) is computed, A [rank, in] and B [out, rank].
struct LoraConfig {
  int rank = 0;  // 0: no adapters, the whole model is trained
  double alpha = 16;
  double dropout = 0;
  bool rslora = false;
  std::array<bool, kLoraModules> targets = {true, true, true, true, true, true, true};
  // Parts of the model itself that are trained along.
  bool norms = false, embedding = false, head = false;

  bool enabled() const { return rank > 0; }
  bool is_target(LoraModule module) const { return targets[static_cast<size_t>(module)]; }
  bool trains_base() const { return norms || embedding || head; }
  // alpha / rank, with rslora alpha / sqrt(rank).
  double scale() const;
  std::vector<std::string> target_names() const;
  bool operator==(const LoraConfig&) const = default;
};

// What PEFT puts before the names of a model's tensors.
inline constexpr std::string_view kPeftPrefix = "base_model.model.";

}  // namespace sb
