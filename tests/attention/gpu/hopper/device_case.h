#pragma once

// Inputs for tests and benchmarks of the attention kernels: device memory, random tensors, random lists. CUDA files
// only.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "attention/gpu/launch/params.h"
#include "attention/gpu/plan/work.h"
#include "device/kernel.cuh"
#include "tests/attention/gpu/hopper/lists.h"

namespace sb::gpu {

inline void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(2);
}

template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count) { must(cudaMalloc(&data_, count * sizeof(T) + 16), "cudaMalloc"); }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    must(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice), "copy to device");
  }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), count_(other.count_) { other.data_ = nullptr; }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return data_; }
  size_t size() const { return count_; }
  std::vector<T> host() const {
    std::vector<T> out(count_);
    must(cudaMemcpy(out.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "copy to host");
    return out;
  }
  // Bytes of ones are NaN in bf16 and fp32: what a kernel does not write stays visible.
  void poison() { must(cudaMemset(data_, 0xFF, count_ * sizeof(T)), "poison"); }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

__host__ __device__ inline uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x *= 0x846CA68Bu;
  return x ^ (x >> 16);
}

// The peers' script draws the same blocks.
inline bool block_kept(uint32_t head, uint32_t query_block, uint32_t key_block, double keep) {
  return mix(head * 0x9E3779B1u + query_block * 0x85EBCA77u + key_block * 0xC2B2AE3Du) < keep * 4294967296.0;
}

static __global__ void fill_normal(__nv_bfloat16* out, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < count; i += size_t(gridDim.x) * blockDim.x) {
    const uint32_t a = mix(static_cast<uint32_t>(i) ^ mix(seed)), b = mix(a + 0x9E3779B9u);
    const float radius = sqrtf(-2.f * logf((a + 1.f) * 2.3283064e-10f));
    out[i] = __float2bfloat16(radius * cospif(2.f * b * 2.3283064e-10f));
  }
}

inline DeviceArray<__nv_bfloat16> random_tensor(size_t count, uint32_t seed) {
  DeviceArray<__nv_bfloat16> out(count);
  launch_kernel(fill_normal, {1024, 256, 0, nullptr}, out.get(), count, seed);
  must(cudaGetLastError(), "fill");
  return out;
}

struct ListOptions {
  int query_block = 16;
  int block = kBlock;
  int heads = 0;
  double keep = 0.1;
  bool staircase = false;  // entries that later tokens of the query block add
  bool diagonal = true;    // always selected; without it some rows see nothing
  int sinks = 0, local = 0;
};

inline RowLists random_lists(const std::vector<int32_t>& cu_seqlens, const ListOptions& options) {
  RowLists out;
  out.heads = options.heads;
  out.query_block = options.query_block;
  out.block = options.block;
  out.offsets.push_back(0);
  for (int head = 0; head < options.heads; ++head) {
    out.rows = 0;
    for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
      const int length = cu_seqlens[s + 1] - cu_seqlens[s];
      for (int row = 0; row * options.query_block < length; ++row, ++out.rows) {
        const int first_token = row * options.query_block;
        const int last_token = std::min(first_token + options.query_block, length) - 1;
        for (int block = 0; block * options.block <= last_token; ++block) {
          const bool diagonal = (block + 1) * options.block > first_token;
          const bool forced = (diagonal && options.diagonal) || block < options.sinks ||
                              (block + options.local) * options.block + options.block > first_token;
          uint32_t first = 0;
          if (!forced || (diagonal && !options.diagonal)) {
            if (!block_kept(head + 977 * s, row, block, options.keep)) continue;
            if (options.staircase) {
              const uint32_t draw = mix(head * 31 + row * 7919 + block * 104729 + 5);
              if (draw & 1) first = (draw >> 1) % options.query_block;
            }
          }
          out.entries.push_back(list_entry(block, first));
        }
        out.offsets.push_back(static_cast<int32_t>(out.entries.size()));
      }
    }
  }
  return out;
}

// Device copies of a work list; the order of the backward's work comes from the device.
struct DeviceWork {
  Work work;
  ColumnLists columns;
  DeviceArray<int32_t> cu_seqlens, cu_subtiles;
  DeviceArray<ForwardItem> forward;
  DeviceArray<BackwardItem> places, backward;
  DeviceArray<SplitColumn> splits;
  DeviceArray<WorkCounts> counts{1};
  DeviceArray<int32_t> column_offsets;
  DeviceArray<uint32_t> row_entries, column_entries;
  DeviceArray<float> statistics, dq_sum, partials;
  DeviceArray<int32_t> counter{4};

