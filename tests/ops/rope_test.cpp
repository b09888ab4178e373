#include "ops/rope.h"

#include <cmath>
#include <map>
#include <tuple>

#include "tests/ops/ops_fixture.h"

namespace sb::test {
namespace {

void expect_frequencies(const RopeFrequencies& actual, const std::map<int, double>& expected) {
  for (const auto& [channel, value] : expected) {
    EXPECT_NEAR(actual.inverse[channel], value, 1e-13 * value) << "channel " << channel;
  }
}

TEST(RopeFrequencies, StandardIsThePowerOfTheta) {
  const RopeFrequencies f = rope_frequencies({.theta = 10000.0}, 8);
  ASSERT_EQ(f.inverse.size(), 4u);
  expect_frequencies(f, {{0, 1.0}, {1, 0.1}, {2, 0.01}, {3, 0.001}});
  EXPECT_EQ(f.attention_scaling, 1.0);
}

TEST(RopeFrequencies, LinearDividesAllByTheFactor) {
  const RopeFrequencies f = rope_frequencies({.type = RopeConfig::Type::linear, .theta = 10000.0, .factor = 8.0}, 8);
  expect_frequencies(f, {{0, 0.125}, {1, 0.0125}, {2, 0.00125}, {3, 0.000125}});
  EXPECT_EQ(f.attention_scaling, 1.0);
}

// Worked out apart from the program, from the published formula: with x = theta^(-2i/d) and wavelength w = 2π/x, x
// stays for w < context/high, becomes x/factor for w > context/low, and in between (1-s)·x/factor + s·x with s =
// (context/w - low) / (high - low). The setting is Llama 3.1's: channels 29 … 35 lie in between.
TEST(RopeFrequencies, Llama3KeepsShortStretchesLongBlendsBetween) {
  const RopeFrequencies f = rope_frequencies({.type = RopeConfig::Type::llama3,
                                              .theta = 500000.0,
                                              .factor = 8.0,
                                              .original_max_position_embeddings = 8192,
                                              .low_freq_factor = 1.0,
                                              .high_freq_factor = 4.0},
                                             128);
  expect_frequencies(f, {{0, 1.0},
                         {1, 0.8146172338565447},
                         {28, 0.003211445994752591},
                         {29, 0.002166570763503359},
                         {30, 0.0013718935677611381},
                         {32, 0.0005248461609929547},
                         {34, 0.0001785078127679964},
                         {35, 9.556212353964683e-05},
                         {36, 7.78465527393245e-05},
                         {63, 3.068925988914511e-07}});
  EXPECT_EQ(f.attention_scaling, 1.0);
}

RopeConfig yarn(double theta, double factor, int64_t context) {
  return {
      .type = RopeConfig::Type::yarn, .theta = theta, .factor = factor, .original_max_position_embeddings = context};
}

// Worked out apart from the program: channel number c(r) = d·ln(context / (2π·r)) / (2·ln theta) turns r times over the
// context. For Qwen2.5's setting c(32) = 23.596 and c(1) = 39.651: rounded outwards the ramp runs from 23 to 40.
TEST(RopeFrequencies, YarnRampsBetweenWholeChannels) {
  const RopeFrequencies f = rope_frequencies(yarn(1e6, 4.0, 32768), 128);
  expect_frequencies(f, {{0, 1.0},
                         {1, 0.8058421877614819},
                         {22, 0.008659643233600654},
                         {23, 0.006978305848598663},
                         {24, 0.005375321490790102},
                         {30, 0.001064360981247002},
                         {36, 0.0001798411558739542},
                         {39, 6.490394320837029e-05},
                         {40, 4.445698525097307e-05},
                         {41, 3.582531425592407e-05},
                         {63, 3.102344401879299e-07}});
  EXPECT_NEAR(f.attention_scaling, 1.138629436111989, 1e-15);  // 0.1·ln 4 + 1
}

TEST(RopeFrequencies, YarnWithoutTruncationRampsBetweenFractions) {
  RopeConfig config = yarn(1e6, 4.0, 32768);
  config.truncate = false;
  expect_frequencies(rope_frequencies(config, 128), {{22, 0.008659643233600654},
                                                     {23, 0.006978305848598663},
                                                     {24, 0.0055172704751341225},
                                                     {30, 0.0010792377416765538},
                                                     {36, 0.00017734424630684023},
                                                     {39, 6.187806812450695e-05},
                                                     {40, 4.445698525097307e-05}});
}

TEST(RopeFrequencies, YarnOfASmallModel) {
  const RopeFrequencies f = rope_frequencies(yarn(1e4, 16.0, 4096), 64);  // ramp from 10 to 23
  expect_frequencies(f, {{5, 0.23713737056616552},
                         {10, 0.05623413251903491},
                         {12, 0.027061799207210167},
                         {20, 0.0008817889629315672},
                         {22, 0.00023938376673600874},
                         {25, 4.686838808327849e-05},
                         {31, 8.334508951020775e-06}});
  EXPECT_NEAR(f.attention_scaling, 1.2772588722239782, 1e-15);  // 0.1·ln 16 + 1
}

TEST(RopeFrequencies, YarnRampStaysInsideTheHead) {
  // Below: c(32) and c(1) are negative for so short a context; the ramp shrinks to channel 0 and stretches the others.
  expect_frequencies(rope_frequencies(yarn(10000.0, 2.0, 4), 8), {{0, 1.0}, {1, 0.05}, {2, 0.005}, {3, 0.0005}});
  // Above: c(32) = 2.01 and c(1) = 8.03; the ramp runs from 2 to d - 1 = 7, not to 9.
  expect_frequencies(rope_frequencies(yarn(10.0, 2.0, 640), 8),
                     {{1, std::pow(10.0, -0.25)}, {2, std::pow(10.0, -0.5)}, {3, 0.9 * std::pow(10.0, -0.75)}});
}

TEST(RopeFrequencies, YarnAttentionFactorCanBeGivenOrComeFromMscale) {
  RopeConfig config = yarn(10000.0, 40.0, 4096);
  EXPECT_NEAR(rope_frequencies(config, 64).attention_scaling, 0.1 * std::log(40.0) + 1.0, 1e-15);
  config.mscale = 0.707;
  EXPECT_NEAR(rope_frequencies(config, 64).attention_scaling, 0.1 * std::log(40.0) + 1.0, 1e-15);  // both are needed
  config.mscale_all_dim = 1.0;
  EXPECT_NEAR(rope_frequencies(config, 64).attention_scaling, 0.9210423553163399, 1e-15);
  config.attention_factor = 0.75;
  EXPECT_EQ(rope_frequencies(config, 64).attention_scaling, 0.75);
  EXPECT_EQ(rope_frequencies(yarn(10000.0, 1.0, 4096), 64).attention_scaling, 1.0);  // nothing stretched
}

TEST(RopeFrequencies, RefusesWhatItCannotCompute) {
  EXPECT_THROW(rope_frequencies({}, 7), InternalError);
  EXPECT_THROW(rope_frequencies({.type = RopeConfig::Type::llama3, .factor = 8.0}, 8), InternalError);
  EXPECT_THROW(rope_frequencies({.type = RopeConfig::Type::yarn, .factor = 8.0}, 8), InternalError);
  EXPECT_THROW(rope_frequencies({.factor = 0.0}, 8), InternalError);
}

TEST(RopeTable, HoldsScaledCosinesAndSinesEvenFarOut) {
  RopeFrequencies f = rope_frequencies({.theta = 1e6}, 4);
  f.attention_scaling = 1.25;
  const int64_t positions = 262144;
  std::vector<float> cos(static_cast<size_t>(positions * 2)), sin(cos.size());
  rope_fill_table(f, positions, {cos.data(), Shape{positions, 2}}, {sin.data(), Shape{positions, 2}});
  for (const int64_t p : {int64_t{0}, int64_t{1}, int64_t{17}, int64_t{65537}, positions - 1}) {
    EXPECT_NEAR(cos[p * 2], 1.25 * std::cos(static_cast<double>(p)), 1e-7) << p;
    EXPECT_NEAR(sin[p * 2], 1.25 * std::sin(static_cast<double>(p)), 1e-7) << p;
    EXPECT_NEAR(cos[p * 2 + 1], 1.25 * std::cos(static_cast<double>(p) * 1e-3), 1e-7) << p;
    EXPECT_NEAR(sin[p * 2 + 1], 1.25 * std::sin(static_cast<double>(p) * 1e-3), 1e-7) << p;
  }
  EXPECT_THROW(rope_fill_table(f, 3, {cos.data(), Shape{3, 4}}, {sin.data(), Shape{3, 2}}), InternalError);
}

// The fused operation against a plain one in fp64.
struct Reference {
  QkvShape shape = {};
  std::vector<int32_t> positions;
  std::vector<double> inverse;
  double eps = 1e-6;

