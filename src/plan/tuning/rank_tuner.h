#pragma once

#include <memory>
#include <vector>

#include "plan/tuning/deadline_lp.h"
#include "plan/tuning/tuning.h"

namespace sb {

// Budgets of one data-parallel rank of a small step under a deadline: the classical time–cost trade-off. The variables
// are (micro-batch, stage); forward and backward move together.
class RankTuner {
 public:
  // `pivots`: as TuningOptions has them.
  RankTuner(const TuningInput& input, int rank, int64_t pivots);

  double fastest() const { return fastest_; }              // every budget at its floor
  double base_makespan() const { return base_makespan_; }  // every budget at its base

  // Solves the relaxed problem; deadline ≥ fastest(). False: it took too many pivots, and the tuner is of no more use.
  bool relax(double deadline);
  double relaxed_gain() const { return relaxed_gain_; }
  double price() const { return price_; }

  // Steps that exist: at or below the relaxed ones, and then as many more as fit.
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
  double add_operation(size_t at, bool backward, double share);
  void positions_from_programme();
  double total_gain() const;
  void fill(double deadline);
  void fill_between(double deadline);

  const TuningInput& input_;
  int rank_;
  int64_t pivots_;
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
  double relaxed_gain_ = 0, price_ = 0, gain_ = 0, top_gain_ = 0;
  std::vector<int> chain_;
  std::vector<double> row_;
};

}  // namespace sb
