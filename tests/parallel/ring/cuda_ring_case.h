#pragma once

// What the tests of a ring of GPUs have in common.

#include <bit>
#include <cmath>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "device/memory.h"
#include "tests/attention/reference.h"

namespace sb {

inline AttentionShape shape_of(int heads, int kv_heads, int head_dim) {
  return {heads, kv_heads, head_dim, 1.0f / std::sqrt(static_cast<float>(head_dim))};
}

inline SelectionConfig config_of(SelectionPattern pattern) {
  SelectionConfig config;
  config.pattern = pattern;
  config.score = BlockScore::moments;
  config.block = 128;
  config.query_block = pattern == SelectionPattern::vertical_slash ? 64 : 16;
  config.budget = 384;
  config.dense_below = 500;
  config.sink_blocks = 1;
  config.local_blocks = 1;
  config.vertical_cap = 100;
  config.slash_cap = 4;
  if (pattern == SelectionPattern::vertical_slash) config.order = SelectionOrder::lookahead;
  return config;
}

// What blocks are judged by, where that is by planes.
inline LearnedSelection learned_of(const AttentionShape& shape) {
  LearnedSelection learned;
  PlaneSums& sums = learned.planes.emplace_back();
  const size_t width = static_cast<size_t>(shape.kv_heads) * static_cast<size_t>(shape.head_dim);
  sums.tokens = 16;
  for (size_t i = 0; i < width; ++i) sums.query_squares.push_back(1.0 + static_cast<double>(i * 37 % 101));
  sums.key_sums.assign(width, 0.0);
  sums.key_squares.assign(width, 16.0);
  return learned;
}

inline uint16_t bf16_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Inputs that bf16 holds exactly, so that only the computation is compared.
inline AttentionCase rounded(AttentionCase c) {
  for (std::vector<float>* values : {&c.q, &c.k, &c.v, &c.dout})
    for (float& value : *values) value = from_bf16(bf16_bits(value));
  return c;
}

// A tensor on the device, filled from the host and read back.
class DeviceTensor {
 public:
  DeviceTensor(DType dtype, Shape shape, const std::vector<float>& values = {})
      : arena_(make_arena("test", shape.elements() * dtype_bytes(dtype), DeviceKind::cuda)),
        view_(arena_.allocate(dtype, shape)) {
    const HostCopy copy(view_);
    for (int64_t i = 0; i < shape.elements(); ++i) {
      const float value = values.empty() ? std::nanf("") : values[static_cast<size_t>(i)];
      if (dtype == DType::f32)
        copy.view().f32()[i] = value;
      else
        static_cast<uint16_t*>(copy.view().raw())[i] = bf16_bits(value);
    }
    copy.store();
  }
  const TensorView& view() const { return view_; }
  std::vector<float> values() const {
    const HostCopy copy(view_);
    std::vector<float> values(static_cast<size_t>(view_.elements()));
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = view_.dtype() == DType::f32 ? copy.view().f32()[i]
                                              : from_bf16(static_cast<const uint16_t*>(copy.view().raw())[i]);
    return values;
  }

 private:
  Arena arena_;
  TensorView view_;
};

inline std::vector<float> taken(const std::vector<float>& whole, const std::vector<int32_t>& tokens, int64_t width) {
  std::vector<float> part;
  for (const int32_t token : tokens)
    part.insert(part.end(), whole.begin() + token * width, whole.begin() + (token + 1) * width);
  return part;
}

}  // namespace sb
