#include "ops/rmsnorm.h"

#include <cmath>

#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

constexpr double kEps = 1e-6;

std::vector<double> rmsnorm(int64_t width, const std::vector<double>& x, const std::vector<double>& w,
                            double eps = kEps) {
  std::vector<double> y(x.size());
  for (size_t row = 0; row < x.size(); row += width) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += x[row + i] * x[row + i];
    for (int64_t i = 0; i < width; ++i) {
      y[row + i] = x[row + i] / std::sqrt(squares / static_cast<double>(width) + eps) * w[i];
    }
  }
  return y;
}

class RmsNormTest : public OpsTest {};
SB_INSTANTIATE_ON_ALL_DEVICES(RmsNormTest);

TEST_P(RmsNormTest, ForwardMatchesReference) {
  for (const int64_t rows : {0, 1, 3, 129}) {
    for (const int64_t width : {1, 3, 8, 16, 17, 64, 127, 512, 1031}) {
      SCOPED_TRACE(::testing::Message() << rows << "x" << width);
      const auto x = random_operand(rows * width, 1, 3.0), w = random_operand(width, 2);
      const TensorView y = filled({rows, width}, NAN), rstd = filled_f32({rows}, NAN);
      rmsnorm_forward(exec(), tensor(x, {rows, width}), tensor(w, {width}), kEps, y, rstd);
      expect_close(host(y), rmsnorm(width, doubles(x), doubles(w)), tolerance(1e-6), "y");
      for (int64_t t = 0; t < rows; ++t) {
        double squares = 0;
        for (int64_t i = 0; i < width; ++i) squares += static_cast<double>(x[t * width + i]) * x[t * width + i];
        EXPECT_NEAR(host(rstd)[t] * std::sqrt(squares / static_cast<double>(width) + kEps), 1.0, 1e-6);
      }
    }
  }
}

TEST_P(RmsNormTest, ZerosAndLargeValuesStayFinite) {
  const TensorView y = filled({2, 19}, NAN), rstd = filled_f32({2}, NAN), w = filled({19}, 1);
  std::vector<float> x(38, 0.0f);
  std::fill(x.begin() + 19, x.end(), 1e18f);  // squares to 1e36
  rmsnorm_forward(exec(), tensor(x, {2, 19}), w, kEps, y, rstd);
  for (int i = 0; i < 19; ++i) {
    EXPECT_EQ(host(y)[i], 0.0f);
    EXPECT_NEAR(host(y)[19 + i], 1.0f, 1e-5);
  }
}

TEST_P(RmsNormTest, BackwardMatchesFiniteDifferences) {
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{1, 1}, {1, 2}, {3, 17}, {5, 40}, {131, 3}}) {
    SCOPED_TRACE(::testing::Message() << rows << "x" << width);
    const auto x = random_operand(rows * width, 1), w = random_operand(width, 2), dy = random_operand(rows * width, 3);
    // A large eps, so that its part in the gradient would be missed if it were wrong.
    const float eps = 0.3f;
    const auto expected_dx = numeric_gradient(
        [&, width = width](const auto& v) { return dot(rmsnorm(width, v, doubles(w), eps), doubles(dy)); }, doubles(x));
    const auto expected_dw = numeric_gradient(
        [&, width = width](const auto& v) { return dot(rmsnorm(width, doubles(x), v, eps), doubles(dy)); }, doubles(w));
    const TensorView xt = tensor(x, {rows, width}), wt = tensor(w, {width}), y = filled({rows, width}, 0),
                     rstd = filled_f32({rows}, 0), dyt = tensor(dy, {rows, width});
    rmsnorm_forward(exec(), xt, wt, eps, y, rstd);

    const TensorView dx = filled({rows, width}, NAN), dw = filled_f32({width}, 0);
    rmsnorm_backward(exec(), xt, wt, rstd, dyt, dx, false, dw);
    expect_close(host(dx), expected_dx, tolerance(1e-5), "dx");
    expect_close(host(dw), expected_dw, 1e-5, "dweight");

    // Both accumulate onto what is there.
    const auto before = random_operand(rows * width, 4), before_w = random_operand(width, 5);
    auto sum_dx = expected_dx, sum_dw = expected_dw;
    for (size_t i = 0; i < sum_dx.size(); ++i) sum_dx[i] += before[i];
    for (size_t i = 0; i < sum_dw.size(); ++i) sum_dw[i] += before_w[i];
    const TensorView dxa = tensor(before, {rows, width}), dwa = floats(before_w, {width});
    rmsnorm_backward(exec(), xt, wt, rstd, dyt, dxa, true, dwa);
    expect_close(host(dxa), sum_dx, tolerance(1e-5), "dx accumulated");
    expect_close(host(dwa), sum_dw, 1e-5, "dweight accumulated");

    // In place on dy.
    const TensorView dwi = filled_f32({width}, 0);
    rmsnorm_backward(exec(), xt, wt, rstd, dyt, dyt, false, dwi);
    EXPECT_EQ(host(dyt), host(dx));
    EXPECT_EQ(host(dwi), host(dw));
  }
}

