#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/random.h"
#include "device/context.h"

namespace sb::test {

// Where a parametrised test runs. The instruction set comes from the environment (the test program runs once per set).
struct DeviceParam {
  DeviceKind device;
  int threads;
  DType dtype = DType::f32;  // of activations and weights
};

// All devices of this build: the CPU with 1, 2 and 3 threads; CUDA in fp32 and bf16, skipped where there is no GPU.
std::vector<DeviceParam> all_devices();
std::string device_name(const ::testing::TestParamInfo<DeviceParam>& info);

// Owns an Exec and the tensors of one test. Every tensor is its own exact allocation, so that the address sanitizer (or
// compute-sanitizer) sees a kernel that reads or writes past an end.
//
// `tensor` and `filled` make operands of the type the test runs in, `floats` and `filled_f32` what is fp32 in every
// mode: statistics, loss weights, parameter gradients, the optimizer's state. `halves`: bf16 in every mode.
class OpsTest : public ::testing::TestWithParam<DeviceParam> {
 protected:
  OpsTest();
  void SetUp() override;
  const Exec& exec() const { return exec_; }
  DType dtype() const { return GetParam().dtype; }
  bool on_cuda() const { return GetParam().device == DeviceKind::cuda; }

  TensorView tensor(const std::vector<float>& values, Shape shape);
  TensorView tensor(const std::vector<int32_t>& values, Shape shape);
  TensorView filled(Shape shape, float value);
  TensorView floats(const std::vector<float>& values, Shape shape);
  TensorView filled_f32(Shape shape, float value);
  TensorView halves(const std::vector<float>& values, Shape shape);
  std::vector<float> host(const TensorView& view) const;
  std::vector<char> bytes(const TensorView& view) const;

  // Normal numbers times `scale` that the type of the test holds exactly.
  std::vector<float> random_operand(int64_t count, uint64_t seed, double scale = 1.0) const;
  // `fp32` in fp32. In bf16 what its rounding adds: half a unit in the last place (2⁻⁹) of each result, twice that for
  // results that pass through a rounded tensor on the way or add to one.
  double tolerance(double fp32, double roundings = 1) const;

 private:
  TensorView place(const void* values, DType dtype, Shape shape);

  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<DeviceContext> context_;
  std::unique_ptr<Arena> scratch_;
  std::vector<Arena> memory_;
  Exec exec_;
};

// Rounded to the nearest bf16, ties to even.
float to_bf16(float value);

#define SB_INSTANTIATE_ON_ALL_DEVICES(suite) \
  INSTANTIATE_TEST_SUITE_P(Devices, suite, ::testing::ValuesIn(::sb::test::all_devices()), ::sb::test::device_name)

// Normal numbers times `scale`, rounded to fp32 so that the reference starts from what the operation sees.
std::vector<float> random_values(int64_t count, uint64_t seed, double scale = 1.0);
std::vector<double> doubles(const std::vector<float>& values);

// Every |actual - expected| ≤ tolerance · (|expected| + root mean square of expected).
void expect_close(const std::vector<float>& actual, const std::vector<double>& expected, double tolerance,
                  const std::string& what);

// Gradient of f by central differences in fp64.
std::vector<double> numeric_gradient(const std::function<double(const std::vector<double>&)>& f, std::vector<double> x,
                                     double step = 1e-5);

double dot(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace sb::test
