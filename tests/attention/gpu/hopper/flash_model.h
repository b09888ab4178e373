#pragma once

// What FlashAttention's arithmetic makes of operands, emulated from the exact probabilities: key blocks from the last
// to the first, probabilities relative to the running maximum and rounded to bf16 for the product with V, their sum
// unrounded in fp32, the output rounded to bf16, dO·O from the rounded output, P and dS rounded to bf16 for the
// products of the backward. Exponentials and products of scores are taken as exact: they are in fp32.

#include <algorithm>
#include <cmath>
#include <vector>

#include "tests/attention/gpu/hopper/reference.h"

namespace sb::gpu {

struct FlashModel {
  std::vector<double> o, dq, dk, dv;
};

inline float rounded_to_bf16(float x) {
  return __bfloat162float(__float2bfloat16(x));
}

inline FlashModel flash_model(const Shape& shape, const Tensors& t, const std::vector<int32_t>& cu_seqlens,
                              const Reference& exact) {
  constexpr int kKeys = 64;  // of a block, for d = 128
  const auto floats = [](const DeviceArray<__nv_bfloat16>& x) {
    std::vector<float> out;
    for (const __nv_bfloat16 value : x.host()) out.push_back(__bfloat162float(value));
    return out;
  };
  const std::vector<float> q = floats(t.q), k = floats(t.k), v = floats(t.v), d_o = floats(t.d_o);
  const int d = shape.head_dim, group = shape.query_heads / shape.kv_heads;
  std::vector<float> o(q.size()), dq(q.size()), dk(k.size()), dv(k.size());
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s)
    for (int token = cu_seqlens[s]; token < cu_seqlens[s + 1]; ++token)
      for (int head = 0; head < shape.query_heads; ++head) {
        const int keys = token - cu_seqlens[s] + 1;
        const size_t row = (static_cast<size_t>(token) * shape.query_heads + head) * d;
        const size_t matrix = (static_cast<size_t>(head) * shape.tokens + token) * exact.longest;
        const double *p = &exact.p[matrix], *ds = &exact.ds[matrix];
        const auto key_row = [&](int key) {
          return (static_cast<size_t>(cu_seqlens[s] + key) * shape.kv_heads + head / group) * d;
        };
        double largest = 0, delta = 0;
        float sum = 0, rounded_delta = 0;
        for (int begin = (keys - 1) / kKeys * kKeys; begin >= 0; begin -= kKeys) {
          const int end = std::min(begin + kKeys, keys);
          const double before = largest;
          largest = std::max(largest, *std::max_element(p + begin, p + end));
          if (largest == 0) continue;
          const auto shrink = static_cast<float>(before / largest);
          sum *= shrink;
          for (int c = 0; c < d; ++c) o[row + c] *= shrink;
          for (int key = begin; key < end; ++key) {
            const auto unrounded = static_cast<float>(p[key] / largest);
            const float probability = rounded_to_bf16(unrounded);
            sum += unrounded;
            if (probability == 0) continue;
            for (int c = 0; c < d; ++c) o[row + c] += probability * v[key_row(key) + c];
          }
        }
        if (sum == 0) continue;  // sees nothing
        for (int c = 0; c < d; ++c) {
          o[row + c] = rounded_to_bf16(o[row + c] / sum);
          rounded_delta += o[row + c] * d_o[row + c];
          delta += exact.o[row + c] * d_o[row + c];
        }
        for (int key = 0; key < keys; ++key) {
          if (p[key] < 1e-30) continue;
          const double dp = ds[key] / p[key] + delta;
          const float dv_weight = rounded_to_bf16(static_cast<float>(p[key]));
          const float ds_weight = rounded_to_bf16(static_cast<float>(p[key] * (dp - rounded_delta)));
          const size_t at = key_row(key);
          for (int c = 0; c < d; ++c) {
            dq[row + c] += ds_weight * k[at + c];
            dk[at + c] += ds_weight * q[row + c];
            dv[at + c] += dv_weight * d_o[row + c];
          }
        }
      }
  const auto result = [](const std::vector<float>& x, float scale) {
    std::vector<double> out;
    for (const float value : x) out.push_back(rounded_to_bf16(value * scale));
    return out;
  };
  return {result(o, 1), result(dq, shape.scale), result(dk, shape.scale), result(dv, 1)};
}

}  // namespace sb::gpu
