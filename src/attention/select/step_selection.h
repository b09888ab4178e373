#pragma once

#include <optional>
#include <vector>

#include "attention/select/learned_selection.h"
#include "attention/select/selection_config.h"

namespace sb {

// What attention selects by until it is told otherwise, and what it has seen meanwhile.
class StepSelection {
 public:
  StepSelection(const SelectionConfig& config, int layers);

  void use(const LearnedSelection& learned);
  // What was seen since the last call; starts anew.
  SelectionObservations take_observations();

  // Whether thresholds are learned: look-ahead finds them anew in every sequence.
  bool counts_masses() const { return config_.learns_thresholds(); }
  bool by_planes() const { return config_.judges_by_planes(); }

  // Whether blocks of the layer can be judged: by planes not before there are statistics of them.
  bool ready(int layer) const;
  // Null unless blocks are judged by planes; InternalError where the layer has no statistics. Valid until use().
  const LayerPlanes* planes(int layer, const AttentionShape& shape);
  // Of `mass` where thresholds are learned, otherwise 0.
  float threshold(int layer, const SequenceTiles& tiles) const;

  void count(int layer, const SequenceTiles& tiles, const MassCounts& counts);
  void add(int layer, const PlaneSums& sums);

 private:
  SelectionConfig config_;
  LearnedSelection learned_;
  SelectionObservations seen_;
  std::vector<std::optional<LayerPlanes>> planes_;  // selected when first asked for
};

}  // namespace sb
