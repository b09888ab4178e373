#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/tuning/tuning.h"

namespace sb {

// `optimal` tuning of steps that are too large for a linear programme a rank. All curves are reduced to the same few
// prices of attention (coverage gained per pair): level 0 is every budget at its floor, and at each further level the
// steps are taken that are worth the next lower price. Because the prices are common, curves of a micro-batch's
// sequences and of a stage's layers simply add up, and one number, the level, describes a whole rank. Operations with
// slack run some levels ahead of their rank.
class PriceTuner {
 public:
  explicit PriceTuner(const TuningInput& input);

  double fastest() const { return fastest_; }              // every budget at its floor
  double base_makespan() const { return base_makespan_; }  // every budget at its base

  // Sets the levels so that every rank meets the deadline (≥ fastest()), and returns Σ tokens · coverage.
  // `rounds`: times that the slack is looked at again, and operations with slack run further ahead.
  static constexpr int kRounds = 3;
  double relax(double deadline, int rounds = kRounds);
  // The smallest deadline found from `from` (≥ fastest()) whose gain reaches `aim`; at most base_makespan(). Leaves the
  // levels there.
  double reach(double aim, double from);

  // Budgets of the present levels. Between two levels some of a stage's layers take the step: so many that the time is
  // met to the nearest one, or not exceeded. Returns the gain, exactly.
  double write(Budgets& budgets, bool nearest) const;

 private:
  static constexpr int kLevels = 12;
  struct Variable {
    int32_t curve;
    int32_t shift = 0;  // levels ahead of the rank
    double scale;       // layers of the stage where the curve is of one layer
    double fixed_forward, fixed_backward;
  };
  // Attention of one micro-batch on one stage (or on one layer, where all are alike) at every level.
  struct Curve {
    std::array<double, kLevels> forward, backward, gain;
    // Level whose budgets are meant: a higher one where that takes no longer (a dense sequence needs no selection).
    std::array<uint8_t, kLevels> meant;
  };
  struct Rank {
    const Schedule* schedule = nullptr;
    size_t first = 0, count = 0;  // variables, [position · stages + stage]
    PipelineTimes times;          // of the positions, at `level`
    double fastest = 0, slowest = 0, base_makespan = 0, top_gain = 0;
    double level = 0, gain = 0;
    double price = 0;   // gain per microsecond of deadline
    bool fresh = true;  // no deadline tried yet
  };
  struct Scratch {
    std::vector<double> values, lanes, ends, slack;
    std::vector<int32_t> best_shift;
  };

  void choose_prices();
  void build_rank(int rank);
  void build_curve(std::span<const int> members, int first_layer, int layers, Curve& curve) const;
  void relax_rank(Rank& rank, double deadline, int rounds, Scratch& scratch);
  // The highest level that meets the deadline, searched downwards from `from`.
  double highest_level(Rank& rank, double deadline, double from, Scratch& scratch) const;
  void makespans(const Rank& rank, std::span<const double, Schedule::kLanes> level, Scratch& scratch,
                 std::span<double, Schedule::kLanes> out) const;
  void set_level(Rank& rank, double level) const;
  double gain_at(const Rank& rank, double level) const;
  double write_rank(const Rank& rank, int number, Budgets& budgets, bool nearest) const;

  const TuningInput& input_;
  bool uniform_;
  int stages_;
  std::array<double, kLevels> price_{};  // of each level, falling; the first is above all, the last zero
  std::vector<Curve> curves_;            // [micro-batch], or [variable]
  std::vector<Variable> variables_;
  std::vector<Rank> ranks_;
  std::vector<Scratch> scratch_;  // one a thread
  double fastest_ = 0, base_makespan_ = 0;
};

}  // namespace sb
