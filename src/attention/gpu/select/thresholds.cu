#include <cmath>

#include "attention/gpu/launch/check.cuh"
#include "attention/gpu/select/thresholds.h"

namespace sb::gpu {
namespace {

__global__ void begin_kernel(float* thresholds, const ThresholdPlan* plan) {
  const int i = threadIdx.x;
  if (plan->wanted[i] > 0 && isnan(thresholds[i])) thresholds[i] = plan->start[i];
}

__global__ void steer_kernel(float* thresholds, const ThresholdPlan* plan, const unsigned long long* chosen) {
  const int i = threadIdx.x;
  if (plan->wanted[i] <= 0) return;
  const double taken = static_cast<double>(chosen[2 * i]) - static_cast<double>(plan->given[i]);
  const double ratio = fmax(taken, 0.5) / static_cast<double>(plan->wanted[i]);
  thresholds[i] += 0.5f * static_cast<float>(fmin(fmax(log(ratio), -1.0), 1.0));
}

__global__ void count_kernel(unsigned long long* pairs, const unsigned long long* chosen) {
  unsigned long long sum = 0;
  for (int i = 0; i < kLengthClasses; ++i) sum += chosen[2 * i + 1];
  *pairs += sum;
}

}  // namespace

void begin_thresholds(float* thresholds, const ThresholdPlan* plan, void* stream) {
  begin_kernel<<<1, kLengthClasses, 0, static_cast<cudaStream_t>(stream)>>>(thresholds, plan);
  check(cudaGetLastError(), "thresholds");
}

void steer_thresholds(float* thresholds, const ThresholdPlan* plan, const unsigned long long* chosen, void* stream) {
  steer_kernel<<<1, kLengthClasses, 0, static_cast<cudaStream_t>(stream)>>>(thresholds, plan, chosen);
  check(cudaGetLastError(), "thresholds");
}

void add_pairs(unsigned long long* pairs, const unsigned long long* chosen, void* stream) {
  count_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(pairs, chosen);
  check(cudaGetLastError(), "count of pairs");
}

}  // namespace sb::gpu
