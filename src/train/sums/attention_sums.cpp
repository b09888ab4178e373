#include "train/sums/attention_sums.h"

#include <algorithm>
#include <array>
#include <cstring>
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
    if (own[layer].tokens == 0) continue;
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

}  // namespace

AttentionReport sum_over_ranks(Communicator& world, AttentionReport own) {
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
  for (const std::string& text : gather_texts(world, pack(own.samples), 0)) unpack(text, sum.samples);
  return sum;
}

SelectionObservations sum_over_ranks(Communicator& world, SelectionObservations own) {
  if (world.size() == 1) return own;
  SelectionObservations sum;
  sum.planes = sum_of_planes(world, own.planes);
  for (const std::string& text : gather_texts(world, pack(own.masses), 0)) unpack(text, sum.masses);
  const std::string masses = broadcast_text(world, pack(sum.masses), 0);
  sum.masses.clear();
  unpack(masses, sum.masses);
  return sum;
}

}  // namespace sb
