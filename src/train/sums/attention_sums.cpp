#include "train/sums/attention_sums.h"

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

Selector::Thresholds mean_over_ranks(Communicator& world, const Selector::Thresholds& own,
                                     const Selector::Thresholds& before) {
  if (world.size() == 1) return own;
  Packer packer;
  for (const auto& [key, value] : own) {
    if (const auto old = before.find(key); old != before.end() && old->second == value) continue;
    packer.put(key.first);
    packer.put(key.second);
    packer.put(value);
  }
  std::map<std::pair<int, int>, std::pair<double, int>> sums;
  for (const std::string& text : gather_texts(world, packer.take(), 0)) {
    Unpacker unpacker(text);
    while (!unpacker.done()) {
      const int layer = unpacker.get<int>(), length_class = unpacker.get<int>();
      auto& [sum, ranks] = sums[{layer, length_class}];
      sum += unpacker.get<float>();
      ++ranks;
    }
  }
  for (const auto& [key, sum] : sums) {
    packer.put(key.first);
    packer.put(key.second);
    packer.put(static_cast<float>(sum.first / sum.second));
  }
  const std::string text = broadcast_text(world, packer.take(), 0);
  Selector::Thresholds mean = before;
  Unpacker unpacker(text);
  while (!unpacker.done()) {
    const int layer = unpacker.get<int>(), length_class = unpacker.get<int>();
    mean[{layer, length_class}] = unpacker.get<float>();
  }
  return mean;
}

}  // namespace sb
