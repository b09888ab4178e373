#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

#include "attention/select/planes.h"

namespace sb {

// What selection learns from step to step. It is constant within a step; at the step's end the observations of all
// ranks are summed, and what is learned is a function of that sum alone. So the lists of a step depend neither on the
// order nor on the packing of its sequences, nor on the layout of the ranks.

// `mass` steers a threshold for every layer, length and budget; both in classes.
struct MassKey {
  int layer = 0, length_class = 0, budget_class = 0;
  auto operator<=>(const MassKey&) const = default;
};

// Blocks beyond the forced ones, over the list heads.
struct MassCounts {
  int64_t chosen = 0, wanted = 0;
  MassCounts& operator+=(const MassCounts& other) {
    chosen += other.chosen;
    wanted += other.wanted;
    return *this;
  }
  bool operator==(const MassCounts&) const = default;
};

// Of one step, or of a part of it.
struct SelectionObservations {
  std::vector<PlaneSums> planes;  // by layer of the model; empty unless blocks are judged by planes
  std::map<MassKey, MassCounts> masses;
};

struct LearnedSelection {
  std::vector<PlaneSums> planes;        // by layer: running sums, older steps fading
  std::map<MassKey, float> thresholds;  // log of a relative mass
  bool operator==(const LearnedSelection&) const = default;
};

// What the next step selects by.
LearnedSelection learn(LearnedSelection before, const SelectionObservations& step);

}  // namespace sb
