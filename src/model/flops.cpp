#include "model/flops.h"

namespace sb {

namespace {

// Elements of the adapters' matrices.
double adapter_elements(const ModelConfig& config, const LoraConfig& lora) {
  const auto hidden = static_cast<double>(config.hidden_size), inner = static_cast<double>(config.intermediate_size);
  const double query = static_cast<double>(config.head_dim) * config.heads,
               key = static_cast<double>(config.head_dim) * config.kv_heads;
  // In plus out of every module, in the order of LoraModule.
  const double widths[kLoraModules] = {hidden + query, hidden + key,   hidden + key,  query + hidden,
                                       hidden + inner, hidden + inner, inner + hidden};
  double sum = 0;
  for (int i = 0; i < kLoraModules; ++i)
    if (lora.targets[static_cast<size_t>(i)]) sum += widths[i];
  return config.layers * lora.rank * sum;
}

}  // namespace

double training_flops(const ModelConfig& config, std::span<const int64_t> lengths, double density,
                      const LoraConfig& lora) {
  const auto hidden = static_cast<double>(config.hidden_size);
  const double width = static_cast<double>(config.head_dim) * config.heads;
  const double qkv_width = static_cast<double>(config.head_dim) * (config.heads + 2 * config.kv_heads);
  const double layer = hidden * (qkv_width + width + 3.0 * static_cast<double>(config.intermediate_size));
  const double matrices = config.layers * layer + hidden * static_cast<double>(config.vocab_size);
  double tokens = 0, pairs = 0;
  for (const int64_t length : lengths) {
    const auto n = static_cast<double>(length);
    tokens += n;
    pairs += n * (n + 1) / 2;
  }
  const double attention = 3.0 * 4.0 * width * config.layers * pairs * density;
  if (!lora.enabled()) return 3.0 * 2.0 * matrices * tokens + attention;
  // Forward and the gradient of the input, and where it is trained that of the head itself.
  const double frozen = 2.0 * 2.0 * matrices * tokens, adapters = 3.0 * 2.0 * adapter_elements(config, lora) * tokens;
  const bool trains_head = config.tie_word_embeddings ? lora.embedding : lora.head;
  const double head = trains_head ? 2.0 * hidden * static_cast<double>(config.vocab_size) * tokens : 0.0;
  return frozen + adapters + head + attention;
}

double peak_bf16_flops(std::string_view device_name) {
  // Names as the driver gives them. The PCIe and NVL models are other chips: not known.
  const auto is = [&](std::string_view prefix) { return device_name.starts_with(prefix); };
  if (is("NVIDIA H200 NVL") || is("NVIDIA H100 PCIe") || is("NVIDIA H100 NVL")) return 0;
  if (is("NVIDIA H200") || is("NVIDIA H100")) return 989e12;
  if (is("NVIDIA A100")) return 312e12;
  if (device_name == "NVIDIA H20" || is("NVIDIA H20 ") || is("NVIDIA H20-")) return 148e12;  // not H200
  return 0;
}

}  // namespace sb
