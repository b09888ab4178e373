#include "train/flops.h"

namespace sb {

double training_flops(const ModelConfig& config, std::span<const int64_t> lengths) {
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
  const double forward = 2.0 * matrices * tokens + 4.0 * width * config.layers * pairs;
  return 3.0 * forward;
}

}  // namespace sb
