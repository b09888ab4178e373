#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/latency/profile.h"

namespace sb {

// Predicts the operations of a micro-batch from a profile and corrects itself: per operation an exponential average of
// measured / predicted, kept in parts per million so that a plan replays exactly from what was recorded.
class LatencyModel {
 public:
  explicit LatencyModel(Profile profile);

  const Profile& profile() const { return profile_; }
  // Microseconds.
  double predict(Operation operation, const Work& work) const {
    const auto i = static_cast<size_t>(operation);
    return profile_.tables[i](work) * factor_[i];
  }

  // Tells what an operation took. `predicted_us` is what predict() said for it, with the corrections of that time.
  void observe(Operation operation, double predicted_us, double measured_us);
  // A whole pass was timed, not its parts: all operations of that direction are corrected alike.
  void observe_pass(bool backward, double predicted_us, double measured_us);

  // The error of the predictions observed so far (the most recent ones).
  ErrorSummary error() const;

  // The state that a checkpoint keeps.
  std::array<int64_t, kOperations> corrections_ppm() const { return correction_ppm_; }
  void set_corrections_ppm(const std::array<int64_t, kOperations>& ppm);

 private:
  void correct(Operation operation, double ratio);
  void remember(double ratio);

  Profile profile_;
  std::array<int64_t, kOperations> correction_ppm_;
  std::array<double, kOperations> factor_;
  std::vector<double> errors_;  // ring
  size_t next_error_ = 0;
};

}  // namespace sb
