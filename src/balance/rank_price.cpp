#include <algorithm>
#include <cmath>

#include "balance/rank_tuner.h"

namespace sb {

void RankTuner::prepare_prices() {
  highest_slope_ = 0;
  lowest_slope_ = 1e300;
  for (const StageCurve& curve : curves_) {
    first_slope_.push_back(static_cast<int>(slopes_.size()));
    for (size_t c = 1; c < curve.corners.size(); ++c) {
      const auto a = static_cast<size_t>(curve.corners[c - 1]), b = static_cast<size_t>(curve.corners[c]);
      const double time = curve.forward[b] + curve.backward[b] - curve.forward[a] - curve.backward[a];
      slopes_.push_back((curve.gain[b] - curve.gain[a]) / time);
      highest_slope_ = std::max(highest_slope_, slopes_.back());
      lowest_slope_ = std::min(lowest_slope_, slopes_.back());
    }
  }
  weight_.assign(variables_.size(), 1.0);
  low_.resize(variables_.size());
  high_.resize(variables_.size());
  slack_.resize(variables_.size());
}

// Every variable takes the pieces whose gain is worth their time at this price. Returns the makespan.
double RankTuner::positions_at_price(double price, std::vector<double>& positions) {
  for (size_t i = 0; i < variables_.size(); ++i) {
    const Variable& v = variables_[i];
    const StageCurve& curve = curves_[static_cast<size_t>(v.curve)];
    const double* slope = slopes_.data() + first_slope_[static_cast<size_t>(v.curve)];
    const double limit = price * weight_[i];
    size_t c = 0;
    while (c + 1 < curve.corners.size() && slope[c] >= limit) ++c;
    const auto corner = static_cast<size_t>(curve.corners[c]);
    positions[i] = static_cast<double>(corner);
    times_.forward[i] = v.fixed_forward + v.scale * curve.forward[corner];
    times_.backward[i] = v.fixed_backward + v.scale * curve.backward[corner];
  }
  return simulate();
}

void RankTuner::relax_by_prices(double deadline, int rounds) {
  double best_gain = -1;
  std::fill(weight_.begin(), weight_.end(), 1.0);
  const double ceiling = highest_slope_ * 1.01, ground = std::max(lowest_slope_ * 0.5, highest_slope_ * 1e-9);
  for (int round = 0; round < rounds; ++round) {
    // low_: too much, at a price too low; high_: fits. The floor always fits, everything never does.
    double dear = ceiling / *std::min_element(weight_.begin(), weight_.end()), cheap = ground;
    bool have_low = false, have_high = false;
    const auto evaluate = [&](double price) {
      const bool fits = positions_at_price(price, slack_) <= deadline;
      (fits ? dear : cheap) = price;
      (fits ? have_high : have_low) = true;
      slack_.swap(fits ? high_ : low_);
      return fits;
    };
    if (time_price_ > cheap && time_price_ < dear) {
      // Near the price of the deadline before.
      const bool fits = evaluate(time_price_);
      for (int i = 0; i < 8; ++i) {
        const double next = fits ? dear / 1.12 : cheap * 1.12;
        if (next >= dear && !fits) break;
        if (next <= cheap && fits) break;
        if (evaluate(next) != fits) break;
      }
    }
    while (dear > cheap * 1.04) evaluate(std::sqrt(dear * cheap));
    if (!have_low) positions_at_price(cheap, low_);
    if (!have_high) positions_at_price(dear, high_);
    time_price_ = dear;
    // Between the two: the same share of every difference.
    double share = 0, too_much = 1;
    set_all(high_);
    for (int i = 0; i < 4; ++i) {
      const double middle = 0.5 * (share + too_much);
      for (size_t v = 0; v < variables_.size(); ++v)
        if (low_[v] != high_[v]) set_position(v, high_[v] + middle * (low_[v] - high_[v]));
      (simulate() <= deadline ? share : too_much) = middle;
    }
    for (size_t v = 0; v < variables_.size(); ++v) set_position(v, high_[v] + share * (low_[v] - high_[v]));
    const double gain = total_gain();
    if (gain > best_gain) {
      best_gain = gain;
      best_ = position_;
    }
    if (round + 1 == rounds) break;
    // Operations with slack are not what the deadline is about: their time is cheaper.
    schedule_.slacks(times_, order_, deadline, slack_);
    bool changed = false;
    for (size_t v = 0; v < variables_.size(); ++v) {
      const double own = times_.forward[v] + times_.backward[v];
      if (slack_[v] > 0.02 * own) {
        weight_[v] *= 0.5;
        changed = true;
      }
    }
    if (!changed) break;
  }
  set_all(best_);
  relaxed_gain_ = best_gain;
  // A deadline longer by δ lets every operation grow by its share of δ.
  double busy = 0;
  for (size_t v = 0; v < variables_.size(); ++v) busy += times_.forward[v] + times_.backward[v];
  price_ = time_price_ * busy / deadline;
}

}  // namespace sb
