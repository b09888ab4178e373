#include <algorithm>

#include "core/errors.h"
#include "plan/tuning/rank_tuner.h"

namespace sb {
namespace {

constexpr int kRows = 60;  // paths in the programme of a rank

}  // namespace

// Adds a share of an operation's time to the row; what of it is fixed.
double RankTuner::add_operation(size_t at, bool backward, double share) {
  const Variable& v = variables_[at];
  const StageCurve& curve = curves_[static_cast<size_t>(v.curve)];
  const auto& values = backward ? curve.backward : curve.forward;
  const double scale = share * v.scale;
  for (size_t c = 1; c < curve.corners.size(); ++c)
    row_[static_cast<size_t>(v.first_column) + c - 1] +=
        scale * (values[static_cast<size_t>(curve.corners[c])] - values[static_cast<size_t>(curve.corners[c - 1])]);
  return share * (backward ? v.fixed_backward : v.fixed_forward) +
         scale * values[static_cast<size_t>(curve.corners.front())];
}

// Adds the longest path at the present positions as a row.
bool RankTuner::add_critical_path(double deadline) {
  if (programme_->rows() >= kRows) return false;
  schedule_.critical_path(times_, order_, chain_);
  std::fill(row_.begin(), row_.end(), 0.0);
  const auto& nodes = schedule_.nodes();
  // What comes before the first forward of the path's stage, and what follows the last backward: so much, or so much
  // less than that operation's share.
  const auto exposed = [&](const std::vector<Exposed>& all, int id) {
    if (all.empty()) return Exposed();
    const auto& node = nodes[static_cast<size_t>(id)];
    const Exposed& own = all[static_cast<size_t>(node.stage)];
    const size_t at = times_.at(order_[static_cast<size_t>(node.position)], node.stage);
    const double took = (node.backward ? times_.backward : times_.forward)[at];
    return own.all - own.hidden * took > own.least ? Exposed(0, own.all, own.hidden) : Exposed(own.least);
  };
  const Exposed gather = exposed(times_.gather, chain_.front()), tail = exposed(times_.tail, chain_.back());
  double fixed = gather.all + tail.all;
  int previous = -1;
  for (int id : chain_) {
    const auto& node = nodes[static_cast<size_t>(id)];
    const size_t at = times_.at(order_[static_cast<size_t>(node.position)], node.stage);
    const double hidden = id == chain_.front() ? gather.hidden : id == chain_.back() ? tail.hidden : 0.0;
    fixed += add_operation(at, node.backward, 1 - hidden);
    // Reached over the transfer, not over the stage's own order.
    if (!times_.forward_transfer.empty() && node.dependency == previous && node.previous != previous && previous >= 0)
      fixed += node.backward ? times_.backward_transfer[at] : times_.forward_transfer[at];
    previous = id;
  }
  // A path that the programme holds already: what is left over is the bend of the curves between corners.
  double planned = fixed;
  for (size_t j = 0; j < row_.size(); ++j) planned += row_[j] * programme_->x(static_cast<int>(j));
  if (planned <= deadline * (1 + 1e-8)) return false;
  programme_->add_row(row_, deadline - fixed);
  return true;
}

void RankTuner::positions_from_programme() {
  for (size_t i = 0; i < variables_.size(); ++i) {
    const Variable& v = variables_[i];
    const StageCurve& curve = curves_[static_cast<size_t>(v.curve)];
    const auto time = [&](int k) {
      return curve.forward[static_cast<size_t>(k)] + curve.backward[static_cast<size_t>(k)];
    };
    // The programme knows the corners only; the time it gives is spent on the steps between them.
    double more = 0;
    for (size_t c = 1; c < curve.corners.size(); ++c)
      more += std::clamp(programme_->x(v.first_column + static_cast<int>(c) - 1), 0.0, 1.0) *
              (time(curve.corners[c]) - time(curve.corners[c - 1]));
    const int floor = curve.corners.front();
    const double until = time(floor) + more * (1 + 1e-12);
    const auto steps = static_cast<int>(curve.steps.size());
    int k = floor;
    while (k < steps && time(k + 1) <= until) ++k;
    const double part = k < steps ? (until - time(k)) / (time(k + 1) - time(k)) : 0.0;
    set_position(i, k + std::clamp(part, 0.0, 1.0));
  }
}

bool RankTuner::relax(double deadline) {
  price_ = 0;
  if (slowest_ <= deadline) {
    for (size_t i = 0; i < variables_.size(); ++i)
      set_position(i, static_cast<double>(curves_[static_cast<size_t>(variables_[i].curve)].steps.size()));
    relaxed_gain_ = top_gain_;
    return true;
  }
  // At the fastest schedule nothing but the floors fits; a hair more room keeps rounding from denying even these.
  deadline = std::max(deadline, fastest_ * (1 + 1e-9));
  programme_->shift_limits(deadline - deadline_);
  deadline_ = deadline;
  for (;;) {
    if (!programme_->solve(pivots_)) return false;
    positions_from_programme();
    if (simulate() <= deadline * (1 + 1e-7)) break;
    if (!add_critical_path(deadline)) break;
  }
  relaxed_gain_ = floor_gain_ + programme_->objective();
  price_ = programme_->price();
  return true;
}

}  // namespace sb
