#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/random.h"
#include "device/exec.h"

namespace sb::testing {

// Where a parametrised test runs. The instruction set comes from the environment (the test program runs once per set).
struct DeviceParam {
  DeviceKind device;
  int threads;
};

// All devices of this build, the CPU with 1, 2 and 3 threads.
std::vector<DeviceParam> all_devices();
std::string device_name(const ::testing::TestParamInfo<DeviceParam>& info);

// Owns an Exec and the tensors of one test. Every tensor is its own exact allocation, so that the address sanitizer
// sees a kernel that reads or writes past an end.
class OpsTest : public ::testing::TestWithParam<DeviceParam> {
 protected:
  OpsTest();
  const Exec& exec() const { return exec_; }

  TensorView tensor(const std::vector<float>& values, Shape shape);
  TensorView tensor(const std::vector<int32_t>& values, Shape shape);
  TensorView filled(Shape shape, float value);
  std::vector<float> host(const TensorView& view) const;

 private:
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Arena> scratch_;
  std::vector<std::unique_ptr<float[]>> floats_;
  std::vector<std::unique_ptr<int32_t[]>> ints_;
  Exec exec_;
};

#define SB_INSTANTIATE_ON_ALL_DEVICES(suite)                                                  \
  INSTANTIATE_TEST_SUITE_P(Devices, suite, ::testing::ValuesIn(::sb::testing::all_devices()), \
                           ::sb::testing::device_name)

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

}  // namespace sb::testing
