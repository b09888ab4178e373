#include "attention/select/planes.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"

namespace sb {
namespace {

// Sampled tokens whose sums are added up by one thread: fixed, so that the order of additions is too.
constexpr int64_t kSamplesAtOnce = 64;

void add_token(const AttentionShape& shape, const float* q, const float* k, PlaneSums& sums) {
  const int group = shape.group(), d = shape.head_dim;
  for (int head = 0; head < shape.kv_heads; ++head) {
    for (int c = 0; c < d; ++c) {
      double query = 0;
      for (int h = 0; h < group; ++h) query += q[(head * group + h) * d + c];
      query /= group;
      const int at = head * d + c;
      const double key = k[at];
      sums.query_squares[at] += query * query;
      sums.key_sums[at] += key;
      sums.key_squares[at] += key * key;
    }
  }
  ++sums.tokens;
}

}  // namespace

PlaneSums measure_planes(const Exec& exec, const AttentionShape& shape, const float* q, const float* k,
                         int64_t tokens) {
  const auto width = static_cast<size_t>(shape.kv_heads) * shape.head_dim;
  const int64_t samples = (tokens + kPlaneSampling - 1) / kPlaneSampling;
  std::vector<PlaneSums> pieces((samples + kSamplesAtOnce - 1) / kSamplesAtOnce);
  exec.pool->parallel_for(std::ssize(pieces), 1, [&](int64_t piece, int64_t, int) {
    PlaneSums& sums = pieces[piece];
    for (auto* values : {&sums.query_squares, &sums.key_sums, &sums.key_squares}) values->assign(width, 0.0);
    const int64_t end = std::min(samples, (piece + 1) * kSamplesAtOnce);
    for (int64_t sample = piece * kSamplesAtOnce; sample < end; ++sample) {
      const int64_t token = sample * kPlaneSampling;
      add_token(shape, q + token * shape.heads * shape.head_dim, k + token * shape.kv_heads * shape.head_dim, sums);
    }
  });
  PlaneSums total;
  for (const PlaneSums& piece : pieces) total += piece;
  return total;
}

PlaneSums& PlaneSums::operator+=(const PlaneSums& other) {
  if (other.tokens == 0) return *this;
  if (tokens == 0) return *this = other;
  SB_CHECK(query_squares.size() == other.query_squares.size(), "sums of {} and {} channels", query_squares.size(),
           other.query_squares.size());
  tokens += other.tokens;
  const auto add = [](std::vector<double>& to, const std::vector<double>& from) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
  };
  add(query_squares, other.query_squares);
  add(key_sums, other.key_sums);
  add(key_squares, other.key_squares);
  return *this;
}

LayerPlanes select_planes(const AttentionShape& shape, const PlaneSums& sums, int channels) {
  const int d = shape.head_dim, planes = d / 2;
  SB_CHECK(channels > 0 && channels % 2 == 0 && channels <= d, "{} channels of {}", channels, d);
  SB_CHECK(sums.tokens > 0 && std::ssize(sums.query_squares) == int64_t{shape.kv_heads} * d, "no statistics of planes");
  LayerPlanes selected{shape.kv_heads, channels, {}, {}, {}};
  const auto n = static_cast<double>(sums.tokens);
  for (int head = 0; head < shape.kv_heads; ++head) {
    std::vector<double> energy(static_cast<size_t>(planes));
    for (int p = 0; p < planes; ++p) {
      double query = 0, key = 0;
      for (const int c : {p, p + planes}) {
        const auto at = static_cast<size_t>(head * d + c);
        const double mean = sums.key_sums[at] / n;
        query += sums.query_squares[at] / n;
        key += std::max(0.0, sums.key_squares[at] / n - mean * mean);
      }
      energy[static_cast<size_t>(p)] = query * key;
    }
    std::vector<int32_t> order(static_cast<size_t>(planes));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return energy[static_cast<size_t>(a)] > energy[static_cast<size_t>(b)];
    });
    order.resize(static_cast<size_t>(channels / 2));
    std::sort(order.begin(), order.end());
    for (const int32_t p : order) selected.channel.push_back(p);
    for (const int32_t p : order) selected.channel.push_back(p + planes);
    for (const int32_t c : selected.of(head))
      selected.key_mean.push_back(static_cast<float>(sums.key_sums[static_cast<size_t>(head * d + c)] / n));
    selected.scale.push_back(shape.scale);
  }
  return selected;
}

}  // namespace sb
