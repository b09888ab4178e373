#include "ops/swiglu.h"

#include <cmath>

#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

std::vector<double> swiglu(int64_t width, const std::vector<double>& gate_up) {
  const int64_t rows = static_cast<int64_t>(gate_up.size()) / (2 * width);
  std::vector<double> h(static_cast<size_t>(rows * width));
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < width; ++i) {
      const double g = gate_up[2 * t * width + i], u = gate_up[(2 * t + 1) * width + i];
      h[t * width + i] = g / (1.0 + std::exp(-g)) * u;
    }
  }
  return h;
}

class SwiGluTest : public OpsTest {};
SB_INSTANTIATE_ON_ALL_DEVICES(SwiGluTest);

TEST_P(SwiGluTest, ForwardMatchesReference) {
  for (const int64_t rows : {0, 1, 3, 67}) {
    for (const int64_t width : {1, 3, 8, 16, 17, 97, 128, 4864}) {
      SCOPED_TRACE(::testing::Message() << rows << "x" << width);
      const auto gate_up = random_operand(rows * 2 * width, 1, 4.0);
      const TensorView h = filled({rows, width}, NAN);
      swiglu_forward(exec(), tensor(gate_up, {rows, 2 * width}), h);
      expect_close(host(h), swiglu(width, doubles(gate_up)), tolerance(1e-6), "h");
    }
  }
}

TEST_P(SwiGluTest, ExtremeGatesGiveTheLimit) {
  // silu(g) → g above, → 0 below; exp must neither overflow into NaN nor divide by zero.
  std::vector<float> gates = {-1e30f, -200.0f, -89.0f, -87.5f, 0.0f, 87.5f, 200.0f, 1e30f};
  if (dtype() == DType::bf16) {
    for (float& gate : gates) gate = to_bf16(gate);
  }
  const int64_t width = static_cast<int64_t>(gates.size());
  std::vector<float> gate_up = gates;
  gate_up.insert(gate_up.end(), gates.size(), 1.0f);
  const TensorView gu = tensor(gate_up, {1, 2 * width}), h = filled({1, width}, NAN), d = filled({1, 2 * width}, NAN);
  swiglu_forward(exec(), gu, h);
  swiglu_backward(exec(), gu, filled({1, width}, 1), d);
  for (int64_t i = 0; i < width; ++i) {
    const float expected = gates[i] > 0 ? gates[i] : 0.0f;
    EXPECT_NEAR(host(h)[i], expected, std::max(1e-30f, std::abs(expected) * 1e-6f)) << gates[i];
    EXPECT_NEAR(host(d)[i], gates[i] > 0 ? 1.0 : (gates[i] == 0 ? 0.5 : 0.0), 1e-6) << gates[i];
  }
}

TEST_P(SwiGluTest, BackwardMatchesFiniteDifferences) {
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {7, 5}, {2, 32}}) {
    SCOPED_TRACE(::testing::Message() << rows << "x" << width);
    const auto gate_up = random_operand(rows * 2 * width, 1, 2.0), dh = random_operand(rows * width, 2);
    const auto expected =
        numeric_gradient([&, w = width](const auto& v) { return dot(swiglu(w, v), doubles(dh)); }, doubles(gate_up));
    const TensorView gu = tensor(gate_up, {rows, 2 * width}), d = filled({rows, 2 * width}, NAN),
                     dht = tensor(dh, {rows, width});
    swiglu_backward(exec(), gu, dht, d);
    expect_close(host(d), expected, tolerance(1e-5), "dgate_up");
    const TensorView forward = filled({rows, width}, NAN), again = filled({rows, 2 * width}, NAN);
    swiglu_forward(exec(), gu, forward);
    swiglu_backward(exec(), gu, dht, again, dht);  // forward's result in place of its gradient
    EXPECT_EQ(host(again), host(d));
    EXPECT_EQ(host(dht), host(forward));
    swiglu_backward(exec(), gu, tensor(dh, {rows, width}), gu);  // in place
    EXPECT_EQ(host(gu), host(d));
  }
}

TEST_P(SwiGluTest, NanStaysNan) {
  const TensorView h = filled({1, 1}, 0);
  swiglu_forward(exec(), tensor(std::vector<float>{NAN, 1.0f}, {1, 2}), h);
  EXPECT_TRUE(std::isnan(host(h)[0]));
}

TEST_P(SwiGluTest, RefusesWrongShapes) {
  EXPECT_THROW(swiglu_forward(exec(), filled({2, 6}, 0), filled({2, 4}, 0)), InternalError);
  EXPECT_THROW(swiglu_forward(exec(), filled({2, 6}, 0), filled({3, 3}, 0)), InternalError);
  EXPECT_THROW(swiglu_backward(exec(), filled({2, 6}, 0), filled({2, 3}, 0), filled({2, 3}, 0)), InternalError);
}

}  // namespace
}  // namespace sb::test
