#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace sb {

// maximise Σ gain · x  subject to  Σ row · x ≤ limit for every row, 0 ≤ x ≤ 1: the relaxed time–cost trade-off, one row
// a path through the schedule. Rows are added as paths turn out to be too long and limits move with the deadline, so it
// is a dual simplex: every solution stays optimal for the rows it has. Dense tableau; meant for tens of rows.
class DeadlineLp {
 public:
  explicit DeadlineLp(std::span<const double> gain);

  int rows() const { return static_cast<int>(limit_.size()); }
  void add_row(std::span<const double> coefficients, double limit);
  // Moves the limits of all rows by the same amount.
  void shift_limits(double by);
  // False when the rows cannot be met or `pivots` (0: 50 and 20 a row) run out; x() is then meaningless.
  bool solve(int64_t pivots = 0);

  double x(int column) const { return value_[static_cast<size_t>(column)]; }
  double objective() const;
  // What one more unit of a row's limit is worth, zero or more; and of all limits.
  double price(int row) const { return -reduced_[static_cast<size_t>(structural_ + row)]; }
  double price() const;

 private:
  double* row(int r) { return tableau_.data() + static_cast<size_t>(r) * static_cast<size_t>(stride_); }
  const double* row(int r) const { return tableau_.data() + static_cast<size_t>(r) * static_cast<size_t>(stride_); }
  void grow(int columns);
  double upper(int column) const;

  // The row whose basic variable leaves the basis, and the bound it goes to.
  struct Leaving {
    int row;
    double bound;
  };
  std::optional<Leaving> find_leaving() const;
  int find_entering(const Leaving& leaving);  // -1: nothing can
  void pivot(const Leaving& leaving, int entering);
  void shift_value(int column, double by);

  int structural_;  // columns of the problem; slacks follow
  int columns_;     // with slacks
  int stride_;
  std::vector<double> gain_;
  std::vector<double> tableau_;
  std::vector<double> reduced_;  // gain - price · column
  std::vector<double> value_;    // of every column
  std::vector<char> basic_;
  std::vector<int> basis_;  // column that is basic in each row
  std::vector<double> limit_;
  std::vector<int> candidates_;
  std::vector<double> ratio_;
};

}  // namespace sb
