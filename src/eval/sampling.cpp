#include "eval/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "core/errors.h"
#include "core/random.h"

namespace sb {

int32_t sample_token(std::span<const float> logits, const SamplingOptions& options, uint64_t stream,
                     uint64_t position) {
  SB_CHECK(!logits.empty(), "no logits");
  for (const float logit : logits)
    SB_USER_CHECK(!std::isnan(logit), "the model's logits are NaN: its weights are damaged or have diverged");
  const auto best = std::max_element(logits.begin(), logits.end());
  if (options.temperature <= 0) return static_cast<int32_t>(best - logits.begin());

  std::vector<double> weight(logits.size());
  double total = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    weight[i] = std::exp((static_cast<double>(logits[i]) - *best) / options.temperature);
    total += weight[i];
  }
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  size_t kept = order.size();
  if (options.top_p < 1) {
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return weight[a] > weight[b]; });
    double held = 0;
    kept = 0;
    do held += weight[order[kept++]];
    while (kept < order.size() && held < options.top_p * total);
    total = held;
  }
  double left = Random(options.seed, stream, 2 * position).uniform() * total;
  for (size_t i = 0; i < kept; ++i) {
    left -= weight[order[i]];
    if (left < 0) return order[i];
  }
  return order[kept - 1];
}

}  // namespace sb
