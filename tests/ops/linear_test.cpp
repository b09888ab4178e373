#include "ops/linear.h"

#include <cstdlib>

#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

struct Sizes {
  int64_t tokens, in, out;
};
// One element, odd, prime, a long product, wider than tall and the reverse, no tokens.
const std::vector<Sizes> kSizes = {{1, 1, 1},     {3, 17, 5},    {17, 1, 13},  {1, 64, 33},
                                   {67, 31, 129}, {257, 16, 48}, {64, 509, 3}, {0, 4, 3}};

// y[t, o] = Σ_i x[t, i]·w[o, i] + b[o]
std::vector<double> linear(const Sizes& s, const std::vector<double>& x, const std::vector<double>& w,
                           const std::vector<double>& b) {
  std::vector<double> y(static_cast<size_t>(s.tokens * s.out));
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t o = 0; o < s.out; ++o) {
      double sum = b.empty() ? 0.0 : b[o];
      for (int64_t i = 0; i < s.in; ++i) sum += x[t * s.in + i] * w[o * s.in + i];
      y[t * s.out + o] = sum;
    }
  }
  return y;
}

std::vector<double> plus(std::vector<double> a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

class LinearTest : public OpsTest {};
SB_INSTANTIATE_ON_ALL_DEVICES(LinearTest);

TEST_P(LinearTest, ForwardMatchesReference) {
  for (const Sizes& s : kSizes) {
    SCOPED_TRACE(::testing::Message() << s.tokens << "x" << s.in << "x" << s.out);
    const auto x = random_operand(s.tokens * s.in, 1), w = random_operand(s.out * s.in, 2),
               b = random_operand(s.out, 3);
    const auto before = random_operand(s.tokens * s.out, 4);
    const TensorView xt = tensor(x, {s.tokens, s.in}), wt = tensor(w, {s.out, s.in}), bt = tensor(b, {s.out});
    const auto plain = linear(s, doubles(x), doubles(w), {}), with_bias = linear(s, doubles(x), doubles(w), doubles(b));

    // In bf16, at sizes of no use to it, cuBLASLt rounds before it adds.
    const TensorView y = filled({s.tokens, s.out}, NAN);  // what was there must not matter
    linear_forward(exec(), xt, wt, {}, y);
    expect_close(host(y), plain, tolerance(2e-6), "plain");
    const TensorView yb = filled({s.tokens, s.out}, NAN);
    linear_forward(exec(), xt, wt, bt, yb);
    expect_close(host(yb), with_bias, tolerance(2e-6, 2), "bias");
    const TensorView ya = tensor(before, {s.tokens, s.out});
    linear_forward(exec(), xt, wt, {}, ya, ya);
    expect_close(host(ya), plus(plain, before), tolerance(2e-6, 2), "accumulate");
    const TensorView yba = filled({s.tokens, s.out}, NAN);  // the residual lies elsewhere
    linear_forward(exec(), xt, wt, bt, yba, tensor(before, {s.tokens, s.out}));
    expect_close(host(yba), plus(with_bias, before), tolerance(2e-6, 2), "bias and accumulate");
  }
}

TEST_P(LinearTest, BackwardMatchesFiniteDifferences) {
  for (const Sizes& s : {Sizes{1, 1, 1}, Sizes{3, 17, 5}, Sizes{7, 2, 3}}) {
    SCOPED_TRACE(::testing::Message() << s.tokens << "x" << s.in << "x" << s.out);
    const auto x = random_operand(s.tokens * s.in, 1), w = random_operand(s.out * s.in, 2),
               b = random_operand(s.out, 3);
    const auto dy = random_operand(s.tokens * s.out, 4);
    const auto expected_dx = numeric_gradient(
        [&](const auto& v) { return dot(linear(s, v, doubles(w), doubles(b)), doubles(dy)); }, doubles(x));
    const auto expected_dw = numeric_gradient(
        [&](const auto& v) { return dot(linear(s, doubles(x), v, doubles(b)), doubles(dy)); }, doubles(w));
    const auto expected_db = numeric_gradient(
        [&](const auto& v) { return dot(linear(s, doubles(x), doubles(w), v), doubles(dy)); }, doubles(b));

    const TensorView dyt = tensor(dy, {s.tokens, s.out});
    const TensorView dx = filled({s.tokens, s.in}, NAN);
    linear_backward_input(exec(), dyt, tensor(w, {s.out, s.in}), dx);
    expect_close(host(dx), expected_dx, tolerance(2e-6), "dx");
    const TensorView dw = filled_f32({s.out, s.in}, 0), db = filled_f32({s.out}, 0);
    linear_backward_weight(exec(), tensor(x, {s.tokens, s.in}), dyt, dw, db);
    expect_close(host(dw), expected_dw, 2e-6, "dweight");
    expect_close(host(db), expected_db, 2e-6, "dbias");
  }
}

TEST_P(LinearTest, BackwardAccumulatesAtAllSizes) {
  for (const Sizes& s : kSizes) {
    SCOPED_TRACE(::testing::Message() << s.tokens << "x" << s.in << "x" << s.out);
    const auto x = random_operand(s.tokens * s.in, 1), w = random_operand(s.out * s.in, 2);
    const auto dy = random_operand(s.tokens * s.out, 4);
    const auto dx0 = random_operand(s.tokens * s.in, 5), dw0 = random_values(s.out * s.in, 6),
               db0 = random_values(s.out, 7);
    std::vector<double> dx(x.size()), dw(w.size()), db(static_cast<size_t>(s.out));
    for (int64_t t = 0; t < s.tokens; ++t) {
      for (int64_t o = 0; o < s.out; ++o) {
        const double g = dy[t * s.out + o];
        db[o] += g;
        for (int64_t i = 0; i < s.in; ++i) {
          dx[t * s.in + i] += g * w[o * s.in + i];
          dw[o * s.in + i] += g * x[t * s.in + i];
        }
      }
    }
    const TensorView dyt = tensor(dy, {s.tokens, s.out}), xt = tensor(x, {s.tokens, s.in}),
                     wt = tensor(w, {s.out, s.in});
    const TensorView dxt = tensor(dx0, {s.tokens, s.in}), dwt = floats(dw0, {s.out, s.in}), dbt = floats(db0, {s.out});
    linear_backward_input(exec(), dyt, wt, dxt, true);
    linear_backward_weight(exec(), xt, dyt, dwt, dbt);
    expect_close(host(dxt), plus(dx, dx0), tolerance(3e-6, 2), "dx");
    expect_close(host(dwt), plus(dw, dw0), 3e-6, "dweight");
    expect_close(host(dbt), plus(db, db0), 3e-6, "dbias");
    const TensorView alone = filled_f32({s.out, s.in}, 0), written = filled_f32({s.out, s.in}, NAN);
    linear_backward_weight(exec(), xt, dyt, alone, {});
    expect_close(host(alone), dw, 3e-6, "dweight without bias");
    linear_backward_weight(exec(), xt, dyt, written, {}, /*accumulate=*/false);
    EXPECT_EQ(host(written), host(alone)) << "written instead of added to zeros";
  }
}

// Enough of them, and of outputs, for CUDA to choose by another rule among the library's proposals.
TEST_P(LinearTest, ManyTokens) {
  const Sizes s = {16409, 24, 168};
  const auto x = random_operand(s.tokens * s.in, 1), w = random_operand(s.out * s.in, 2), b = random_operand(s.out, 3),
             dy = random_operand(s.tokens * s.out, 4);
  std::vector<double> dx(x.size()), dw(w.size());
  for (int64_t t = 0; t < s.tokens; ++t) {
    for (int64_t o = 0; o < s.out; ++o) {
      for (int64_t i = 0; i < s.in; ++i) {
        dx[t * s.in + i] += static_cast<double>(dy[t * s.out + o]) * w[o * s.in + i];
        dw[o * s.in + i] += static_cast<double>(dy[t * s.out + o]) * x[t * s.in + i];
      }
    }
  }
  const TensorView xt = tensor(x, {s.tokens, s.in}), wt = tensor(w, {s.out, s.in}), dyt = tensor(dy, {s.tokens, s.out});
  const TensorView y = filled({s.tokens, s.out}, NAN), dxt = filled({s.tokens, s.in}, NAN);
  linear_forward(exec(), xt, wt, tensor(b, {s.out}), y);
  expect_close(host(y), linear(s, doubles(x), doubles(w), doubles(b)), tolerance(2e-6, 2), "y");
  linear_backward_input(exec(), dyt, wt, dxt);
  expect_close(host(dxt), dx, tolerance(2e-6), "dx");
  const TensorView dwt = filled_f32({s.out, s.in}, 0);
  linear_backward_weight(exec(), xt, dyt, dwt, {});
  expect_close(host(dwt), dw, 1e-4, "dweight");  // a long sum in fp32
}

// The same for gradients of large weights, sums of many terms, which have a rule of their own. A few tokens repeat, so
// that the reference does not take minutes, with signs drawn at random, so that no sum grows with their number.
TEST_P(LinearTest, ManyTokensForManyWeights) {
  if (std::getenv("SB_TEST_SHORT") != nullptr) GTEST_SKIP() << "too many products for a sanitizer";
  constexpr int64_t kTokens = 16409, kIn = 2048, kOut = 2048, kDifferent = 7;
  const auto x = random_operand(kDifferent * kIn, 1), dy = random_operand(kDifferent * kOut, 2);
  const auto draws = random_values(kTokens, 3);
  std::vector<float> all_x, all_dy;
  all_x.reserve(kTokens * kIn);
  all_dy.reserve(kTokens * kOut);
  double times[kDifferent] = {};
  for (int64_t t = 0; t < kTokens; ++t) {
    const int64_t p = t % kDifferent;
    const float sign = draws[t] < 0 ? -1 : 1;
    times[p] += sign;
    all_x.insert(all_x.end(), x.begin() + p * kIn, x.begin() + (p + 1) * kIn);
    for (int64_t o = 0; o < kOut; ++o) all_dy.push_back(sign * dy[p * kOut + o]);
  }
  std::vector<double> dw(kOut * kIn, 1.0);  // what was there is added to
  for (int64_t p = 0; p < kDifferent; ++p) {
    for (int64_t o = 0; o < kOut; ++o) {
      const double factor = times[p] * dy[p * kOut + o];
      for (int64_t i = 0; i < kIn; ++i) dw[o * kIn + i] += factor * x[p * kIn + i];
    }
  }
  const TensorView dwt = filled_f32({kOut, kIn}, 1);
  linear_backward_weight(exec(), tensor(all_x, {kTokens, kIn}), tensor(all_dy, {kTokens, kOut}), dwt, {});
  expect_close(host(dwt), dw, 3e-4, "dweight");  // a long sum in fp32
}

TEST_P(LinearTest, RepeatedProductGivesTheSameBits) {
  const auto x = random_operand(93 * 61, 1), w = random_operand(47 * 61, 2);
  const TensorView xt = tensor(x, {93, 61}), wt = tensor(w, {47, 61});
  const TensorView first = filled({93, 47}, 0), second = filled({93, 47}, 1);
  linear_forward(exec(), xt, wt, {}, first);
  linear_forward(exec(), xt, wt, {}, second);
  EXPECT_EQ(host(first), host(second));
}

TEST_P(LinearTest, RefusesWrongShapes) {
  const TensorView x = filled({3, 4}, 0), w = filled({5, 4}, 0), y = filled({3, 5}, 0);
  EXPECT_THROW(linear_forward(exec(), x, filled({5, 3}, 0), {}, y), InternalError);
  EXPECT_THROW(linear_forward(exec(), x, w, filled({4}, 0), y), InternalError);
  EXPECT_THROW(linear_forward(exec(), x, w, {}, filled({3, 4}, 0)), InternalError);
  EXPECT_THROW(linear_backward_input(exec(), y, w, filled({3, 5}, 0)), InternalError);
  EXPECT_THROW(linear_backward_weight(exec(), x, y, filled_f32({4, 5}, 0), {}), InternalError);
  EXPECT_THROW(linear_forward(exec(), x, w, {}, y, x), InternalError);
  EXPECT_THROW(linear_forward(exec(), x, w, {}, tensor(std::vector<int32_t>(15), {3, 5})), InternalError);
}

#ifndef SB_TEST_CUDA
TEST(WithoutCuda, OperationsSayHowToGetIt) {
  ThreadPool pool(1);
  const Exec exec = {.device = DeviceKind::cuda, .pool = &pool};
  float memory[1] = {};
  const TensorView one(memory, DType::f32, {1, 1}, DeviceKind::cuda);
  try {
    linear_forward(exec, one, one, {}, one);
    FAIL() << "ran on CUDA";
  } catch (const UserError& error) {
    EXPECT_NE(std::string(error.what()).find("built without CUDA"), std::string::npos);
  }
}
#endif

}  // namespace
}  // namespace sb::test
