#pragma once

// Attention in fp64, one thread block a row, from an explicit mask: slow, and too simple to be wrong.

#include <cmath>
#include <vector>

#include "device/kernel.cuh"
#include "tests/attention/gpu/hopper/device_case.h"

namespace sb::gpu {

constexpr uint8_t kUnseen = 255;

struct ReferenceArguments {
  int query_heads, kv_heads, d, list_heads, max_length, blocks, block;
  double scale;
  const __nv_bfloat16 *q, *k, *v, *d_o;
  const int32_t *start, *length_before;  // of each token: first token of its sequence; its position
  const int32_t* mask_row;               // of each token, -1: dense
  const int32_t* token_in_block;
  const uint8_t* mask;  // [list head][row][block]: first token that sees it, or kUnseen
  int rows;
  double *o, *lse, *dq, *dk, *dv, *p, *ds;  // p, ds [head][token][max_length]
};

__device__ inline bool reference_sees(const ReferenceArguments& a, int token, int head, int key) {
  if (key > a.length_before[token]) return false;
  const int row = a.mask_row[token];
  if (row < 0) return true;
  const int list_head = head / (a.query_heads / a.list_heads);
  const uint8_t first = a.mask[(static_cast<int64_t>(list_head) * a.rows + row) * a.blocks + key / a.block];
  return first != kUnseen && first <= a.token_in_block[token];
}

static __global__ void reference_rows(ReferenceArguments a) {
  const int token = blockIdx.x, head = blockIdx.y, kv = head / (a.query_heads / a.kv_heads);
  const int start = a.start[token], length = a.length_before[token] + 1;
  const int64_t row = static_cast<int64_t>(token) * a.query_heads + head;
  const int64_t statistic = static_cast<int64_t>(head) * gridDim.x + token;
  const __nv_bfloat16 *q = a.q + row * a.d, *d_o = a.d_o + row * a.d;
  double* p = a.p + (static_cast<int64_t>(head) * gridDim.x + token) * a.max_length;
  double* ds = a.ds + (static_cast<int64_t>(head) * gridDim.x + token) * a.max_length;
  SB_SHARED(double, shared_max);
  SB_SHARED(double, shared_sum);
  SB_SHARED(double, shared_delta);
  for (int key = threadIdx.x; key < length; key += blockDim.x) {
    const int64_t at = (static_cast<int64_t>(start + key) * a.kv_heads + kv) * a.d;
    double s = 0, dp = 0;
    for (int c = 0; c < a.d; ++c) {
      s += double(__bfloat162float(q[c])) * double(__bfloat162float(a.k[at + c]));
      dp += double(__bfloat162float(d_o[c])) * double(__bfloat162float(a.v[at + c]));
    }
    p[key] = reference_sees(a, token, head, key) ? s * a.scale : -INFINITY;
    ds[key] = dp;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double m = -INFINITY, sum = 0, delta = 0;
    for (int key = 0; key < length; ++key) m = fmax(m, p[key]);
    if (m > -INFINITY)
      for (int key = 0; key < length; ++key) {
        const double e = exp(p[key] - m);
        sum += e;
        delta += e * ds[key];
      }
    shared_max = m;
    shared_sum = sum;
    shared_delta = sum > 0 ? delta / sum : 0;
    a.lse[statistic] = sum > 0 ? m + log(sum) : -INFINITY;
  }
  __syncthreads();
  for (int key = threadIdx.x; key < length; key += blockDim.x) {
    p[key] = shared_sum > 0 ? exp(p[key] - shared_max) / shared_sum : 0;
    ds[key] = p[key] * (ds[key] - shared_delta);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < a.d; c += blockDim.x) {
    double o = 0, dq = 0;
    for (int key = 0; key < length; ++key) {
      const int64_t at = (static_cast<int64_t>(start + key) * a.kv_heads + kv) * a.d + c;
      o += p[key] * double(__bfloat162float(a.v[at]));
      dq += ds[key] * double(__bfloat162float(a.k[at]));
    }
    a.o[row * a.d + c] = o;
    a.dq[row * a.d + c] = dq * a.scale;
  }
}

static __global__ void reference_keys(ReferenceArguments a, int tokens) {
  const int token = blockIdx.x, kv = blockIdx.y, group = a.query_heads / a.kv_heads;
  const int key = a.length_before[token], start = a.start[token];
  for (int c = threadIdx.x; c < a.d; c += blockDim.x) {
    double dk = 0, dv = 0;
    for (int t = token; t < tokens && a.start[t] == start; ++t)
      for (int head = kv * group; head < (kv + 1) * group; ++head) {
        const int64_t at = (static_cast<int64_t>(head) * tokens + t) * a.max_length + key;
        const int64_t row = (static_cast<int64_t>(t) * a.query_heads + head) * a.d + c;
        dv += a.p[at] * double(__bfloat162float(a.d_o[row]));
        dk += a.ds[at] * double(__bfloat162float(a.q[row]));
      }
    const int64_t out = (static_cast<int64_t>(token) * a.kv_heads + kv) * a.d + c;
    a.dk[out] = dk * a.scale;
    a.dv[out] = dv;
  }
}

struct Reference {
  std::vector<double> o, lse, dq, dk, dv;
  int longest = 0;
  std::vector<double> p, ds;  // probabilities and gradients of the scores, [head][token][longest], where asked for
};

inline Reference reference(const Shape& shape, const Tensors& t, const std::vector<int32_t>& cu_seqlens,
                           const std::vector<bool>& dense, const RowLists* lists, bool matrices = false) {
  const int tokens = static_cast<int>(shape.tokens);
  std::vector<int32_t> start(tokens), position(tokens), mask_row(tokens, -1), in_block(tokens, 0);
  int row = 0, longest = 1;
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
    const int length = cu_seqlens[s + 1] - cu_seqlens[s];
    longest = std::max(longest, length);
    for (int i = 0; i < length; ++i) {
      start[cu_seqlens[s] + i] = cu_seqlens[s];
      position[cu_seqlens[s] + i] = i;
      if (!dense[s]) {
        mask_row[cu_seqlens[s] + i] = row + i / lists->query_block;
        in_block[cu_seqlens[s] + i] = i % lists->query_block;
      }
    }
    if (lists) row += (length + lists->query_block - 1) / lists->query_block;
  }
  const int block = lists ? lists->block : kBlock, blocks = (longest + block - 1) / block;
  std::vector<uint8_t> mask(1, 0);
  if (lists) {
    mask.assign(static_cast<size_t>(lists->heads) * lists->rows * blocks, kUnseen);
    for (size_t r = 0; r + 1 < lists->offsets.size(); ++r)
      for (int32_t i = lists->offsets[r]; i < lists->offsets[r + 1]; ++i)
        mask[r * blocks + entry_id(lists->entries[i])] = static_cast<uint8_t>(entry_first(lists->entries[i]));
  }
  DeviceArray<int32_t> d_start(start), d_position(position), d_row(mask_row), d_in(in_block);
  DeviceArray<uint8_t> d_mask(mask);
  const size_t matrix = static_cast<size_t>(shape.query_heads) * tokens * longest;
  DeviceArray<double> o(t.q.size()), lse(t.lse.size()), dq(t.q.size()), dk(t.k.size()), dv(t.k.size()), p(matrix),
      ds(matrix);
  ReferenceArguments a{shape.query_heads,
                       shape.kv_heads,
                       shape.head_dim,
                       lists ? lists->heads : 1,
                       longest,
                       blocks,
                       block,
                       shape.scale,
                       t.q.get(),
                       t.k.get(),
                       t.v.get(),
                       t.d_o.get(),
                       d_start.get(),
                       d_position.get(),
                       d_row.get(),
                       d_in.get(),
                       d_mask.get(),
                       lists ? lists->rows : 0,
                       o.get(),
                       lse.get(),
                       dq.get(),
                       dk.get(),
                       dv.get(),
                       p.get(),
                       ds.get()};
  launch_kernel(reference_rows, {dim3(tokens, shape.query_heads), 128, 0, nullptr}, a);
  launch_kernel(reference_keys, {dim3(tokens, shape.kv_heads), shape.head_dim, 0, nullptr}, a, tokens);
  must(cudaDeviceSynchronize(), "reference");
  Reference out{o.host(), lse.host(), dq.host(), dk.host(), dv.host(), longest};
  if (matrices) {
    out.p = p.host();
    out.ds = ds.host();
  }
  return out;
}

}  // namespace sb::gpu
