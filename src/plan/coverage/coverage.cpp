#include "plan/coverage/coverage.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "core/errors.h"
#include "core/files/regular_file.h"
#include "core/log.h"
#include "plan/schedule/vector_kernels.h"

namespace sb {
namespace {

// Uniform in [0, 1) from an id (splitmix64's finaliser).
double hashed_uniform(int64_t id) {
  uint64_t z = static_cast<uint64_t>(id) + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-53;
}

// The logarithm of (k / n)^γ, 0 where k ≥ n; no smaller than exp_all takes.
double log_power(double gamma, double log_budget, double log_tokens) {
  return std::max(-700.0, gamma * std::min(0.0, log_budget - log_tokens));
}

void power_curve(double gamma, int64_t tokens, std::span<const double> log_budgets, std::span<double> out) {
  const double log_tokens = std::log(static_cast<double>(tokens));
  for (size_t i = 0; i < log_budgets.size(); ++i) out[i] = log_power(gamma, log_budgets[i], log_tokens);
  exp_all(out.data(), log_budgets.size());
}

class PowerCoverage final : public CoverageModel {
 public:
  explicit PowerCoverage(double gamma) : gamma_(gamma) {}
  std::string name() const override { return fmt::format("power:{}", gamma_); }
  bool uniform_layers() const override { return true; }
  void evaluate(const Sequence& sequence, int, std::span<const int32_t>, std::span<const double> log_budgets,
                std::span<double> out) const override {
    power_curve(gamma_, sequence.tokens, log_budgets, out);
  }
  void evaluate_each(const Sequence& sequence, std::span<const int32_t>, std::span<const double> log_budgets,
                     std::span<double> out) const override {
    power_curve(gamma_, sequence.tokens, log_budgets, out);
  }

 private:
  double gamma_;
};

class LayeredCoverage final : public CoverageModel {
 public:
  explicit LayeredCoverage(int layers) : layers_(layers) {}
  std::string name() const override { return "layered"; }
  bool uniform_layers() const override { return false; }
  void evaluate(const Sequence& sequence, int layer, std::span<const int32_t>, std::span<const double> log_budgets,
                std::span<double> out) const override {
    power_curve(gamma(layer, factor(sequence)), sequence.tokens, log_budgets, out);
  }
  void evaluate_layers(const Sequence& sequence, int layers, std::span<const int32_t>,
                       std::span<const double> log_budgets, std::span<double> out) const override {
    const double own = factor(sequence), log_tokens = std::log(static_cast<double>(sequence.tokens));
    const size_t count = log_budgets.size();
    for (int l = 0; l < layers; ++l) {
      const double exponent = gamma(l, own);
      double* to = out.data() + static_cast<size_t>(l) * count;
      for (size_t i = 0; i < count; ++i) to[i] = log_power(exponent, log_budgets[i], log_tokens);
    }
    exp_all(out.data(), count * static_cast<size_t>(layers));
  }
  void evaluate_each(const Sequence& sequence, std::span<const int32_t>, std::span<const double> log_budgets,
                     std::span<double> out) const override {
    const double own = factor(sequence), log_tokens = std::log(static_cast<double>(sequence.tokens));
    for (size_t l = 0; l < log_budgets.size(); ++l)
      out[l] = log_power(gamma(static_cast<int>(l), own), log_budgets[l], log_tokens);
    exp_all(out.data(), log_budgets.size());
  }

 private:
  static double factor(const Sequence& sequence) { return 0.7 + 0.6 * hashed_uniform(sequence.id); }
  double gamma(int layer, double own) const {
    const double share = layers_ > 1 ? static_cast<double>(layer) / (layers_ - 1) : 0.0;
    return (0.10 + 0.30 * share) * own;
  }
  int layers_;
};

class TableCoverage final : public CoverageModel {
 public:
  TableCoverage(CoverageTable table, std::string name) : table_(std::move(table)), name_(std::move(name)) {
    for (int64_t budget : table_.budgets) log_budgets_.push_back(std::log(static_cast<double>(budget)));
  }
  std::string name() const override { return name_; }
  bool uniform_layers() const override { return false; }
  void evaluate(const Sequence& sequence, int layer, std::span<const int32_t>, std::span<const double> log_budgets,
                std::span<double> out) const override {
    const auto& curve = table_.coverage[static_cast<size_t>(layer)][class_of(sequence)];
    const double log_tokens = std::log(static_cast<double>(sequence.tokens));
    for (size_t i = 0; i < log_budgets.size(); ++i) out[i] = value(curve, place(log_budgets[i], log_tokens));
  }
  void evaluate_layers(const Sequence& sequence, int layers, std::span<const int32_t>,
                       std::span<const double> log_budgets, std::span<double> out) const override {
    const size_t own = class_of(sequence), count = log_budgets.size();
    const double log_tokens = std::log(static_cast<double>(sequence.tokens));
    for (size_t i = 0; i < count; ++i) {
      const Place at = place(log_budgets[i], log_tokens);
      for (size_t l = 0; l < static_cast<size_t>(layers); ++l) out[l * count + i] = value(table_.coverage[l][own], at);
    }
  }
  void evaluate_each(const Sequence& sequence, std::span<const int32_t>, std::span<const double> log_budgets,
                     std::span<double> out) const override {
    const size_t own = class_of(sequence);
    const double log_tokens = std::log(static_cast<double>(sequence.tokens));
    for (size_t l = 0; l < log_budgets.size(); ++l)
      out[l] = value(table_.coverage[l][own], place(log_budgets[l], log_tokens));
  }

