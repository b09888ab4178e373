#include "train/sums/attention_sums.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "parallel/grid.h"

namespace sb {
namespace {

// Plain values back to back.
class Packer {
 public:
  template <typename T>
  void put(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  std::string take() { return std::exchange(text_, {}); }

 private:
  std::string text_;
};

class Unpacker {
 public:
  explicit Unpacker(const std::string& text) : text_(text) {}
  bool done() const { return at_ == text_.size(); }
  template <typename T>
  T get() {
    SB_CHECK(at_ + sizeof(T) <= text_.size(), "a message of {} bytes is cut short", text_.size());
    T value;
    std::memcpy(&value, text_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

std::string pack(const std::vector<MeasuredCoverage>& samples) {
  Packer packer;
  for (const MeasuredCoverage& sample : samples) {
    packer.put(sample.layer);
    packer.put(sample.tokens);
    packer.put(sample.sample.held);
    packer.put(sample.sample.rows);
    packer.put(static_cast<int64_t>(sample.sample.curve.size()));
    for (const double point : sample.sample.curve) packer.put(point);
  }
  return packer.take();
}

void unpack(const std::string& text, std::vector<MeasuredCoverage>& samples) {
  Unpacker unpacker(text);
  while (!unpacker.done()) {
    MeasuredCoverage& sample = samples.emplace_back();
    sample.layer = unpacker.get<int>();
    sample.tokens = unpacker.get<int64_t>();
    sample.sample.held = unpacker.get<double>();
    sample.sample.rows = unpacker.get<int64_t>();
    sample.sample.curve.resize(static_cast<size_t>(unpacker.get<int64_t>()));
    for (double& point : sample.sample.curve) point = unpacker.get<double>();
  }
}

std::string pack(const std::map<MassKey, MassCounts>& masses) {
  Packer packer;
  for (const auto& [key, counts] : masses) {
    packer.put(key);
    packer.put(counts);
  }
  return packer.take();
}

void unpack(const std::string& text, std::map<MassKey, MassCounts>& masses) {
  Unpacker unpacker(text);
  while (!unpacker.done()) {
    const auto key = unpacker.get<MassKey>();
    masses[key] += unpacker.get<MassCounts>();
  }
}

// A rank has the layers of its stage; the others are empty there.
std::vector<PlaneSums> sum_of_planes(Communicator& world, const std::vector<PlaneSums>& own) {
  size_t own_width = 0;
  for (const PlaneSums& layer : own) own_width = std::max(own_width, layer.query_squares.size());
  std::array<int64_t, 2> size = {std::ssize(own), static_cast<int64_t>(own_width)};
  world.all_reduce(std::span<int64_t>(size), ReduceOp::max);
  const auto layers = static_cast<size_t>(size[0]), width = static_cast<size_t>(size[1]);
  if (width == 0) return {};
  const size_t row = 1 + 3 * width;
  std::vector<double> values(layers * row);
  for (size_t layer = 0; layer < own.size(); ++layer) {
    if (own[layer].query_squares.empty()) continue;
    double* to = values.data() + layer * row;
    *to++ = own[layer].tokens;
    for (const std::vector<double>* from : {&own[layer].query_squares, &own[layer].key_sums, &own[layer].key_squares})
      to = std::copy(from->begin(), from->end(), to);
  }
  world.all_reduce(std::span(values));
  std::vector<PlaneSums> sum(layers);
  for (size_t layer = 0; layer < layers; ++layer) {
    const double* from = values.data() + layer * row;
    if (*from == 0) continue;
    sum[layer].tokens = *from++;
    for (std::vector<double>* to : {&sum[layer].query_squares, &sum[layer].key_sums, &sum[layer].key_squares}) {
      to->assign(from, from + width);
      from += width;
    }
  }
  return sum;
}

// Samples of ranks that measured the same rows of the same sequences on as many heads each.
void add_mean(std::span<const std::string> ranks, std::vector<MeasuredCoverage>& samples) {
  std::vector<MeasuredCoverage> mean;
  unpack(ranks[0], mean);
  for (const std::string& text : ranks.subspan(1)) {
    std::vector<MeasuredCoverage> other;
    unpack(text, other);
    SB_CHECK(other.size() == mean.size(), "{} samples on one rank, {} on another with the same sequences", mean.size(),
             other.size());
    for (size_t i = 0; i < mean.size(); ++i) {
      CoverageSample &sum = mean[i].sample, &next = other[i].sample;
      SB_CHECK(mean[i].layer == other[i].layer && mean[i].tokens == other[i].tokens && sum.rows == next.rows &&
                   sum.curve.size() == next.curve.size(),
               "ranks with the same sequences sampled others");
      sum.held += next.held;
      for (size_t k = 0; k < sum.curve.size(); ++k) sum.curve[k] += next.curve[k];
    }
  }
  const double share = 1.0 / static_cast<double>(ranks.size());
  for (MeasuredCoverage& sample : mean) {
    sample.sample.held *= share;
    for (double& point : sample.sample.curve) point *= share;
    samples.push_back(std::move(sample));
  }
}

std::array<std::vector<double>*, 3> by_heads(PlaneSums& sums) {
  return {&sums.query_squares, &sums.key_sums, &sums.key_squares};
}

// Sums of a rank's own heads at their place among those of all ranks; the tokens, which all of these see, count once.
void among_all_heads(PlaneSums& sums, const TensorShare& share) {
  if (share.alone()) return;
  for (std::vector<double>* values : by_heads(sums)) {
    const auto own = static_cast<std::ptrdiff_t>(values->size());
    std::vector<double> all(values->size() * static_cast<size_t>(share.ranks));
    std::copy(values->begin(), values->end(), all.begin() + own * share.rank);
    *values = std::move(all);
  }
  if (share.rank > 0) sums.tokens = 0;
}

}  // namespace

AttentionReport sum_over_ranks(Communicator& world, AttentionReport own, int tp) {
  if (world.size() == 1) return own;
  std::vector<int64_t> counts;
  std::vector<double> coverage;
  for (const LayerAttention& layer : own.layers) {
    counts.insert(counts.end(), {layer.pairs, layer.causal_pairs, layer.covered_tokens});
    coverage.push_back(layer.coverage);
  }
  world.all_reduce(std::span(counts));
  world.all_reduce(std::span(coverage));
  AttentionReport sum;
  for (size_t i = 0; i < coverage.size(); ++i)
    sum.layers.push_back({counts[3 * i], counts[3 * i + 1], coverage[i], counts[3 * i + 2]});
  const std::vector<std::string> texts = gather_texts(world, pack(own.samples), 0);
  for (size_t first = 0; first < texts.size(); first += static_cast<size_t>(tp))
    add_mean(std::span(texts).subspan(first, static_cast<size_t>(tp)), sum.samples);
  return sum;
}

SelectionObservations sum_over_ranks(Communicator& world, SelectionObservations own, const TensorShare& share) {
  if (world.size() == 1) return own;
  for (PlaneSums& layer : own.planes) among_all_heads(layer, share);
  SelectionObservations sum;
  sum.planes = sum_of_planes(world, own.planes);
  for (const std::string& text : gather_texts(world, pack(own.masses), 0)) unpack(text, sum.masses);
  const std::string masses = broadcast_text(world, pack(sum.masses), 0);
  sum.masses.clear();
  unpack(masses, sum.masses);
  return sum;
}

LearnedSelection rank_selection(LearnedSelection learned, const TensorShare& share) {
  if (share.alone()) return learned;
  for (PlaneSums& layer : learned.planes)
    for (std::vector<double>* values : by_heads(layer)) {
      const auto own = std::ssize(*values) / share.ranks;
      *values = {values->begin() + own * share.rank, values->begin() + own * (share.rank + 1)};
    }
  return learned;
}

}  // namespace sb
