#include "plan/tuning/deadline_lp.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/errors.h"

namespace sb {
namespace {

constexpr double kFeasible = 1e-9;
constexpr double kPivot = 1e-11;

}  // namespace

DeadlineLp::DeadlineLp(std::span<const double> gain)
    : structural_(static_cast<int>(gain.size())), columns_(structural_), stride_(0), gain_(gain.begin(), gain.end()) {
  reduced_ = gain_;
  // Without rows everything is worth taking.
  value_.assign(gain.size(), 1.0);
  basic_.assign(gain.size(), 0);
  grow(structural_ + 8);
}

void DeadlineLp::grow(int columns) {
  if (columns <= stride_) return;
  const int wider = std::max(columns, stride_ + stride_ / 8 + 8);
  std::vector<double> next(static_cast<size_t>(wider) * basis_.size(), 0.0);
  for (size_t r = 0; r < basis_.size(); ++r)
    std::copy_n(tableau_.data() + r * static_cast<size_t>(stride_), columns_,
                next.data() + r * static_cast<size_t>(wider));
  tableau_.swap(next);
  stride_ = wider;
}

double DeadlineLp::upper(int column) const {
  return column < structural_ ? 1.0 : std::numeric_limits<double>::infinity();
}

void DeadlineLp::add_row(std::span<const double> coefficients, double limit) {
  grow(columns_ + 1);
  const int slack = columns_++;
  tableau_.resize((basis_.size() + 1) * static_cast<size_t>(stride_), 0.0);
  double* fresh = row(static_cast<int>(basis_.size()));
  std::fill_n(fresh, stride_, 0.0);
  std::copy(coefficients.begin(), coefficients.end(), fresh);
  double left = limit;
  for (int j = 0; j < structural_; ++j) left -= coefficients[static_cast<size_t>(j)] * value_[static_cast<size_t>(j)];
  // In terms of the present basis.
  for (size_t r = 0; r < basis_.size(); ++r) {
    const double factor = fresh[basis_[r]];
    if (factor == 0) continue;
    const double* from = row(static_cast<int>(r));
    for (int j = 0; j < columns_; ++j) fresh[j] -= factor * from[j];
    fresh[basis_[r]] = 0;
  }
  fresh[slack] = 1;
  reduced_.push_back(0);
  value_.push_back(left);
  basic_.push_back(1);
  basis_.push_back(slack);
  limit_.push_back(limit);
}

void DeadlineLp::shift_limits(double by) {
  for (size_t r = 0; r < basis_.size(); ++r) {
    // The columns of the slacks are the inverse of the basis.
    double change = 0;
    for (int s = structural_; s < columns_; ++s) change += row(static_cast<int>(r))[s];
    value_[static_cast<size_t>(basis_[r])] += change * by;
    limit_[r] += by;
  }
}

bool DeadlineLp::solve(int64_t pivots) {
  int64_t left = pivots > 0 ? pivots : 50 + 20 * static_cast<int64_t>(basis_.size());
  for (;;) {
    const std::optional<Leaving> leaving = find_leaving();
    if (!leaving) return true;
    if (left-- == 0) return false;
    const int entering = find_entering(*leaving);
    if (entering < 0) return false;
    pivot(*leaving, entering);
  }
}

// The basic variable furthest outside its bounds.
std::optional<DeadlineLp::Leaving> DeadlineLp::find_leaving() const {
  std::optional<Leaving> leaving;
  double worst = kFeasible;
  for (size_t r = 0; r < basis_.size(); ++r) {
    const double at = value_[static_cast<size_t>(basis_[r])];
    const double over = at - upper(basis_[r]);
    const double scale = basis_[r] >= structural_ ? std::max(1.0, std::abs(limit_[r])) : 1.0;
    if (-at / scale > worst) {
      worst = -at / scale;
      leaving = {static_cast<int>(r), 0.0};
    }
    if (over / scale > worst) {
      worst = over / scale;
      leaving = {static_cast<int>(r), upper(basis_[r])};
    }
  }
  return leaving;
}

// What can bring it back, the cheapest that is large enough; what is cheaper but too small is moved to its other bound
// on the way.
int DeadlineLp::find_entering(const Leaving& leaving) {
  const double at = value_[static_cast<size_t>(basis_[static_cast<size_t>(leaving.row)])];
  const bool below = at < leaving.bound;
  const double sign = below ? 1.0 : -1.0;
  double missing = below ? leaving.bound - at : at - leaving.bound;
  const double* alpha = row(leaving.row);
  candidates_.clear();
  ratio_.resize(static_cast<size_t>(columns_));
  for (int j = 0; j < columns_; ++j) {
    if (basic_[static_cast<size_t>(j)]) continue;
    const double a = sign * alpha[j];
    const bool at_lower = value_[static_cast<size_t>(j)] <= 0.5 * std::min(1.0, upper(j));
    if ((at_lower && a < -kPivot) || (!at_lower && a > kPivot)) {
      ratio_[static_cast<size_t>(j)] = std::abs(reduced_[static_cast<size_t>(j)] / a);
      candidates_.push_back(j);
    }
  }
  const auto dearer = [&](int a, int b) {
    const double ra = ratio_[static_cast<size_t>(a)], rb = ratio_[static_cast<size_t>(b)];
    return ra != rb ? ra > rb : a > b;
  };
  std::make_heap(candidates_.begin(), candidates_.end(), dearer);
  while (!candidates_.empty()) {
    std::pop_heap(candidates_.begin(), candidates_.end(), dearer);
    const int j = candidates_.back();
    candidates_.pop_back();
    const double room = std::abs(alpha[j]) * upper(j);
    if (room >= missing || candidates_.empty()) return j;
    missing -= room;
    shift_value(j, value_[static_cast<size_t>(j)] > 0.5 ? -1.0 : 1.0);
  }
  return -1;
}

// A variable that is not basic, and with it all that are.
void DeadlineLp::shift_value(int column, double by) {
  for (size_t r = 0; r < basis_.size(); ++r)
    value_[static_cast<size_t>(basis_[r])] -= row(static_cast<int>(r))[column] * by;
  value_[static_cast<size_t>(column)] += by;
}

// The entering variable moves until the leaving one stands on its bound, and takes its place in the basis.
void DeadlineLp::pivot(const Leaving& leaving, int entering) {
  const int out = basis_[static_cast<size_t>(leaving.row)];
  double* pivot_row = row(leaving.row);
  shift_value(entering, (value_[static_cast<size_t>(out)] - leaving.bound) / pivot_row[entering]);
  value_[static_cast<size_t>(out)] = leaving.bound;

  const double inverse = 1.0 / pivot_row[entering];
  for (int j = 0; j < columns_; ++j) pivot_row[j] *= inverse;
  for (size_t r = 0; r < basis_.size(); ++r) {
    if (static_cast<int>(r) == leaving.row) continue;
    double* other = row(static_cast<int>(r));
    const double factor = other[entering];
    if (factor == 0) continue;
    for (int j = 0; j < columns_; ++j) other[j] -= factor * pivot_row[j];
    other[entering] = 0;
  }
  const auto in = static_cast<size_t>(entering);
  const double price = reduced_[in];
  for (int j = 0; j < columns_; ++j) reduced_[static_cast<size_t>(j)] -= price * pivot_row[j];
  reduced_[in] = 0;
  basic_[static_cast<size_t>(out)] = 0;
  basic_[in] = 1;
  basis_[static_cast<size_t>(leaving.row)] = entering;
}

double DeadlineLp::objective() const {
  double sum = 0;
  for (int j = 0; j < structural_; ++j) sum += gain_[static_cast<size_t>(j)] * value_[static_cast<size_t>(j)];
  return sum;
}

double DeadlineLp::price() const {
  double sum = 0;
  for (int s = structural_; s < columns_; ++s) sum -= reduced_[static_cast<size_t>(s)];
  return sum;
}

}  // namespace sb
