#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "plan/coverage/coverage.h"

namespace sb {

// Coverage curves learned while training: for every (layer, length class) a running average of the share of the mass
// that a budget of k of n tokens holds, over k / n, in parts per million so that plans replay exactly. Where a class
// has not been seen, the nearest one of the layer counts; before anything was seen, (k / n)^0.22 does.
class CoverageStatistics final : public CoverageModel {
 public:
  // k / n = 2^(-i/2) for i = 1 … kPoints; at k = n the coverage is 1.
  static constexpr int kPoints = 12;
  struct Curve {
    int64_t seen = 0;       // samples so far, up to where the average forgets
    int64_t held_seen = 0;  // of these, with what the lists in use held
    // Tokens that share a list do not all want the same blocks: it holds as much as the best blocks of a smaller budget
    // would. By how much smaller, as a logarithm in ppm.
    int64_t shift_ppm = 0;
    std::array<int64_t, kPoints> ppm = {};  // falling
    bool operator==(const Curve&) const = default;
  };
  using Curves = std::map<std::pair<int, int>, Curve>;  // by (layer, length class)

  // One measured curve: coverage (ppm, rising) at ascending budgets, the last of which holds everything. Where it is
  // known, what the lists in use held at their budget; 0: not known.
  void observe(int layer, int64_t tokens, std::span<const int64_t> budgets, std::span<const int64_t> coverage_ppm,
               int64_t used_budget = 0, int64_t held_ppm = 0);

  const Curves& curves() const { return curves_; }
  // UserError names `where` when a curve is none.
  void set_curves(Curves curves, const std::string& where);

  // What was learned, as a coverage.json holds it: the length classes that were seen, each at its largest length. A
  // layer of which nothing was seen has the curve from before and is marked.
  CoverageTable table(int layers) const;

  std::string name() const override { return "measured"; }
  bool uniform_layers() const override { return curves_.empty(); }
  void evaluate(const Sequence& sequence, int layer, std::span<const int32_t> budgets,
                std::span<const double> log_budgets, std::span<double> out) const override;
  void evaluate_layers(const Sequence& sequence, int layers, std::span<const int32_t> budgets,
                       std::span<const double> log_budgets, std::span<double> out) const override;
  void evaluate_each(const Sequence& sequence, std::span<const int32_t> budgets, std::span<const double> log_budgets,
                     std::span<double> out) const override;
  bool operator==(const CoverageStatistics& other) const { return curves_ == other.curves_; }

 private:
  // A curve as evaluation wants it: shares instead of parts per million, from the whole sequence (1) down.
  struct Shares {
    int length_class = 0;
    double shift = 0;                            // in points
    std::array<double, kPoints + 2> share = {};  // the last stands twice, so that every point has a next one
  };
  void refresh(int layer, int length_class, const Curve& curve, bool fresh);
  const Shares* nearest(int layer, int length_class) const;
  // At this many points below the whole sequence.
  static double value(const Shares* curve, double depth);

  Curves curves_;
  std::vector<Shares> shares_;    // in the order in which the curves came
  std::vector<int32_t> nearest_;  // by layer and length class the place in shares_; -1: the layer has none
};

// coverage.json, which parse_coverage() reads.
std::string write_coverage(const CoverageTable& table);

}  // namespace sb
