#include "tests/attention/reference.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

#include "core/random.h"

namespace sb {
namespace {

void expect_close(const std::vector<float>& actual, const std::vector<double>& expected, double tolerance,
                  const char* name) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  double largest = 0;
  for (const double x : expected) {
    if (std::isfinite(x)) largest = std::max(largest, std::abs(x));
  }
  for (size_t i = 0; i < actual.size(); ++i) {
    if (std::isinf(expected[i])) {
      ASSERT_EQ(static_cast<double>(actual[i]), expected[i]) << name << "[" << i << "]";
    } else {
      // Written so that NaN fails.
      ASSERT_TRUE(std::abs(actual[i] - expected[i]) <= tolerance * (1 + largest))
          << name << "[" << i << "]: " << actual[i] << " instead of " << expected[i];
    }
  }
}

double dot(const double* a, const double* b, int count) {
  double sums[4] = {};  // that need not wait for each other
  int i = 0;
  for (; i + 4 <= count; i += 4)
    for (int j = 0; j < 4; ++j) sums[j] += a[i + j] * b[i + j];
  for (; i < count; ++i) sums[0] += a[i] * b[i];
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

void add(double* __restrict to, double factor, const double* __restrict from, int count) {
  for (int i = 0; i < count; ++i) to[i] += factor * from[i];
}

}  // namespace

AttentionCase::AttentionCase(AttentionShape s, std::vector<int32_t> lengths, uint64_t seed, double spread)
    : shape(s), cu_seqlens{0} {
  for (const int32_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
  const int64_t queries = tokens() * s.heads * s.head_dim, keys = tokens() * s.kv_heads * s.head_dim;
  q = draw_normal(queries, seed, 0, spread);
  k = draw_normal(keys, seed, queries, spread);
  v = draw_normal(keys, seed, queries + keys);
  dout = draw_normal(queries, seed, queries + 2 * keys);
}

std::vector<float> draw_normal(int64_t count, uint64_t seed, int64_t first, double spread) {
  std::vector<float> values(static_cast<size_t>(count));
  // A number takes four positions of the stream.
  const auto fill = [&](int64_t begin, int64_t end) {
    Random random(seed, 0, 4 * static_cast<uint64_t>(first + begin));
    for (int64_t i = begin; i < end; ++i) values[static_cast<size_t>(i)] = static_cast<float>(random.normal() * spread);
  };
  const int64_t parts = std::clamp<int64_t>(count >> 16, 1, std::min(8, available_cores()));
  {
    std::vector<std::jthread> others;
    for (int64_t part = 1; part < parts; ++part)
      others.emplace_back(fill, count * part / parts, count * (part + 1) / parts);
    fill(0, count / parts);
  }
  return values;
}

bool sees_everything(int, int, int, int) {
  return true;
}

SeesKey sees_by(const BlockIndex& index, const AttentionShape& shape) {
  return [&index, shape](int head, int sequence, int query, int key) {
    const BlockIndex::Sequence& s = index.sequences()[sequence];
    if (s.dense) return true;
    const BlockIndexShape& lists = index.shape();
    const int list_head = head / (shape.heads / lists.list_heads);
    const BlockIndex::Row row = index.row(BlockIndex::row_id(s, list_head, query / lists.query_block));
    for (size_t i = 0; i < row.blocks.size(); ++i)
      if (row.blocks[i] == key / lists.block) return query % lists.query_block >= row.first[i];
    return std::find(row.columns.begin(), row.columns.end(), key) != row.columns.end();
  };
}

AttentionResults<double> reference_attention(const AttentionCase& c, const SeesKey& sees) {
  const int64_t tokens = c.tokens();
  const int heads = c.shape.heads, kv_heads = c.shape.kv_heads, d = c.shape.head_dim;
  AttentionResults<double> r;
  r.out.resize(tokens * heads * d);
  r.dq.resize(tokens * heads * d);
  r.dk.resize(tokens * kv_heads * d);
  r.dv.resize(tokens * kv_heads * d);
  r.lse.assign(tokens * heads, -std::numeric_limits<double>::infinity());
  using Values = std::vector<double>;
  const Values q(c.q.begin(), c.q.end()), k(c.k.begin(), c.k.end()), v(c.v.begin(), c.v.end()),
      dout(c.dout.begin(), c.dout.end());
  const auto run = [&](int kv) {
    std::vector<double> p, dp;
    std::vector<int> keys;
    const int group = heads / kv_heads;
    for (size_t s = 0; s + 1 < c.cu_seqlens.size(); ++s) {
      const int64_t begin = c.cu_seqlens[s], length = c.cu_seqlens[s + 1] - begin;
      const auto key_at = [&](int64_t key) { return ((begin + key) * kv_heads + kv) * d; };
      for (int head = kv * group; head < (kv + 1) * group; ++head)
        for (int query = 0; query < length; ++query) {
          const int64_t row = ((begin + query) * heads + head) * d;
          keys.clear();
          p.clear();
          double maximum = -std::numeric_limits<double>::infinity();
          for (int key = 0; key <= query; ++key) {
            if (!sees(head, static_cast<int>(s), query, key)) continue;
            keys.push_back(key);
            p.push_back(c.shape.scale * dot(&q[row], &k[key_at(key)], d));
            maximum = std::max(maximum, p.back());
          }
          if (keys.empty()) continue;
          double sum = 0;
          for (const double x : p) sum += std::exp(x - maximum);
          r.lse[head * tokens + begin + query] = maximum + std::log(sum);
          dp.assign(keys.size(), 0);
          double delta = 0;
          for (size_t i = 0; i < keys.size(); ++i) {
            p[i] = std::exp(p[i] - maximum) / sum;
            const int64_t at = key_at(keys[i]);
            add(&r.out[row], p[i], &v[at], d);
            add(&r.dv[at], p[i], &dout[row], d);
            dp[i] = dot(&dout[row], &v[at], d);
            delta += p[i] * dp[i];
          }
          for (size_t i = 0; i < keys.size(); ++i) {
            const double ds = p[i] * (dp[i] - delta) * c.shape.scale;
            const int64_t at = key_at(keys[i]);
            add(&r.dq[row], ds, &k[at], d);
            add(&r.dk[at], ds, &q[row], d);
          }
        }
    }
  };
  // Key/value heads share nothing: where there is much to do, a thread each.
  if (tokens < 1000) {
    for (int kv = 0; kv < kv_heads; ++kv) run(kv);
  } else {
    std::vector<std::jthread> threads;
    for (int kv = 0; kv < kv_heads; ++kv) threads.emplace_back(run, kv);
  }
  return r;
}

AttentionResults<float> run_attention(Attention& attention, const AttentionCase& c, int threads) {
  const AttentionShape& s = c.shape;
  const int64_t tokens = c.tokens();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  AttentionResults<float> r;
  r.out.assign(c.q.size(), nan);
  r.dq.assign(c.q.size(), nan);
  r.dk.assign(c.k.size(), nan);
  r.dv.assign(c.k.size(), nan);
  r.lse.assign(tokens * s.heads, nan);
  ThreadPool pool(threads);
  const int64_t bytes = attention.scratch_bytes(s, tokens, threads);
  Arena scratch("scratch", bytes);
  // Garbage in the scratch memory must not matter either.
  float* memory = scratch.allocate_array<float>(bytes / 4);
  std::fill_n(memory, bytes / 4, nan);
  scratch.release(0);
  const Exec exec{DeviceKind::cpu, &pool, nullptr, &scratch};
  const Shape queries = {tokens, s.heads, s.head_dim}, keys = {tokens, s.kv_heads, s.head_dim};
  const AttentionOperands operands = {{c.q.data(), queries},
                                      {c.k.data(), keys},
                                      {c.v.data(), keys},
                                      {r.out.data(), queries},
                                      {r.lse.data(), {s.heads, tokens}}};
  const AttentionGradients gradients = {
      {c.dout.data(), queries}, {r.dq.data(), queries}, {r.dk.data(), keys}, {r.dv.data(), keys}};
  const auto state = attention.make_state();
  attention.forward(exec, 0, s, c.sequences(), operands, *state, false);
  EXPECT_EQ(scratch.used(), 0);
  attention.backward(exec, 0, s, c.sequences(), operands, gradients, *state);
  EXPECT_EQ(scratch.used(), 0);
  return r;
}

void expect_close(const AttentionResults<float>& actual, const AttentionResults<double>& expected, double tolerance) {
  expect_close(actual.out, expected.out, tolerance, "out");
  expect_close(actual.lse, expected.lse, tolerance, "lse");
  expect_close(actual.dq, expected.dq, tolerance, "dq");
  expect_close(actual.dk, expected.dk, tolerance, "dk");
  expect_close(actual.dv, expected.dv, tolerance, "dv");
}

}  // namespace sb
