#pragma once

#include <span>
#include <string>
#include <vector>

#include "plan/coverage/coverage.h"
#include "plan/latency/workload.h"

namespace sb {

// Budgets are chosen where the estimates promise most, so on average the choice disappoints. What a (sequence, layer)
// loses below the base budget therefore counts more than estimated, and what it gains above counts less. Both outlive
// this.
class CautiousCoverage final : public CoverageModel {
 public:
  static constexpr double kCaution = 0.15;

  CautiousCoverage(const CoverageModel& inner, const AttentionSpec& spec) : inner_(inner), spec_(spec) {}
  std::string name() const override { return inner_.name(); }
  bool uniform_layers() const override { return inner_.uniform_layers(); }
  void evaluate(const Sequence& sequence, int layer, std::span<const int32_t> budgets,
                std::span<const double> log_budgets, std::span<double> out) const override;
  void evaluate_layers(const Sequence& sequence, int layers, std::span<const int32_t> budgets,
                       std::span<const double> log_budgets, std::span<double> out) const override;
  void evaluate_each(const Sequence& sequence, std::span<const int32_t> budgets, std::span<const double> log_budgets,
                     std::span<double> out) const override;

 private:
  std::vector<double> at_base(const Sequence& sequence, size_t layers) const;

  const CoverageModel& inner_;
  const AttentionSpec& spec_;
};

}  // namespace sb
