#include "plan/latency/latency_model.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/errors.h"

namespace sb {
namespace {

constexpr int64_t kNoCorrection = 1'000'000;
constexpr double kSmoothing = 0.1;
constexpr size_t kRemembered = 1024;
// One measurement may be an accident (another process, a page fault); it moves the average no further than this.
constexpr double kLargestRatio = 4.0;

}  // namespace

LatencyModel::LatencyModel(Profile profile) : profile_(std::move(profile)) {
  for (int i = 0; i < kOperations; ++i)
    SB_CHECK(profile_.tables[static_cast<size_t>(i)].curve.x.size() >= 2, "profile {} lacks {}", profile_.name,
             operation_name(static_cast<Operation>(i)));
  correction_ppm_.fill(kNoCorrection);
  factor_.fill(1.0);
}

void LatencyModel::observe(Operation operation, double predicted_us, double measured_us) {
  SB_CHECK(predicted_us > 0 && measured_us > 0, "predicted {} us, measured {} us", predicted_us, measured_us);
  remember(measured_us / predicted_us);
  correct(operation, measured_us / predicted_us);
}

void LatencyModel::observe_pass(bool backward, double predicted_us, double measured_us) {
  SB_CHECK(predicted_us > 0 && measured_us > 0, "predicted {} us, measured {} us", predicted_us, measured_us);
  const double ratio = measured_us / predicted_us;
  remember(ratio);
  if (backward) {
    for (auto operation : {Operation::linear_backward, Operation::attention_backward, Operation::head_backward})
      correct(operation, ratio);
  } else {
    for (auto operation :
         {Operation::linear_forward, Operation::attention_forward, Operation::selection, Operation::head_forward})
      correct(operation, ratio);
  }
}

void LatencyModel::correct(Operation operation, double ratio) {
  const auto i = static_cast<size_t>(operation);
  const double bounded = std::clamp(ratio, 1.0 / kLargestRatio, kLargestRatio);
  // The prediction already carried the present factor, so the ratio is relative to it.
  const double wanted = factor_[i] * bounded;
  correction_ppm_[i] =
      std::llround((1.0 - kSmoothing) * static_cast<double>(correction_ppm_[i]) + kSmoothing * wanted * kNoCorrection);
  factor_[i] = static_cast<double>(correction_ppm_[i]) / kNoCorrection;
}

void LatencyModel::remember(double ratio) {
  const double error = std::abs(1.0 / ratio - 1.0);
  if (errors_.size() < kRemembered) {
    errors_.push_back(error);
  } else {
    errors_[next_error_] = error;
    next_error_ = (next_error_ + 1) % kRemembered;
  }
}

ErrorSummary LatencyModel::error() const {
  return summarize_errors(errors_);
}

void LatencyModel::set_corrections_ppm(const std::array<int64_t, kOperations>& ppm) {
  correction_ppm_ = ppm;
  for (size_t i = 0; i < ppm.size(); ++i) {
    SB_CHECK(ppm[i] > 0, "correction of {} is {} ppm", operation_name(static_cast<Operation>(i)), ppm[i]);
    factor_[i] = static_cast<double>(ppm[i]) / kNoCorrection;
  }
}

}  // namespace sb
