#pragma once

#include <memory>
#include <vector>

#include "balance/deadline_lp.h"
#include "balance/tuning.h"

namespace sb {

// How much work tuning may do; exact when the step is small, bounded when it is large.
struct RankTunerLimits {
  int corners = 12;            // of a stage curve
  int rows = 60;               // paths in the programme of a rank
  int newton_steps = 12;       // deadlines tried
  int attempts = 4;            // with a higher aim, after rounding lost too much
  int64_t fill_trials = 2000;  // single steps tried after rounding
};
RankTunerLimits rank_tuner_limits(int64_t variables);

// Budgets of one data-parallel rank under a deadline. The variables are (micro-batch, stage); forward and backward move
// together.
class RankTuner {
 public:
  RankTuner(const TuningInput& input, int rank, const RankTunerLimits& limits);

  double fastest() const { return fastest_; }              // every budget at its floor
  double base_makespan() const { return base_makespan_; }  // every budget at its base

  // Solves the relaxed problem; deadline ≥ fastest().
  void relax(double deadline);
  double relaxed_gain() const { return relaxed_gain_; }
  double price() const { return price_; }

  // Steps that exist, at or below the relaxed ones, and then as many more as fit.
  void round(double deadline);
  double gain() const { return gain_; }
  void write(Budgets& budgets) const;

 private:
  struct Variable {
    int curve;
    double scale;  // layers of the stage where the curve is of one layer
    int units;     // parts a step comes in: layers with uniform curves, otherwise 1
    double fixed_forward, fixed_backward;
    int first_column;
  };
  double at(const std::vector<double>& values, double position) const;
  void set_position(size_t variable, double position);
  void set_all(const std::vector<double>& positions);
  double simulate() const { return schedule_.makespan(times_, order_); }
  bool add_critical_path(double deadline);
  void positions_from_programme();
  double total_gain() const;
  void fill(double deadline);
  void fill_between(double deadline);

  const TuningInput& input_;
  int rank_;
  RankTunerLimits limits_;
  const Schedule& schedule_;
  const std::vector<int>& order_;
  std::vector<StageCurve> curves_;
  std::vector<Variable> variables_;  // [micro-batch · stages + stage]
  PipelineTimes times_;              // at position_
  std::vector<double> position_;
  // Budgets inside a step that does not fit as a whole.
  struct Between {
    int sequence, layer;
    int32_t budget;
  };
  std::vector<Between> between_;
  double between_gain_ = 0;
  std::unique_ptr<DeadlineLp> programme_;
  double deadline_ = 0;
  double floor_gain_ = 0;
  double fastest_ = 0, slowest_ = 0, base_makespan_ = 0;
  double relaxed_gain_ = 0, price_ = 0, gain_ = 0;
  std::vector<int> chain_;
  std::vector<double> row_;
};

}  // namespace sb
