#include "plan/coverage/cautious_coverage.h"

#include <cmath>

namespace sb {
namespace {

double cautious(const Sequence& sequence, int64_t budget, double base, double value) {
  if (budget >= sequence.tokens) return value;  // dense is no estimate
  const double difference = value - base;
  return base + difference * (difference < 0 ? 1 + CautiousCoverage::kCaution : 1 - CautiousCoverage::kCaution);
}

}  // namespace

void CautiousCoverage::evaluate(const Sequence& sequence, int layer, std::span<const int32_t> budgets,
                                std::span<const double> log_budgets, std::span<double> out) const {
  inner_.evaluate(sequence, layer, budgets, log_budgets, out);
  if (spec_.always_dense(sequence.tokens)) return;
  const double base = inner_.at(sequence, layer, spec_.budget);
  for (size_t i = 0; i < budgets.size(); ++i) out[i] = cautious(sequence, budgets[i], base, out[i]);
}

void CautiousCoverage::evaluate_layers(const Sequence& sequence, int layers, std::span<const int32_t> budgets,
                                       std::span<const double> log_budgets, std::span<double> out) const {
  inner_.evaluate_layers(sequence, layers, budgets, log_budgets, out);
  if (spec_.always_dense(sequence.tokens)) return;
  const std::vector<double> base = at_base(sequence, static_cast<size_t>(layers));
  for (size_t l = 0; l < base.size(); ++l)
    for (size_t i = 0; i < budgets.size(); ++i) {
      double& value = out[l * budgets.size() + i];
      value = cautious(sequence, budgets[i], base[l], value);
    }
}

void CautiousCoverage::evaluate_each(const Sequence& sequence, std::span<const int32_t> budgets,
                                     std::span<const double> log_budgets, std::span<double> out) const {
  inner_.evaluate_each(sequence, budgets, log_budgets, out);
  if (spec_.always_dense(sequence.tokens)) return;
  const std::vector<double> base = at_base(sequence, budgets.size());
  for (size_t l = 0; l < base.size(); ++l) out[l] = cautious(sequence, budgets[l], base[l], out[l]);
}

std::vector<double> CautiousCoverage::at_base(const Sequence& sequence, size_t layers) const {
  const std::vector<int32_t> budgets(layers, static_cast<int32_t>(spec_.budget));
  const std::vector<double> logs(layers, std::log(static_cast<double>(spec_.budget)));
  std::vector<double> base(layers);
  inner_.evaluate_each(sequence, budgets, logs, base);
  return base;
}

}  // namespace sb
