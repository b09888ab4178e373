#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "attention/select/learned_selection.h"
#include "attention/select/selection_config.h"

namespace sb::python {

// What selection learns from step to step (attention/select/learned_selection.h), for those whose loop is in Python.
// What a step saw is told as it comes; learn() ends the step.
class SelectionLearner {
 public:
  explicit SelectionLearner(const SelectionConfig& config);

  // plane_words() of a layer; empty where nothing is known of it.
  std::vector<uint32_t> planes(int layer, const AttentionShape& shape) const;
  // Of every sequence, to be added to start_threshold(). Budgets: one per sequence, or none.
  std::vector<float> thresholds(int layer, std::span<const int32_t> cu_seqlens, std::span<const int32_t> budgets) const;

  void observe_sums(int layer, std::span<const double> sums);
  void observe_counts(int layer, std::span<const int32_t> cu_seqlens, std::span<const int32_t> budgets,
                      std::span<const int64_t> counts);
  // Layer, length class, budget class, blocks selected and wanted: for the sum over ranks.
  using Mass = std::array<int64_t, 5>;
  std::vector<Mass> take_masses();
  void add_masses(const std::vector<Mass>& masses);
  void learn();

  // All that was learned: the sums of every layer, as observe_sums() takes them (empty where there are none), and for
  // every class layer, length class, budget class, correction, gain and the last error.
  using State = std::pair<std::vector<std::vector<double>>, std::vector<std::array<double, 6>>>;
  State state() const;
  void set_state(const std::vector<std::vector<double>>& planes, const std::vector<std::array<double, 6>>& thresholds);

 private:
  template <typename Body>
  void each_sequence(std::span<const int32_t> cu_seqlens, std::span<const int32_t> budgets, Body body) const;

  SelectionConfig config_;
  LearnedSelection learned_;
  SelectionObservations seen_;
};

}  // namespace sb::python