  DeviceWork(const Shape& shape, const std::vector<int32_t>& seqlens, const std::vector<bool>& dense,
             const RowLists* lists, int workers)
      : work(work_of(shape, seqlens, dense, lists, workers)),
        columns(lists ? transpose(*lists, seqlens) : ColumnLists{}),
        cu_seqlens(seqlens),
        cu_subtiles(work.cu_subtiles),
        forward(work.forward),
        places(work.places),
        backward(work.limits.items),
        splits(work.limits.splits),
        column_offsets(columns.offsets),
        row_entries(lists ? lists->entries : std::vector<uint32_t>{}),
        column_entries(columns.entries),
        statistics(statistics_size(shape, work.tiling)),
        dq_sum(dq_sum_size(shape, work.tiling)),
        partials(partials_size(shape, work.limits.slots)) {
    backward.poison();
    splits.poison();
    order(shape, nullptr);
    must(cudaDeviceSynchronize(), "order of the backward's work");
  }

  void order(const Shape& shape, cudaStream_t stream) const {
    BackwardWorkParams p;
    p.shape = shape;
    p.tiling = work.tiling;
    p.places = places.get();
    p.column_offsets = column_offsets.get();
    p.head_places = work.head_places;
    p.columns = work.columns;
    p.workers = work.workers;
    p.items = backward.get();
    p.splits = splits.get();
    p.counts = counts.get();
    make_backward_work(p, stream);
  }
  int split_count() const { return counts.host()[0].splits; }

  static Work work_of(const Shape& shape, const std::vector<int32_t>& seqlens, const std::vector<bool>& dense,
                      const RowLists* lists, int workers) {
    if (lists == nullptr) return make_work(shape, seqlens, dense, nullptr, workers);
    const RowLayout layout = lists->layout();
    return make_work(shape, seqlens, dense, &layout, workers);
  }
};

struct Tensors {
  DeviceArray<__nv_bfloat16> q, k, v, o, d_o, dq, dk, dv;
  DeviceArray<float> lse;
  Tensors(const Shape& s, uint32_t seed)
      : q(random_tensor(s.tokens * s.query_heads * s.head_dim, seed)),
        k(random_tensor(s.tokens * s.kv_heads * s.head_dim, seed + 1)),
        v(random_tensor(s.tokens * s.kv_heads * s.head_dim, seed + 2)),
        o(q.size()),
        d_o(random_tensor(q.size(), seed + 3)),
        dq(q.size()),
        dk(k.size()),
        dv(k.size()),
        lse(s.tokens * s.query_heads) {}
};

inline ForwardParams forward_params(const Shape& shape, const Tensors& t, const DeviceWork& w) {
  ForwardParams p;
  p.shape = shape;
  p.tiling = w.work.tiling;
  p.q = t.q.get();
  p.k = t.k.get();
  p.v = t.v.get();
  p.o = t.o.get();
  p.lse = t.lse.get();
  p.items = w.forward.get();
  p.item_count = static_cast<int32_t>(w.forward.size());
  p.row_entries = w.row_entries.get();
  p.counter = w.counter.get();
  return p;
}

inline BackwardParams backward_params(const Shape& shape, const Tensors& t, const DeviceWork& w) {
  BackwardParams p;
  p.shape = shape;
  p.tiling = w.work.tiling;
  p.q = t.q.get();
  p.k = t.k.get();
  p.v = t.v.get();
  p.o = t.o.get();
  p.lse = t.lse.get();
  p.d_o = t.d_o.get();
  p.dq = t.dq.get();
  p.dk = t.dk.get();
  p.dv = t.dv.get();
  p.cu_seqlens = w.cu_seqlens.get();
  p.cu_subtiles = w.cu_subtiles.get();
  p.sequences = static_cast<int32_t>(w.cu_seqlens.size()) - 1;
  p.items = w.backward.get();
  p.splits = w.splits.get();
  p.counts = w.counts.get();
  p.limits = w.work.limits;
  p.column_offsets = w.column_offsets.get();
  p.column_entries = w.column_entries.get();
  p.columns = w.work.columns;
  p.row_items = w.forward.get();
  p.row_item_count = static_cast<int32_t>(w.forward.size());
  p.row_entries = w.row_entries.get();
  p.statistics = w.statistics.get();
  p.dq_sum = w.dq_sum.get();
  p.partials = w.partials.get();
  p.counter = w.counter.get();
  return p;
}

}  // namespace sb::gpu
