#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plan/latency/workload.h"

namespace sb {

// No model has as many; what a damaged file says must not decide how much memory is taken.
inline constexpr int64_t kMostLayers = 1 << 14;

// Share of the attention mass that k keys per query hold: C(sequence, layer, k), rising in k, 1 at k ≥ tokens.
class CoverageModel {
 public:
  virtual ~CoverageModel() = default;
  virtual std::string name() const = 0;
  // Every layer has the same curve, so that one evaluation serves all.
  virtual bool uniform_layers() const = 0;
  // C at ascending budgets; budgets may reach past the length. `log_budgets` are their logarithms, computed once for
  // many sequences.
  virtual void evaluate(const Sequence& sequence, int layer, std::span<const int32_t> budgets,
                        std::span<const double> log_budgets, std::span<double> out) const = 0;
  // The same for every one of `layers` layers: out[layer · budgets + i]. One call per sequence instead of one per
  // layer.
  virtual void evaluate_layers(const Sequence& sequence, int layers, std::span<const int32_t> budgets,
                               std::span<const double> log_budgets, std::span<double> out) const;
  // Every layer at a budget of its own: out[layer].
  virtual void evaluate_each(const Sequence& sequence, std::span<const int32_t> budgets,
                             std::span<const double> log_budgets, std::span<double> out) const;
  // One value.
  double at(const Sequence& sequence, int layer, int64_t budget) const;
};

// C(n, k) = (k / n)^γ in every layer.
std::unique_ptr<CoverageModel> power_coverage(double gamma);
// γ rises linearly over the layers from 0.10 to 0.40, times a factor in 0.7 … 1.3 hashed from the sequence id.
std::unique_ptr<CoverageModel> layered_coverage(int layers);

// Curves by layer and length class, from a coverage.json (docs/balancing.md has the format).
struct CoverageTable {
  static constexpr int kVersion = 1;
  int layers = 0;
  std::vector<int64_t> length_classes;  // largest length of each class, ascending; longer sequences use the last
  std::vector<int64_t> budgets;         // ascending
  // [layer][class][budget], rising along the budgets, 0 … 1.
  std::vector<std::vector<std::vector<double>>> coverage;
  std::vector<int> assumed_layers;  // ascending; nothing was measured in these, their curves are a guess
};
CoverageTable parse_coverage(const std::string& json, const std::string& where);
std::unique_ptr<CoverageModel> table_coverage(CoverageTable table, std::string name);

// "power:0.22", "layered" or the path of a coverage.json.
std::unique_ptr<CoverageModel> find_coverage(const std::string& name_or_path, int layers);

}  // namespace sb
