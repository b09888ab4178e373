#include "tests/ops/ops_fixture.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/cuda.h"
#include "device/memory.h"

namespace sb::test {

namespace {

uint16_t bf16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_bf16_bits(uint16_t half) {
  const uint32_t bits = uint32_t{half} << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace

float to_bf16(float value) {
  return from_bf16_bits(bf16_bits(value));
}

std::vector<DeviceParam> all_devices() {
  std::vector<DeviceParam> devices = {{DeviceKind::cpu, 1}, {DeviceKind::cpu, 2}, {DeviceKind::cpu, 3}};
#ifdef SB_TEST_CUDA
  devices.push_back({DeviceKind::cuda, 1, DType::f32});
  devices.push_back({DeviceKind::cuda, 1, DType::bf16});
#endif
  return devices;
}

std::string device_name(const ::testing::TestParamInfo<DeviceParam>& info) {
  if (info.param.device == DeviceKind::cuda) return "cuda_" + std::string(dtype_name(info.param.dtype));
  return "cpu" + std::to_string(info.param.threads);
}

OpsTest::OpsTest() : pool_(std::make_unique<ThreadPool>(GetParam().threads)) {
  if (on_cuda() && !cuda::problem().empty()) return;  // SetUp skips
  context_ = std::make_unique<DeviceContext>(GetParam().device, *pool_);
  scratch_ = std::make_unique<Arena>(make_arena("scratch", 1 << 24, GetParam().device));
  exec_ = context_->exec();
  exec_.scratch = scratch_.get();
}

void OpsTest::SetUp() {
  if (!context_) GTEST_SKIP() << cuda::problem();
}

TensorView OpsTest::place(const void* values, DType dtype, Shape shape) {
  const int64_t bytes = shape.elements() * dtype_bytes(dtype);
  if (!on_cuda()) {  // exact, for the address sanitizer
    std::shared_ptr<char[]> memory(new char[static_cast<size_t>(bytes)]);
    if (bytes > 0) std::memcpy(memory.get(), values, static_cast<size_t>(bytes));
    memory_.emplace_back("tensor", memory, bytes, DeviceKind::cpu);
    return {memory.get(), dtype, shape};
  }
  memory_.push_back(make_arena("tensor", std::max<int64_t>(bytes, 1), DeviceKind::cuda));
  const TensorView view = memory_.back().allocate(dtype, shape);
  if (bytes > 0) cuda::copy_and_wait(values, view.raw(), bytes);
  return view;
}

TensorView OpsTest::floats(const std::vector<float>& values, Shape shape) {
  EXPECT_EQ(static_cast<int64_t>(values.size()), shape.elements());
  return place(values.data(), DType::f32, shape);
}

TensorView OpsTest::tensor(const std::vector<float>& values, Shape shape) {
  return dtype() == DType::f32 ? floats(values, shape) : halves(values, shape);
}

TensorView OpsTest::halves(const std::vector<float>& values, Shape shape) {
  EXPECT_EQ(static_cast<int64_t>(values.size()), shape.elements());
  std::vector<uint16_t> rounded;
  for (const float value : values) rounded.push_back(bf16_bits(value));
  return place(rounded.data(), DType::bf16, shape);
}

TensorView OpsTest::tensor(const std::vector<int32_t>& values, Shape shape) {
  EXPECT_EQ(static_cast<int64_t>(values.size()), shape.elements());
  return place(values.data(), DType::i32, shape);
}

TensorView OpsTest::filled(Shape shape, float value) {
  return tensor(std::vector<float>(static_cast<size_t>(shape.elements()), value), shape);
}

TensorView OpsTest::filled_f32(Shape shape, float value) {
  return floats(std::vector<float>(static_cast<size_t>(shape.elements()), value), shape);
}

// By the operation's own stream and no wait for the whole device: what was launched on another stream is missed.
std::vector<char> OpsTest::bytes(const TensorView& view) const {
  std::vector<char> out(static_cast<size_t>(view.bytes()));
  if (out.empty()) return out;
  if (on_cuda()) {
    cuda::copy(exec_.stream, view.raw(), out.data(), view.bytes());
    cuda::synchronize(exec_.stream);
  } else {
    std::memcpy(out.data(), view.raw(), out.size());
  }
  return out;
}

std::vector<float> OpsTest::host(const TensorView& view) const {
  const std::vector<char> all = bytes(view);
  if (all.empty()) return {};
  std::vector<float> values(static_cast<size_t>(view.elements()));
  if (view.dtype() == DType::f32) {
    std::memcpy(values.data(), all.data(), all.size());
    return values;
  }
  for (size_t i = 0; i < values.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, all.data() + 2 * i, 2);
    values[i] = from_bf16_bits(half);
  }
  return values;
}

std::vector<float> OpsTest::random_operand(int64_t count, uint64_t seed, double scale) const {
  std::vector<float> values = random_values(count, seed, scale);
  if (dtype() == DType::bf16) {
    for (float& value : values) value = to_bf16(value);
  }
  return values;
}

double OpsTest::tolerance(double fp32, double roundings) const {
  return dtype() == DType::bf16 ? roundings * 0x1p-8 : fp32;
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

}  // namespace sb::test