TEST_P(RmsNormTest, WeightGradientDoesNotDependOnThreads) {
  const int64_t rows = 1003, width = 37;
  const auto x = random_operand(rows * width, 1), w = random_operand(width, 2), dy = random_operand(rows * width, 3);
  std::vector<std::vector<float>> results;
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    Exec other = exec();
    other.pool = &pool;
    const TensorView xt = tensor(x, {rows, width}), wt = tensor(w, {width}), y = filled({rows, width}, 0),
                     rstd = filled_f32({rows}, 0), dw = filled_f32({width}, 0);
    rmsnorm_forward(other, xt, wt, kEps, y, rstd);
    rmsnorm_backward(other, xt, wt, rstd, tensor(dy, {rows, width}), y, false, dw);
    results.push_back(host(dw));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST_P(RmsNormTest, WideRows) {
  // Widths of real models, on both sides of what a block of CUDA threads has; rows for several rounds of all blocks.
  for (const auto& [rows, width] :
       {std::pair<int64_t, int64_t>{1101, 896}, {100, 1536}, {603, 2048}, {280, 3584}, {270, 5120}, {100, 5632}}) {
    SCOPED_TRACE(::testing::Message() << rows << "x" << width);
    const auto x = random_operand(rows * width, 1), w = random_operand(width, 2), dy = random_operand(rows * width, 3);
    std::vector<double> dx(x.size()), dw(w.size());
    for (int64_t t = 0; t < rows; ++t) {
      double squares = 0, product = 0;
      for (int64_t i = 0; i < width; ++i) {
        squares += static_cast<double>(x[t * width + i]) * x[t * width + i];
        product += static_cast<double>(x[t * width + i]) * dy[t * width + i] * w[i];
      }
      const double r = 1 / std::sqrt(squares / static_cast<double>(width) + kEps);
      for (int64_t i = 0; i < width; ++i) {
        const double g = dy[t * width + i], value = x[t * width + i];
        dx[t * width + i] = r * g * w[i] - value * r * r * r * product / static_cast<double>(width);
        dw[i] += g * value * r;
      }
    }
    const TensorView xt = tensor(x, {rows, width}), wt = tensor(w, {width}), y = filled({rows, width}, NAN),
                     rstd = filled_f32({rows}, NAN), got = filled({rows, width}, NAN), gotw = filled_f32({width}, 0);
    rmsnorm_forward(exec(), xt, wt, kEps, y, rstd);
    expect_close(host(y), rmsnorm(width, doubles(x), doubles(w)), tolerance(1e-6), "y");
    const TensorView dyt = tensor(dy, {rows, width});
    rmsnorm_backward(exec(), xt, wt, rstd, dyt, got, false, gotw);
    expect_close(host(got), dx, tolerance(1e-5), "dx");
    expect_close(host(gotw), dw, 1e-5, "dweight");
    const auto before = random_operand(rows * width, 4);
    auto sum = dx;
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += before[i];
    const TensorView added = tensor(before, {rows, width}), again = filled_f32({width}, 0);
    rmsnorm_backward(exec(), xt, wt, rstd, dyt, added, true, again);
    expect_close(host(added), sum, tolerance(1e-5), "dx accumulated");
    EXPECT_EQ(host(again), host(gotw));
    rmsnorm_backward(exec(), xt, wt, rstd, dyt, dyt, false, again);
    EXPECT_EQ(host(dyt), host(got)) << "in place on dy";
  }
}

TEST_P(RmsNormTest, NoRowsLeaveTheWeightGradientAlone) {
  const TensorView none = filled({0, 5}, 0), no_rstd = filled_f32({0}, 0), w = filled({5}, 1), dw = filled_f32({5}, 2);
  rmsnorm_backward(exec(), none, w, no_rstd, none, none, false, dw);
  EXPECT_EQ(host(dw), std::vector<float>(5, 2.0f));
}

TEST_P(RmsNormTest, RefusesWrongShapes) {
  const TensorView x = filled({3, 4}, 0), w = filled({4}, 0), rstd = filled_f32({3}, 0), dw = filled_f32({4}, 0);
  EXPECT_THROW(rmsnorm_forward(exec(), x, filled({3}, 0), kEps, x, rstd), InternalError);
  EXPECT_THROW(rmsnorm_forward(exec(), x, w, kEps, filled({4, 3}, 0), rstd), InternalError);
  EXPECT_THROW(rmsnorm_forward(exec(), x, w, kEps, x, w), InternalError);
  EXPECT_THROW(rmsnorm_backward(exec(), x, w, rstd, filled({3, 5}, 0), x, false, dw), InternalError);
  const TensorView dy = filled({3, 4}, 0);
  EXPECT_THROW(rmsnorm_backward(exec(), x, w, rstd, dy, dy, true, dw), InternalError);  // alias and accumulate
}

}  // namespace
}  // namespace sb::test
