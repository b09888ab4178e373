#include "tests/ops/ops_fixture.h"

#include <cmath>
#include <cstring>

namespace sb::testing {

std::vector<DeviceParam> all_devices() {
  return {{DeviceKind::cpu, 1}, {DeviceKind::cpu, 2}, {DeviceKind::cpu, 3}};
}

std::string device_name(const ::testing::TestParamInfo<DeviceParam>& info) {
  return (info.param.device == DeviceKind::cpu ? "cpu" : "cuda") + std::to_string(info.param.threads);
}

OpsTest::OpsTest()
    : pool_(std::make_unique<ThreadPool>(GetParam().threads)), scratch_(std::make_unique<Arena>("scratch", 1 << 22)) {
  exec_ = {.device = GetParam().device, .pool = pool_.get(), .scratch = scratch_.get()};
}

TensorView OpsTest::tensor(const std::vector<float>& values, Shape shape) {
  EXPECT_EQ(static_cast<int64_t>(values.size()), shape.elements());
  floats_.push_back(std::make_unique<float[]>(values.size()));
  std::copy(values.begin(), values.end(), floats_.back().get());
  return {floats_.back().get(), shape};
}

TensorView OpsTest::tensor(const std::vector<int32_t>& values, Shape shape) {
  EXPECT_EQ(static_cast<int64_t>(values.size()), shape.elements());
  ints_.push_back(std::make_unique<int32_t[]>(values.size()));
  std::copy(values.begin(), values.end(), ints_.back().get());
  return {ints_.back().get(), shape};
}

TensorView OpsTest::filled(Shape shape, float value) {
  return tensor(std::vector<float>(static_cast<size_t>(shape.elements()), value), shape);
}

std::vector<float> OpsTest::host(const TensorView& view) const {
  return {view.f32(), view.f32() + view.elements()};
}

std::vector<float> random_values(int64_t count, uint64_t seed, double scale) {
  Random random(seed, 77);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.normal() * scale);
  return values;
}

std::vector<double> doubles(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

void expect_close(const std::vector<float>& actual, const std::vector<double>& expected, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size()) << what;
  double squares = 0;
  for (const double e : expected) squares += e * e;
  const double typical = expected.empty() ? 0 : std::sqrt(squares / static_cast<double>(expected.size()));
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_LE(std::abs(actual[i] - expected[i]), tolerance * (std::abs(expected[i]) + typical) + 1e-30)
        << what << "[" << i << "] is " << actual[i] << ", expected " << expected[i];
  }
}

std::vector<double> numeric_gradient(const std::function<double(const std::vector<double>&)>& f, std::vector<double> x,
                                     double step) {
  std::vector<double> gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double kept = x[i], h = step * std::max(1.0, std::abs(kept));
    x[i] = kept + h;
    const double up = f(x);
    x[i] = kept - h;
    const double down = f(x);
    x[i] = kept;
    gradient[i] = (up - down) / (2 * h);
  }
  return gradient;
}

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  EXPECT_EQ(a.size(), b.size());
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace sb::testing
