#pragma once

// Operands of attention on both devices, for tests of the CUDA side.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/cpu/block_sparse.h"
#include "device/cuda.h"
#include "device/memory.h"
#include "tests/attention/reference.h"

namespace sb {

inline float rounded(float x, DType dtype) {
  if (dtype == DType::f32) return x;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

// One set of operands on the host in fp32 and on the device in the type of the test.
struct CudaOperands {
  std::vector<float> q, k, v, dout;
  AttentionShape shape;
  int64_t tokens;

  CudaOperands(const AttentionShape& s, int64_t n, DType dtype, uint64_t seed) : shape(s), tokens(n) {
    const auto draw = [&](int heads, uint64_t which) {
      std::vector<float> out = draw_normal(n * heads * s.head_dim, seed * 10 + which);
      for (float& x : out) x = rounded(x, dtype);
      return out;
    };
    q = draw(s.heads, 0);
    k = draw(s.kv_heads, 1);
    v = draw(s.kv_heads, 2);
    dout = draw(s.heads, 3);
  }
  // Given ones, rounded.
  CudaOperands(const AttentionShape& s, int64_t n, DType dtype, std::vector<float> q_, std::vector<float> k_,
               std::vector<float> v_, std::vector<float> dout_)
      : q(std::move(q_)), k(std::move(k_)), v(std::move(v_)), dout(std::move(dout_)), shape(s), tokens(n) {
    for (std::vector<float>* tensor : {&q, &k, &v, &dout})
      for (float& x : *tensor) x = rounded(x, dtype);
  }
};

struct CudaResults {
  std::vector<float> out, lse, dq, dk, dv;
};

class DeviceTensor {
 public:
  DeviceTensor(Shape shape, DType dtype)
      : arena_(make_arena("test", shape.elements() * dtype_bytes(dtype), DeviceKind::cuda)),
        view_(arena_.allocate(dtype, shape)) {
    std::vector<char> poison(view_.bytes(), static_cast<char>(0xFF));
    cuda::copy_and_wait(poison.data(), view_.raw(), view_.bytes());
  }
  DeviceTensor(const std::vector<float>& values, Shape shape, DType dtype) : DeviceTensor(shape, dtype) {
    if (dtype == DType::f32) {
      cuda::copy_and_wait(values.data(), view_.raw(), view_.bytes());
      return;
    }
    std::vector<uint16_t> halves;
    for (const float x : values) {
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      halves.push_back(static_cast<uint16_t>(bits >> 16));
    }
    cuda::copy_and_wait(halves.data(), view_.raw(), view_.bytes());
  }
  const TensorView& view() const { return view_; }
  std::vector<float> host() const {
    std::vector<float> out(view_.elements());
    if (view_.dtype() == DType::f32) {
      cuda::copy_and_wait(view_.raw(), out.data(), view_.bytes());
      return out;
    }
    std::vector<uint16_t> halves(out.size());
    cuda::copy_and_wait(view_.raw(), halves.data(), view_.bytes());
    for (size_t i = 0; i < out.size(); ++i) {
      const uint32_t bits = uint32_t{halves[i]} << 16;
      std::memcpy(&out[i], &bits, 4);
    }
    return out;
  }

 private:
  Arena arena_;
  TensorView view_;
};

inline double difference(const std::vector<float>& got, const std::vector<float>& want) {
  double sum = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isinf(want[i]) && got[i] == want[i]) continue;
    const double d = got[i] - want[i];
    if (!(std::abs(d) < 1e30)) return INFINITY;
    sum += d * d;
    norm += double{want[i]} * want[i];
  }
  // Where nothing but rounding is expected (a single key has no gradient), differences count as they are.
  return std::sqrt(sum / std::max({norm, 0.01 * static_cast<double>(want.size()), 1e-30}));
}

// The same lists with the CPU kernels.
inline CudaResults on_cpu(const Exec& exec, const CudaOperands& in, const BlockIndex& index) {
  const int d = in.shape.head_dim;
  const Shape wide{in.tokens, in.shape.heads, d}, narrow{in.tokens, in.shape.kv_heads, d};
  CudaResults r;
  r.out.resize(in.q.size());
  r.lse.resize(in.shape.heads * in.tokens);
  r.dq.resize(in.q.size());
  r.dk.resize(in.k.size());
  r.dv.resize(in.k.size());
  const AttentionOperands operands{{in.q.data(), wide},
                                   {in.k.data(), narrow},
                                   {in.v.data(), narrow},
                                   {r.out.data(), wide},
                                   {r.lse.data(), {in.shape.heads, in.tokens}}};
  block_sparse_forward(exec, in.shape, index, operands);
  block_sparse_backward(exec, in.shape, index, operands,
                        {{in.dout.data(), wide}, {r.dq.data(), wide}, {r.dk.data(), narrow}, {r.dv.data(), narrow}});
  return r;
}

inline void expect_close(const CudaResults& got, const CudaResults& want, DType dtype) {
  const bool exact = dtype == DType::f32;
  EXPECT_LT(difference(got.out, want.out), exact ? 3e-6 : 5e-3);
  EXPECT_LT(difference(got.lse, want.lse), 1e-5);
  EXPECT_LT(difference(got.dq, want.dq), exact ? 5e-6 : 7e-3);
  EXPECT_LT(difference(got.dk, want.dk), exact ? 5e-6 : 7e-3);
  EXPECT_LT(difference(got.dv, want.dv), exact ? 5e-6 : 7e-3);
}

}  // namespace sb