  struct Result {
    std::vector<double> q, k, v;
  };
  // Empty norms: none.
  Result run(const std::vector<double>& qkv, const std::vector<double>& q_norm,
             const std::vector<double>& k_norm) const {
    Result result;
    const int64_t d = shape.head_dim;
    const int heads = shape.heads + 2 * shape.kv_heads;
    for (size_t t = 0; t < positions.size(); ++t) {
      for (int h = 0; h < heads; ++h) {
        std::vector<double> x(qkv.begin() + (t * heads + h) * d, qkv.begin() + (t * heads + h + 1) * d);
        const bool is_q = h < shape.heads, is_v = h >= shape.heads + shape.kv_heads;
        if (is_v) {
          result.v.insert(result.v.end(), x.begin(), x.end());
          continue;
        }
        const std::vector<double>& norm = is_q ? q_norm : k_norm;
        if (!norm.empty()) {
          double squares = 0;
          for (const double value : x) squares += value * value;
          for (int64_t c = 0; c < d; ++c) x[c] *= norm[c] / std::sqrt(squares / static_cast<double>(d) + eps);
        }
        std::vector<double>& out = is_q ? result.q : result.k;
        for (int64_t c = 0; c < d; ++c) {
          const int64_t pair = c % (d / 2);
          const double angle = positions[t] * inverse[pair];
          const double other = c < d / 2 ? -x[c + d / 2] : x[c - d / 2];
          out.push_back(x[c] * std::cos(angle) + other * std::sin(angle));
        }
      }
    }
    return result;
  }
};

class QkvRopeTest : public OpsTest {
 protected:
  struct Case {
    Reference reference;
    int64_t tokens = 0;
    std::vector<float> qkv, q_norm, k_norm;
    TensorView positions, cos, sin;
  };
  Case make(const QkvShape& shape, int64_t tokens) {
    Case c;
    c.reference.shape = shape;
    c.tokens = tokens;
    const RopeFrequencies f = rope_frequencies({.theta = 100.0}, shape.head_dim);
    c.reference.inverse = f.inverse;
    for (int64_t t = 0; t < tokens; ++t) c.reference.positions.push_back(static_cast<int32_t>((t * 7) % 23));
    const Shape table = {23, shape.head_dim / 2};
    std::vector<float> cos(static_cast<size_t>(table.elements()), NAN), sin(cos);
    rope_fill_table(f, 23, {cos.data(), table}, {sin.data(), table});
    c.cos = floats(cos, table);
    c.sin = floats(sin, table);
    c.positions = tensor(c.reference.positions, {tokens});
    c.qkv = random_operand(tokens * shape.width(), 1);
    c.q_norm = random_operand(shape.head_dim, 2);
    c.k_norm = random_operand(shape.head_dim, 3);
    return c;
  }
};
SB_INSTANTIATE_ON_ALL_DEVICES(QkvRopeTest);

const std::vector<QkvShape> kShapes = {{1, 1, 2}, {2, 1, 6}, {3, 3, 10}, {4, 2, 64}, {6, 2, 34}, {2, 1, 128}};

TEST_P(QkvRopeTest, ForwardMatchesReference) {
  for (const QkvShape& shape : kShapes) {
    for (const int64_t tokens : {0, 1, 3, 67}) {
      for (const bool norm : {false, true}) {
        SCOPED_TRACE(::testing::Message() << shape.heads << ":" << shape.kv_heads << " of " << shape.head_dim << ", "
                                          << tokens << " tokens, norm " << norm);
        const Case c = make(shape, tokens);
        const TensorView q = filled({tokens, shape.heads, shape.head_dim}, NAN),
                         k = filled({tokens, shape.kv_heads, shape.head_dim}, NAN),
                         v = filled({tokens, shape.kv_heads, shape.head_dim}, NAN);
        TensorView qn, kn, rq, rk;
        if (norm) {
          qn = tensor(c.q_norm, {shape.head_dim});
          kn = tensor(c.k_norm, {shape.head_dim});
          rq = filled_f32({tokens, shape.heads}, NAN);
          rk = filled_f32({tokens, shape.kv_heads}, NAN);
        }
        qkv_rope_forward(exec(), shape, tensor(c.qkv, {tokens, shape.width()}), c.positions, c.cos, c.sin, qn, kn,
                         1e-6f, q, k, v, rq, rk);
        const auto expected = c.reference.run(doubles(c.qkv), norm ? doubles(c.q_norm) : std::vector<double>{},
                                              norm ? doubles(c.k_norm) : std::vector<double>{});
        expect_close(host(q), expected.q, tolerance(1e-6), "q");
        expect_close(host(k), expected.k, tolerance(1e-6), "k");
        expect_close(host(v), expected.v, 1e-9, "v");
      }
    }
  }
}

TEST_P(QkvRopeTest, BackwardMatchesFiniteDifferences) {
  for (const QkvShape& shape : {QkvShape{1, 1, 2}, QkvShape{2, 1, 6}, QkvShape{3, 1, 34}}) {
    for (const bool norm : {false, true}) {
      SCOPED_TRACE(::testing::Message() << shape.heads << ":" << shape.kv_heads << " of " << shape.head_dim << ", norm "
                                        << norm);
      const int64_t tokens = 3, d = shape.head_dim;
      const Case c = make(shape, tokens);
      const auto dq = random_operand(tokens * shape.heads * d, 11),
                 dk = random_operand(tokens * shape.kv_heads * d, 12),
                 dv = random_operand(tokens * shape.kv_heads * d, 13);
      const auto objective = [&](const std::vector<double>& qkv, const std::vector<double>& qn,
                                 const std::vector<double>& kn) {
        const auto r = c.reference.run(qkv, qn, kn);
        return dot(r.q, doubles(dq)) + dot(r.k, doubles(dk)) + dot(r.v, doubles(dv));
      };
      const auto qn64 = norm ? doubles(c.q_norm) : std::vector<double>{},
                 kn64 = norm ? doubles(c.k_norm) : std::vector<double>{};
      const auto expected = numeric_gradient([&](const auto& x) { return objective(x, qn64, kn64); }, doubles(c.qkv));

      const TensorView dqt = tensor(dq, {tokens, shape.heads, d}), dkt = tensor(dk, {tokens, shape.kv_heads, d}),
                       dvt = tensor(dv, {tokens, shape.kv_heads, d}), dqkv = filled({tokens, shape.width()}, NAN);
      if (!norm) {
        qkv_rope_backward(exec(), shape, dqt, dkt, dvt, c.positions, c.cos, c.sin, {}, {}, {}, {}, {}, dqkv, {}, {});
        expect_close(host(dqkv), expected, tolerance(1e-5), "dqkv");
        continue;
      }
      const TensorView qkv = tensor(c.qkv, {tokens, shape.width()}), qn = tensor(c.q_norm, {d}),
                       kn = tensor(c.k_norm, {d}), rq = filled_f32({tokens, shape.heads}, NAN),
                       rk = filled_f32({tokens, shape.kv_heads}, NAN), q = filled({tokens, shape.heads, d}, 0),
                       k = filled({tokens, shape.kv_heads, d}, 0), v = filled({tokens, shape.kv_heads, d}, 0);
      qkv_rope_forward(exec(), shape, qkv, c.positions, c.cos, c.sin, qn, kn, 1e-6f, q, k, v, rq, rk);
      const TensorView dqn = filled_f32({d}, 1), dkn = filled_f32({d}, 2);  // accumulate
      qkv_rope_backward(exec(), shape, dqt, dkt, dvt, c.positions, c.cos, c.sin, qkv, qn, kn, rq, rk, dqkv, dqn, dkn);
      auto expected_qn = numeric_gradient([&](const auto& x) { return objective(doubles(c.qkv), x, kn64); }, qn64);
      auto expected_kn = numeric_gradient([&](const auto& x) { return objective(doubles(c.qkv), qn64, x); }, kn64);
      for (double& value : expected_qn) value += 1;
      for (double& value : expected_kn) value += 2;
      // With two channels the normalised head is nearly constant and its gradient a difference of equal numbers.
      expect_close(host(dqkv), expected, tolerance(d == 2 ? 1e-4 : 1e-5), "dqkv");
      expect_close(host(dqn), expected_qn, 1e-5, "dq_norm");
      expect_close(host(dkn), expected_kn, 1e-5, "dk_norm");
    }
  }
}

TEST_P(QkvRopeTest, NormGradientsDoNotDependOnThreads) {
  const QkvShape shape = {3, 1, 64};
  const int64_t tokens = 400, d = shape.head_dim;
  const Case c = make(shape, tokens);
  const TensorView qkv = tensor(c.qkv, {tokens, shape.width()}), qn = tensor(c.q_norm, {d}), kn = tensor(c.k_norm, {d}),
                   rq = filled_f32({tokens, shape.heads}, NAN), rk = filled_f32({tokens, shape.kv_heads}, NAN),
                   q = filled({tokens, shape.heads, d}, 0), k = filled({tokens, shape.kv_heads, d}, 0),
                   v = filled({tokens, shape.kv_heads, d}, 0), dqkv = filled({tokens, shape.width()}, NAN);
  qkv_rope_forward(exec(), shape, qkv, c.positions, c.cos, c.sin, qn, kn, 1e-6f, q, k, v, rq, rk);
  const auto norm_gradients = [&](ThreadPool& pool) {
    Exec other = exec();
    other.pool = &pool;
    const TensorView dqn = filled_f32({d}, 0), dkn = filled_f32({d}, 0);
    qkv_rope_backward(other, shape, q, k, v, c.positions, c.cos, c.sin, qkv, qn, kn, rq, rk, dqkv, dqn, dkn);
    return std::tuple(host(dqn), host(dkn), host(dqkv));
  };
  ThreadPool one(1);
  EXPECT_EQ(norm_gradients(one), norm_gradients(*exec().pool));
}

TEST_P(QkvRopeTest, BackwardUndoesTheRotation) {
  const QkvShape shape = {4, 2, 64};
  const int64_t tokens = 131;
  const Case c = make(shape, tokens);
  const TensorView q = filled({tokens, 4, 64}, NAN), k = filled({tokens, 2, 64}, NAN), v = filled({tokens, 2, 64}, NAN),
                   back = filled({tokens, shape.width()}, NAN);
  qkv_rope_forward(exec(), shape, tensor(c.qkv, {tokens, shape.width()}), c.positions, c.cos, c.sin, {}, {}, 0.0f, q, k,
                   v, {}, {});
  qkv_rope_backward(exec(), shape, q, k, v, c.positions, c.cos, c.sin, {}, {}, {}, {}, {}, back, {}, {});
  expect_close(host(back), doubles(c.qkv), tolerance(1e-6, 2), "qkv");
}

TEST_P(QkvRopeTest, RefusesWrongShapes) {
  const QkvShape shape = {2, 1, 4};
  const TensorView qkv = filled({3, 16}, 0), positions = tensor(std::vector<int32_t>{0, 1, 2}, {3}),
                   table = filled_f32({8, 2}, 0), q = filled({3, 2, 4}, 0), k = filled({3, 1, 4}, 0),
                   v = filled({3, 1, 4}, 0);
  const auto forward = [&](TensorView qkv_in, TensorView cos, TensorView qn, TensorView kn, TensorView rq) {
    qkv_rope_forward(exec(), shape, qkv_in, positions, cos, table, qn, kn, 0.0f, q, k, v, rq, rq);
  };
  EXPECT_NO_THROW(forward(qkv, table, {}, {}, {}));
  EXPECT_THROW(forward(filled({3, 12}, 0), table, {}, {}, {}), InternalError);
  EXPECT_THROW(forward(qkv, filled_f32({8, 4}, 0), {}, {}, {}), InternalError);
  EXPECT_THROW(forward(qkv, table, filled({4}, 1), {}, {}), InternalError);              // one norm only
  EXPECT_THROW(forward(qkv, table, filled({4}, 1), filled({4}, 1), {}), InternalError);  // nowhere to keep rstd
  EXPECT_THROW(qkv_rope_backward(exec(), shape, k, k, k, positions, table, table, {}, {}, {}, {}, {}, qkv, {}, {}),
               InternalError);
}

}  // namespace
}  // namespace sb::test
