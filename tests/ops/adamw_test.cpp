#include "ops/adamw.h"

#include <cmath>
#include <limits>

#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

class AdamWTest : public OpsTest {};
SB_INSTANTIATE_ON_ALL_DEVICES(AdamWTest);

constexpr AdamWStep kStep = {.learning_rate = 1e-2f,
                             .beta1 = 0.9f,
                             .beta2 = 0.95f,
                             .eps = 1e-8f,
                             .weight_decay = 0.1f,
                             .step = 1,
                             .gradient_scale = 0.5f};

TEST_P(AdamWTest, SeveralStepsMatchReference) {
  for (const int64_t n : {1, 3, 16, 17, 1009, 70001}) {
    SCOPED_TRACE(n);
    auto p = doubles(random_values(n, 1)), m = std::vector<double>(n), v = std::vector<double>(n);
    const TensorView pt = floats(random_values(n, 1), {n}), mt = filled_f32({n}, 0), vt = filled_f32({n}, 0);
    for (int64_t t = 1; t <= 3; ++t) {
      AdamWStep step = kStep;
      step.step = t;
      const auto g = random_values(n, 10 + static_cast<uint64_t>(t), 0.1);
      adamw_update(exec(), step, pt, floats(g, {n}), mt, vt);
      for (int64_t i = 0; i < n; ++i) {
        const double gi = g[i] * 0.5;
        p[i] *= 1 - 1e-2 * 0.1;
        m[i] = 0.9 * m[i] + 0.1 * gi;
        v[i] = 0.95 * v[i] + 0.05 * gi * gi;
        const double m_hat = m[i] / (1 - std::pow(0.9, t)), v_hat = v[i] / (1 - std::pow(0.95, t));
        p[i] -= 1e-2 * m_hat / (std::sqrt(v_hat) + 1e-8);
      }
      expect_close(host(pt), p, 1e-6, "parameters");
      expect_close(host(mt), m, 1e-6, "m");
      expect_close(host(vt), v, 2e-6, "v");
    }
  }
}

TEST_P(AdamWTest, FirstStepMovesByTheLearningRate) {
  // m̂ / sqrt(v̂) is the sign of the gradient, whatever its size.
  AdamWStep step = kStep;
  step.weight_decay = 0;
  const TensorView p = filled_f32({4}, 0), g = floats(std::vector<float>{1e-3f, -5.0f, 1e6f, -1e-4f}, {4});
  adamw_update(exec(), step, p, g, filled_f32({4}, 0), filled_f32({4}, 0));
  expect_close(host(p), {-1e-2, 1e-2, -1e-2, 1e-2}, 1e-3, "parameters");
}

TEST_P(AdamWTest, ZeroGradientOnlyDecays) {
  const TensorView p = filled_f32({19}, 2), zero = filled_f32({19}, 0);
  adamw_update(exec(), kStep, p, zero, filled_f32({19}, 0), filled_f32({19}, 0));
  expect_close(host(p), std::vector<double>(19, 2 * (1 - 1e-3)), 1e-7, "parameters");
}

TEST_P(AdamWTest, EqualBitsForAnyCutAndAnyNumberOfThreads) {
  const int64_t n = 140003;
  const auto p0 = random_values(n, 1), g = random_values(n, 2, 1e-3);
  ThreadPool one(1);
  Exec serial = exec();
  serial.pool = &one;
  const TensorView expected = floats(p0, {n}), m = filled_f32({n}, 0), v = filled_f32({n}, 0), gt = floats(g, {n});
  adamw_update(serial, kStep, expected, gt, m, v);
  const TensorView p = floats(p0, {n}), m2 = filled_f32({n}, 0), v2 = filled_f32({n}, 0);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 5}, {5, 70000}, {70000, n}}) {
    adamw_update(exec(), kStep, p.rows(begin, end), gt.rows(begin, end), m2.rows(begin, end), v2.rows(begin, end));
  }
  EXPECT_EQ(host(p), host(expected));
  EXPECT_EQ(host(m2), host(m));
  EXPECT_EQ(host(v2), host(v));
}

TEST_P(AdamWTest, RefusesWrongInput) {
  const TensorView a = filled_f32({4}, 0), b = filled_f32({5}, 0);
  EXPECT_THROW(adamw_update(exec(), kStep, a, b, a, a), InternalError);
  EXPECT_THROW(adamw_update(exec(), kStep, a, a, a, b), InternalError);
  AdamWStep zeroth = kStep;
  zeroth.step = 0;
  EXPECT_THROW(adamw_update(exec(), zeroth, a, a, a, a), InternalError);
}

TEST_P(AdamWTest, ManyRangesAtOnceEqualOneByOne) {
  // More ranges than one launch takes, some empty, borders on no grid, gaps between them.
  const int64_t n = 30011;
  std::vector<DecayRange> ranges;
  Random random(9);
  for (int64_t at = 0; at + 210 < n;) {
    const int64_t begin = at + static_cast<int64_t>(random.below(10)),
                  end = begin + static_cast<int64_t>(random.below(200));
    ranges.push_back({begin, end, random.below(2) == 0});
    at = end;
  }
  ranges.front() = {0, ranges.front().end, true};
  ASSERT_GT(ranges.size(), 250u);
  const auto p0 = random_values(n, 1), g = random_values(n, 2, 1e-3);
  const TensorView expected = floats(p0, {n}), m = filled_f32({n}, 0), v = filled_f32({n}, 0), gt = floats(g, {n}),
                   p = floats(p0, {n}), m2 = filled_f32({n}, 0), v2 = filled_f32({n}, 0);
  for (const DecayRange& range : ranges) {
    AdamWStep step = kStep;
    if (!range.decay) step.weight_decay = 0;
    const auto part = [&](const TensorView& tensor) { return tensor.rows(range.begin, range.end); };
    adamw_update(exec(), step, part(expected), part(gt), part(m), part(v));
  }
  adamw_update(exec(), kStep, ranges, {p, gt, m2, v2, {}, {}});
  EXPECT_EQ(host(p), host(expected));
  EXPECT_EQ(host(m2), host(m));
  EXPECT_EQ(host(v2), host(v));
  ranges[1].begin = 0;
  EXPECT_THROW(adamw_update(exec(), kStep, ranges, {p, gt, m2, v2, {}, {}}), InternalError);
}

