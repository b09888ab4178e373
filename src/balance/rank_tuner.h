#pragma once

#include <memory>
#include <vector>

#include "balance/deadline_lp.h"
#include "balance/tuning.h"

namespace sb {

// How much work tuning may do; exact when the step is small, bounded when it is large.
struct RankTunerLimits {
  bool exact = true;           // a linear programme a rank; otherwise prices
  int corners = 12;            // of a stage curve
  int rows = 60;               // paths in the programme of a rank
  int deadlines = 12;          // tried in one search
  int attempts = 4;            // with a higher aim, after rounding lost too much
  int price_rounds = 0;        // in which prices follow the slack of the operations
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

  // Solves the relaxed problem, exactly or by prices; deadline ≥ fastest(). `roughly`: prices do not follow the slack.
  void relax(double deadline, bool roughly = false);
  double relaxed_gain() const { return relaxed_gain_; }
  double price() const { return price_; }

  // Steps that exist: at or below the relaxed ones, and then as many more as fit; or the nearest ones, which may pass
  // the deadline by a fraction of a step.
  void round(double deadline, bool nearest);
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
  // The linear programme: rows are paths that turned out too long.
  void relax_exactly(double deadline);
  void set_position(size_t variable, double position);
  void set_all(const std::vector<double>& positions);
  double simulate() const { return schedule_.makespan(times_, order_); }
  bool add_critical_path(double deadline);
  void positions_from_programme();
  // One price of time for all operations, lower where there is slack.
  void prepare_prices();
  void relax_by_prices(double deadline, int rounds);
  double positions_at_price(double price, std::vector<double>& positions);
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
  double relaxed_gain_ = 0, price_ = 0, gain_ = 0, top_gain_ = 0;
  // Prices: gain per time of every piece between corners, by curve, and the share of the price a variable pays.
  std::vector<double> slopes_;
  std::vector<int> first_slope_;
  std::vector<double> weight_, low_, high_, slack_, best_;
  double highest_slope_ = 0, lowest_slope_ = 0, time_price_ = 0;
  std::vector<int> chain_;
  std::vector<double> row_;
};

}  // namespace sb
