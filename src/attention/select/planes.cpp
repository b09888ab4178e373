#include "attention/select/planes.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"

namespace sb {

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

LayerPlanes choose_planes(const AttentionShape& shape, const PlaneSums& sums, int channels) {
  const int d = shape.head_dim, planes = d / 2;
  SB_CHECK(channels > 0 && channels % 2 == 0 && channels <= d, "{} channels of {}", channels, d);
  SB_CHECK(sums.tokens > 0 && std::ssize(sums.query_squares) == int64_t{shape.kv_heads} * d, "no statistics of planes");
  LayerPlanes chosen{shape.kv_heads, channels, {}, {}};
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
    for (const int32_t p : order) chosen.channel.push_back(p);
    for (const int32_t p : order) chosen.channel.push_back(p + planes);
    chosen.scale.push_back(shape.scale);
  }
  return chosen;
}

}  // namespace sb