TEST_P(AdamWTest, ClipsByTheNormWithoutTheHost) {
  const int64_t n = 5003;
  const auto p0 = random_values(n, 1), g = random_values(n, 2);
  const DecayRange all = {0, n, true};
  const TensorView gt = floats(g, {n}), clip = filled_f32({2}, NAN);
  const double norm = std::sqrt(squared_norm(exec(), gt));
  for (const double max_norm : {0.0, 1.0, 1e6}) {
    SCOPED_TRACE(max_norm);
    clip_by_norm(exec(), gt, max_norm, clip);
    EXPECT_FLOAT_EQ(host(clip)[1], static_cast<float>(norm));
    AdamWStep step = kStep;
    step.gradient_scale = max_norm == 1.0 ? static_cast<float>(1.0 / (norm + 1e-6)) : 1.0f;
    EXPECT_EQ(host(clip)[0], step.gradient_scale);
    const TensorView expected = floats(p0, {n}), p = floats(p0, {n});
    adamw_update(exec(), step, expected, gt, filled_f32({n}, 0), filled_f32({n}, 0));
    step.gradient_scale = 1;
    adamw_update(exec(), step, std::span(&all, 1), {p, gt, filled_f32({n}, 0), filled_f32({n}, 0), {}, clip});
    EXPECT_EQ(host(p), host(expected));
  }
  // A gradient that is not finite changes nothing.
  auto broken = g;
  broken[4711] = NAN;
  const TensorView p = floats(p0, {n}), m = filled_f32({n}, 0), bt = floats(broken, {n});
  clip_by_norm(exec(), bt, 1.0, clip);
  EXPECT_TRUE(std::isnan(host(clip)[1]));
  adamw_update(exec(), kStep, std::span(&all, 1), {p, bt, m, filled_f32({n}, 0), {}, clip});
  EXPECT_EQ(host(p), p0);
  EXPECT_EQ(host(m), std::vector<float>(static_cast<size_t>(n), 0.0f));
}

TEST_P(AdamWTest, WritesTheRoundedWeights) {
  if (dtype() != DType::bf16) GTEST_SKIP() << "fp32 computes with the parameters themselves";
  const int64_t n = 1011;
  const DecayRange ranges[] = {{0, 500, true}, {500, 1003, false}};
  const auto p0 = random_values(n, 1);
  const TensorView p = floats(p0, {n}), weights = filled({n}, 7), g = floats(random_values(n, 2), {n});
  round_parameters(exec(), p, weights);
  const std::vector<float> rounded = host(weights);
  for (int64_t i = 0; i < n; ++i) EXPECT_EQ(rounded[i], to_bf16(p0[i]));
  adamw_update(exec(), kStep, ranges, {p, g, filled_f32({n}, 0), filled_f32({n}, 0), weights, {}});
  const std::vector<float> now = host(weights), values = host(p);
  for (int64_t i = 0; i < n; ++i) EXPECT_EQ(now[i], to_bf16(values[i])) << i;
  EXPECT_NE(values[0], p0[0]);
  EXPECT_EQ(values[1003], p0[1003]);
}

TEST_P(AdamWTest, SquaredNormMatchesReference) {
  for (const int64_t n : {0, 1, 3, 15, 16, 17, 65536, 65537, 200003}) {
    const auto x = random_values(n, 3, 100.0);
    long double expected = 0;
    for (const float value : x) expected += static_cast<long double>(value) * value;
    const double actual = squared_norm(exec(), floats(x, {n}));
    EXPECT_NEAR(actual, static_cast<double>(expected), 1e-13 * static_cast<double>(expected)) << n;
    ThreadPool one(1);
    Exec serial = exec();
    serial.pool = &one;
    EXPECT_EQ(actual, squared_norm(serial, floats(x, {n}))) << n;
  }
}

// One of them empty.
TEST_P(AdamWTest, SquaredNormOfPiecesIsTheSumOfTheirsBitForBit) {
  const TensorView whole = floats(random_values(70001, 3), {70001});
  std::vector<TensorView> pieces;
  double sum = 0;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 16}, {16, 65553}, {65553, 65553}, {65554, 70001}}) {
    pieces.push_back(whole.rows(begin, end));
    sum += squared_norm(exec(), pieces.back());
  }
  EXPECT_EQ(squared_norm(exec(), pieces), sum);
  EXPECT_EQ(squared_norm(exec(), std::vector<TensorView>()), 0.0);
}

TEST_P(AdamWTest, SquaredNormSpeaksUpAboutNonFiniteValues) {
  EXPECT_EQ(squared_norm(exec(), filled_f32({3}, 1e30f)),
            3.0 * static_cast<double>(1e30f) * static_cast<double>(1e30f));
  auto x = random_values(70000, 1);
  x[69999] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(std::isinf(squared_norm(exec(), floats(x, {70000}))));
  x[3] = NAN;
  EXPECT_TRUE(std::isnan(squared_norm(exec(), floats(x, {70000}))));
}

}  // namespace
}  // namespace sb::test
