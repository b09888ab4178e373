#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "attention/select/planes.h"
#include "attention/select/tiles.h"

namespace sb {

// What selection learns from step to step. It is constant within a step; at the step's end the observations of all
// ranks are summed, and what is learned is a function of that sum alone. So the lists of a step depend neither on the
// order nor on the packing of its sequences, nor on the layout of the ranks.

// `mass` learns a threshold for every layer, length and share of the sequence that the budget covers; the latter two in
// classes.
struct MassKey {
  int layer = 0, length_class = 0, budget_class = 0;
  auto operator<=>(const MassKey&) const = default;
};
// Under which a sequence counts: lengths by powers of two, length over budget by powers of the square root of two, the
// nearest each.
MassKey mass_key(int layer, const SequenceTiles& tiles);

// Blocks beyond those that are listed anyhow (SequenceTiles::given), over tiles and list heads.
struct MassCounts {
  int64_t selected = 0, wanted = 0;
  MassCounts& operator+=(const MassCounts& other) {
    selected += other.selected;
    wanted += other.wanted;
    return *this;
  }
  bool operator==(const MassCounts&) const = default;
};
// Over the tiles of a sequence, for one list head.
int64_t wanted_blocks(const SequenceTiles& tiles);
int64_t given_blocks(const SequenceTiles& tiles);

// What `mass` knows of a class.
struct MassThreshold {
  float correction = 0;  // to start_threshold()
  float gain = 1;        // how far it follows log(selected / wanted) of a step
  float last = 0;        // that logarithm, of the last step
  bool operator==(const MassThreshold&) const = default;
};

// Of one step, or of a part of it.
struct SelectionObservations {
  std::vector<PlaneSums> planes;  // by layer of the model; empty unless blocks are judged by planes
  std::map<MassKey, MassCounts> masses;
  SelectionObservations& operator+=(const SelectionObservations& other);
  bool operator==(const SelectionObservations&) const = default;
};

struct LearnedSelection {
  std::vector<PlaneSums> planes;  // by layer: running sums, older steps fading; what a float holds each
  std::map<MassKey, MassThreshold> thresholds;
  bool operator==(const LearnedSelection&) const = default;
};

// The log of the relative mass from which a block is worth selecting, before anything is known: what each would hold if
// the mass lay evenly on twice the quota.
float start_threshold(const SequenceTiles& tiles);
// With what was learned: the corrections of the nearest length class seen, between the two nearest budget classes.
float mass_threshold(const LearnedSelection& learned, int layer, const SequenceTiles& tiles);

// Running sums keep this share of what they were in every step: a memory of some 20 steps, long against the noise of a
// batch and short against what weights take to turn from one plane to another.
inline constexpr double kPlaneMemory = 0.95;

// Tokens of a sequence that a first look at the data takes at most, dense, where there are no statistics of planes yet.
inline constexpr int64_t kFirstLookTokens = 4096;

// What the next step selects by. Sums that are not finite teach nothing.
LearnedSelection learn(const LearnedSelection& before, const SelectionObservations& step);

}  // namespace sb
