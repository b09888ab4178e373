#include "attention/select/step_selection.h"

#include "core/errors.h"

namespace sb {

StepSelection::StepSelection(const SelectionConfig& config, int layers)
    : config_(config), planes_(static_cast<size_t>(layers)) {}

void StepSelection::use(const LearnedSelection& learned) {
  learned_ = learned;
  for (std::optional<LayerPlanes>& layer : planes_) layer.reset();
}

SelectionObservations StepSelection::take_observations() {
  SelectionObservations taken = std::move(seen_);
  seen_ = {};
  return taken;
}

bool StepSelection::ready(int layer) const {
  const auto at = static_cast<size_t>(layer);
  return !by_planes() || (at < learned_.planes.size() && learned_.planes[at].tokens > 0);
}

const LayerPlanes* StepSelection::planes(int layer, const AttentionShape& shape) {
  if (!by_planes()) return nullptr;
  const auto at = static_cast<size_t>(layer);
  if (!planes_[at]) {
    SB_CHECK(ready(layer), "layer {} is to judge blocks by planes before it has statistics of them", layer);
    check_score_channels(config_, shape.head_dim);
    planes_[at] = select_planes(shape, learned_.planes[at], config_.score_channels);
  }
  return &*planes_[at];
}

float StepSelection::threshold(int layer, const SequenceTiles& tiles) const {
  return counts_masses() ? mass_threshold(learned_, layer, tiles) : 0.0f;
}

void StepSelection::count(int layer, const SequenceTiles& tiles, const MassCounts& counts) {
  if (counts_masses() && counts.wanted > 0) seen_.masses[mass_key(layer, tiles)] += counts;
}

void StepSelection::add(int layer, const PlaneSums& sums) {
  if (!by_planes()) return;
  seen_.planes.resize(planes_.size());
  seen_.planes[static_cast<size_t>(layer)] += sums;
}

}  // namespace sb
