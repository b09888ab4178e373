#include "attention/select/planes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <vector>

#include "core/errors.h"
#include "core/random.h"

namespace sb {
namespace {

struct PlaneInputs {
  AttentionShape shape;
  int64_t tokens;
  std::vector<float> q, k;

  // Channels differ in size and in mean, so that planes do too.
  PlaneInputs(int heads, int kv_heads, int d, int64_t n, uint64_t seed) : shape{heads, kv_heads, d, 0.3f}, tokens(n) {
    Random random(seed);
    std::vector<double> size(d), mean(d);
    for (double& x : size) x = std::exp(random.normal());
    for (double& x : mean) x = 3.0 * random.normal();
    q.resize(n * heads * d);
    k.resize(n * kv_heads * d);
    for (size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(size[i % d] * random.normal() + 0.2);
    for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(mean[i % d] + size[(i + 3) % d] * random.normal());
  }
};

PlaneSums measured(const PlaneInputs& in, int threads) {
  ThreadPool pool(threads);
  Exec exec;
  exec.pool = &pool;
  return measure_planes(exec, in.shape, in.q.data(), in.k.data(), in.tokens);
}

// E[q²] · Var[k] of a plane over the sampled tokens, the variance in two passes.
double energy(const PlaneInputs& in, int head, int plane) {
  const int d = in.shape.head_dim, group = in.shape.group();
  double query = 0, key = 0, count = 0;
  for (int64_t t = 0; t < in.tokens; t += 16) ++count;
  for (const int c : {plane, plane + d / 2}) {
    const auto key_at = [&](int64_t t) { return double{in.k[(t * in.shape.kv_heads + head) * d + c]}; };
    double mean = 0;
    for (int64_t t = 0; t < in.tokens; t += 16) mean += key_at(t) / count;
    for (int64_t t = 0; t < in.tokens; t += 16) {
      double q = 0;
      for (int h = head * group; h < (head + 1) * group; ++h) q += in.q[(t * in.shape.heads + h) * d + c];
      query += std::pow(q / group, 2) / count;
      key += std::pow(key_at(t) - mean, 2) / count;
    }
  }
  return query * key;
}

TEST(Planes, ThoseOfTheMostEnergyAreSelected) {
  for (const auto& [heads, kv_heads, d, tokens] :
       {std::tuple{8, 2, 16, 1000}, {7, 1, 64, 333}, {2, 2, 10, 5000}, {3, 3, 7, 90}}) {
    const PlaneInputs in(heads, kv_heads, d, tokens, 5);
    const PlaneSums sums = measured(in, 2);
    EXPECT_EQ(sums.tokens, (tokens + 15) / 16);
    for (int channels = 2; channels <= d; channels += 2) {
      const LayerPlanes selected = select_planes(in.shape, sums, channels);
      EXPECT_EQ(selected.kv_heads, kv_heads);
      EXPECT_EQ(selected.channels, channels);
      for (int head = 0; head < kv_heads; ++head) {
        EXPECT_EQ(selected.scale[head], 0.3f);
        for (int i = 0; i < channels; ++i) {
          double mean = 0;
          for (int64_t t = 0; t < tokens; t += 16)
            mean += in.k[(t * kv_heads + head) * d + selected.of(head)[i]] / ((tokens + 15) / 16);
          EXPECT_NEAR(selected.key_mean[head * channels + i], mean, 1e-5) << "the mean of channel " << i;
        }
        const auto of_head = selected.of(head);
        EXPECT_TRUE(std::is_sorted(of_head.begin(), of_head.end()));
        const std::set<int32_t> taken(of_head.begin(), of_head.end());
        ASSERT_EQ(std::ssize(taken), channels);
        double least = INFINITY, most_left = 0;
        for (int plane = 0; plane < d / 2; ++plane) {
          EXPECT_EQ(taken.contains(plane), taken.contains(plane + d / 2)) << "half a plane";
          const double e = energy(in, head, plane);
          if (taken.contains(plane))
            least = std::min(least, e);
          else
            most_left = std::max(most_left, e);
        }
        EXPECT_GT(least, most_left) << channels << " channels of " << d << ", head " << head;
      }
    }
  }
}

TEST(Planes, SumsDoNotDependOnThreadsNorOnCuts) {
  const PlaneInputs in(4, 2, 16, 3001, 8);
  const PlaneSums one = measured(in, 1);
  for (const int threads : {2, 5}) EXPECT_EQ(measured(in, threads), one);
  // Cut at a block, as ranks that share a sequence do: the same tokens, added up in another order.
  ThreadPool pool(2);
  Exec exec;
  exec.pool = &pool;
  PlaneSums parts = measure_planes(exec, in.shape, in.q.data(), in.k.data(), 128);
  parts += measure_planes(exec, in.shape, in.q.data() + 128 * 64, in.k.data() + 128 * 32, in.tokens - 128);
  EXPECT_EQ(parts.tokens, one.tokens);
  for (size_t i = 0; i < one.key_sums.size(); ++i) {
    EXPECT_NEAR(parts.query_squares[i], one.query_squares[i], 1e-9 * one.query_squares[i]);
    EXPECT_NEAR(parts.key_sums[i], one.key_sums[i], 1e-9 * one.key_squares[i]);
    EXPECT_NEAR(parts.key_squares[i], one.key_squares[i], 1e-9 * one.key_squares[i]);
  }
}

TEST(Planes, EqualEnergiesGoToTheLowerPlane) {
  const AttentionShape shape{1, 1, 8, 1.0f};
  PlaneSums sums{4, std::vector<double>(8, 1.0), std::vector<double>(8, 0.0), std::vector<double>(8, 1.0)};
  EXPECT_EQ(select_planes(shape, sums, 4).channel, (std::vector<int32_t>{0, 1, 4, 5}));
  sums.key_squares[7] = 2.0;
  EXPECT_EQ(select_planes(shape, sums, 4).channel, (std::vector<int32_t>{0, 3, 4, 7}));
}

TEST(Planes, NothingMeasuredSelectsNothing) {
  const AttentionShape shape{1, 1, 8, 1.0f};
  ThreadPool pool(1);
  Exec exec;
  exec.pool = &pool;
  const PlaneSums none = measure_planes(exec, shape, nullptr, nullptr, 0);
  EXPECT_EQ(none, PlaneSums{});
  EXPECT_THROW(select_planes(shape, none, 4), InternalError);
}

}  // namespace
}  // namespace sb