 private:
  // Where a budget stands between the measured ones: the same for all layers.
  struct Place {
    size_t left = 0;
    double share = 0;                    // of the way to the next
    bool below = false, to_end = false;  // before the first: its part · share; towards 1 at the sequence's length
  };

  size_t class_of(const Sequence& sequence) const {
    const auto& classes = table_.length_classes;
    const auto found = std::lower_bound(classes.begin(), classes.end(), sequence.tokens);
    return static_cast<size_t>(std::min<ptrdiff_t>(found - classes.begin(), std::ssize(classes) - 1));
  }

  // Linear in log k between the measured budgets, 1 at the sequence's own length.
  Place place(double log_budget, double log_tokens) const {
    if (log_budget >= log_tokens) return {log_budgets_.size() - 1, 1.0, false, true};
    if (log_budget <= log_budgets_[0]) return {0, std::exp(log_budget - log_budgets_[0]), true, false};
    size_t i = 1;
    while (i < log_budgets_.size() && log_budgets_[i] < log_budget) ++i;
    const bool to_end = i == log_budgets_.size() || log_budgets_[i] >= log_tokens;
    const double left = log_budgets_[i - 1], right = to_end ? log_tokens : log_budgets_[i];
    return {i - 1, right <= left ? 1.0 : (log_budget - left) / (right - left), false, to_end};
  }
  double value(const std::vector<double>& curve, const Place& at) const {
    const double left = curve[at.left];
    if (at.below) return left * at.share;
    return left + ((at.to_end ? 1.0 : curve[at.left + 1]) - left) * at.share;
  }

  CoverageTable table_;
  std::string name_;
  std::vector<double> log_budgets_;
};

}  // namespace

void CoverageModel::evaluate_layers(const Sequence& sequence, int layers, std::span<const int32_t> budgets,
                                    std::span<const double> log_budgets, std::span<double> out) const {
  for (int l = 0; l < layers; ++l)
    evaluate(sequence, l, budgets, log_budgets, out.subspan(static_cast<size_t>(l) * budgets.size(), budgets.size()));
}

void CoverageModel::evaluate_each(const Sequence& sequence, std::span<const int32_t> budgets,
                                  std::span<const double> log_budgets, std::span<double> out) const {
  for (size_t l = 0; l < budgets.size(); ++l)
    evaluate(sequence, static_cast<int>(l), budgets.subspan(l, 1), log_budgets.subspan(l, 1), out.subspan(l, 1));
}

double CoverageModel::at(const Sequence& sequence, int layer, int64_t budget) const {
  const auto k = static_cast<int32_t>(budget);
  const double log_k = std::log(static_cast<double>(budget));
  double out = 0;
  evaluate(sequence, layer, {&k, 1}, {&log_k, 1}, {&out, 1});
  return out;
}

std::unique_ptr<CoverageModel> power_coverage(double gamma) {
  SB_USER_CHECK(std::isfinite(gamma) && gamma > 0 && gamma <= 1, "power coverage needs an exponent in (0, 1], got {}",
                gamma);
  return std::make_unique<PowerCoverage>(gamma);
}

std::unique_ptr<CoverageModel> layered_coverage(int layers) {
  return std::make_unique<LayeredCoverage>(layers);
}

std::unique_ptr<CoverageModel> table_coverage(CoverageTable table, std::string name) {
  return std::make_unique<TableCoverage>(std::move(table), std::move(name));
}

std::unique_ptr<CoverageModel> find_coverage(const std::string& name_or_path, int layers) {
  if (name_or_path == "layered") return layered_coverage(layers);
  if (name_or_path.starts_with("power:")) {
    double gamma = 0;
    size_t used = 0;
    const std::string text = name_or_path.substr(6);
    try {
      gamma = std::stod(text, &used);
    } catch (const std::exception&) {
      used = 0;
    }
    SB_USER_CHECK(used > 0 && used == text.size(), "coverage `{}`: `{}` is not a number (example: power:0.22)",
                  name_or_path, text);
    return power_coverage(gamma);
  }
  std::error_code unknown;
  SB_USER_CHECK(std::filesystem::exists(name_or_path, unknown) || unknown,
                "unknown coverage `{}`; expected power:GAMMA, layered or a readable coverage.json", name_or_path);
  CoverageTable table = parse_coverage(read_regular_file(name_or_path), name_or_path);
  SB_USER_CHECK(table.layers == layers, "{}: has {} layers, but the model has {}", name_or_path, table.layers, layers);
  if (!table.assumed_layers.empty())
    log::warning("{}: nothing was measured in layers {}; their coverage is assumed", name_or_path,
                 fmt::join(table.assumed_layers, ", "));
  return table_coverage(std::move(table), name_or_path);
}

}  // namespace sb
