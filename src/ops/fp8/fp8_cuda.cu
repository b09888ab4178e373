#include <cuda_fp8.h>

#include <algorithm>

#include "device/cuda_products.h"
#include "device/kernel.cuh"
#include "ops/cuda/swiglu.cuh"
#include "ops/fp8/backends.h"

namespace sb::cuda {
namespace {

constexpr int kThreads = 256;
// A block casts a tile, a thread 4 rows × 8 columns of it.
constexpr int kTileRows = 64, kTileColumns = 128, kThreadRows = 4, kThreadColumns = 8;
constexpr int kAcross = kTileColumns / kThreadColumns;
static_assert(kAcross * (kTileRows / kThreadRows) == kThreads);
constexpr float kLargest = 448.0f, kLeastReached = 0x1p-100f;  // e4m3.h has the same for the host
constexpr int64_t kMostBlocks = 132 * 8;                       // that look for the largest magnitude

template <typename T>
__global__ void __launch_bounds__(kThreads) largest_kernel(const T* x, int64_t vectors, uint32_t* largest) {
  constexpr int kAtOnce = 4;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  uint32_t most = 0;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors; i += kAtOnce * step) {
    float values[kAtOnce][kVector<T>] = {};
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (i + j * step < vectors) load(x + (i + j * step) * kVector<T>, values[j]);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
#pragma unroll
      for (int k = 0; k < kVector<T>; ++k) most = max(most, __float_as_uint(values[j][k]) & 0x7fffffffu);
    }
  }
  note_largest(most, largest);
}

// What values are multiplied by; one thread of the grid writes what a code is worth.
__device__ float factor_for(const float* noted, float* largest_of_all, float* worth) {
  const float largest = *noted, reached = largest < kLeastReached ? kLeastReached : largest;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) {
    if (noted != largest_of_all) *largest_of_all = largest;
    *worth = __fdiv_rn(reached, kLargest);
  }
  return __fdiv_rn(kLargest, reached);
}

template <typename T>
__device__ void load_columns(const T* from, float (&to)[kThreadColumns]) {
  constexpr int kEach = kVector<T> < kThreadColumns ? kVector<T> : kThreadColumns;
#pragma unroll
  for (int i = 0; i < kThreadColumns; i += kEach) load(from + i, reinterpret_cast<float(&)[kEach]>(to[i]));
}

__device__ uint2 codes_of(const float (&values)[kThreadColumns], float factor) {
  uint32_t words[2] = {};
#pragma unroll
  for (int j = 0; j < kThreadColumns; j += 2) {
    const uint32_t pair =
        __nv_cvt_float2_to_fp8x2(make_float2(values[j] * factor, values[j + 1] * factor), __NV_SATFINITE, __NV_E4M3);
    words[j / 4] |= pair << (j % 4 * 8);
  }
  return make_uint2(words[0], words[1]);
}

// Where a block's tile and a thread's part of it lie.
struct Place {
  int64_t first_row = int64_t{blockIdx.y} * kTileRows, first_column = int64_t{blockIdx.x} * kTileColumns;
  int across = threadIdx.x % kAcross, down = threadIdx.x / kAcross;
  int64_t row = first_row + down * kThreadRows, column = first_column + across * kThreadColumns;
};

// Codes by column, by way of shared memory: four rows of a column in a word.
struct Transposed {
  uint32_t words[kTileColumns][kTileRows / 4 + 1];

  __device__ void put(const Place& place, const uint2 (&codes)[kThreadRows]) {
#pragma unroll
    for (int j = 0; j < kThreadColumns; ++j) {
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
        word |= ((j < 4 ? codes[i].x : codes[i].y) >> (j % 4 * 8) & 0xffu) << (i * 8);
      words[place.across * kThreadColumns + j][place.down] = word;
    }
  }

  // After all have put theirs.
  __device__ void store(const Place& place, int64_t columns, int64_t padded_rows, uint8_t* to) const {
    constexpr int kParts = kTileRows / 16;  // of a column, 16 codes each
#pragma unroll
    for (int i = threadIdx.x; i < kTileColumns * kParts; i += kThreads) {
      const int of = i / kParts, part = i % kParts;
      const int64_t row = place.first_row + part * 16, column = place.first_column + of;
      if (column >= columns || row >= padded_rows) continue;
      const uint32_t* four = &words[of][part * 4];
      *reinterpret_cast<uint4*>(to + column * padded_rows + row) = make_uint4(four[0], four[1], four[2], four[3]);
    }
  }
};

template <typename T, bool kByRow, bool kByColumn>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(const T* x, int64_t padded_rows, const float* noted, Fp8Matrix to) {
  const int64_t rows = to.rows, columns = to.columns;
  const float factor = factor_for(noted, to.largest, to.worth);
  const Place at{};
  uint2 codes[kThreadRows] = {};
  if (at.column < columns) {
    float values[kThreadRows][kThreadColumns] = {};
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      if (at.row + i < rows) load_columns(x + (at.row + i) * columns + at.column, values[i]);
    }
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      codes[i] = codes_of(values[i], factor);
      if (kByRow && at.row + i < rows)
        *reinterpret_cast<uint2*>(to.by_row + (at.row + i) * columns + at.column) = codes[i];
    }
  }
  if constexpr (kByColumn) {
    SB_SHARED(Transposed, tile);
    tile.put(at, codes);
    __syncthreads();
    tile.store(at, columns, padded_rows, to.by_column);
  }
}

// Gradients of gate and up and silu(gate) · up of a thread's columns of a row, as swiglu_backward would write them.
template <typename T, int N>
struct SwigluRow {
  float gate[N], up[N], g[N];

  __device__ void read(const T* gate_up, const T* dh, int64_t row, int64_t column, int64_t width) {
    constexpr int kEach = kVector<T> < N ? kVector<T> : N;
#pragma unroll
    for (int i = 0; i < N; i += kEach) {
      load(gate_up + 2 * row * width + column + i, reinterpret_cast<float(&)[kEach]>(gate[i]));
      load(gate_up + (2 * row + 1) * width + column + i, reinterpret_cast<float(&)[kEach]>(up[i]));
      load(dh + row * width + column + i, reinterpret_cast<float(&)[kEach]>(g[i]));
    }
  }
  // g becomes silu(gate) · up.
  __device__ void differentiate() {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      g[i] = to_float(from_float<T>(swiglu_gradient<T>(gate[i], up[i], g[i])));
      gate[i] = to_float(from_float<T>(gate[i]));
      up[i] = to_float(from_float<T>(up[i]));
    }
  }
};

// A thread has a vector of columns of every gridDim.x-th row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    swiglu_largest_kernel(const T* gate_up, const T* dh, int64_t rows, int64_t width, uint32_t* of_dgate_up,
                          uint32_t* of_h) {
  const int64_t column = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kVector<T>;
  uint32_t most = 0, most_h = 0;
  if (column < width) {
#pragma unroll 2
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
      SwigluRow<T, kVector<T>> own;
      own.read(gate_up, dh, row, column, width);
      own.differentiate();
#pragma unroll
      for (int i = 0; i < kVector<T>; ++i) {
        const auto bits = [](float x) { return __float_as_uint(x) & 0x7fffffffu; };
        most = max(most, max(bits(own.gate[i]), bits(own.up[i])));
        most_h = max(most_h, bits(own.g[i]));
      }
    }
  }
  note_largest(most, of_dgate_up);
  __syncthreads();
  note_largest(most_h, of_h);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    swiglu_cast_kernel(const T* gate_up, const T* dh, int64_t rows, int64_t width, int64_t padded_rows,
                       Fp8Matrix dgate_up, Fp8Matrix h) {
  const float factor = factor_for(dgate_up.largest, dgate_up.largest, dgate_up.worth),
              factor_h = factor_for(h.largest, h.largest, h.worth);
  const Place at{};
  uint2 gates[kThreadRows] = {}, ups[kThreadRows] = {}, inners[kThreadRows] = {};
  if (at.column < width) {
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int64_t row = at.row + i;
      if (row >= rows) continue;
      SwigluRow<T, kThreadColumns> own;
      own.read(gate_up, dh, row, at.column, width);
      own.differentiate();
      gates[i] = codes_of(own.gate, factor);
      ups[i] = codes_of(own.up, factor);
      inners[i] = codes_of(own.g, factor_h);
    }
    // Only now, so that the rows above are fetched together.
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int64_t row = at.row + i;
      if (row >= rows) continue;
      *reinterpret_cast<uint2*>(dgate_up.by_row + 2 * row * width + at.column) = gates[i];
      *reinterpret_cast<uint2*>(dgate_up.by_row + (2 * row + 1) * width + at.column) = ups[i];
    }
  }
  SB_SHARED(Transposed, gate_tile);
  SB_SHARED(Transposed, up_tile);
  SB_SHARED(Transposed, inner_tile);
  gate_tile.put(at, gates);
  up_tile.put(at, ups);
  inner_tile.put(at, inners);
  __syncthreads();
  gate_tile.store(at, width, padded_rows, dgate_up.by_column);
  up_tile.store(at, width, padded_rows, dgate_up.by_column + width * padded_rows);
  inner_tile.store(at, width, padded_rows, h.by_column);
}

dim3 tiles(int64_t rows, int64_t columns) {
  return dim3(static_cast<unsigned>(ceil_div(columns, kTileColumns)), static_cast<unsigned>(ceil_div(rows, kTileRows)));
}

void forget_largest(const Exec& exec, const Fp8Matrix& of) {
  SB_CUDA_CHECK(cudaMemsetAsync(of.largest, 0, sizeof(float), stream_of(exec)));
}

uint32_t* largest_of(const Fp8Matrix& matrix) {
  return reinterpret_cast<uint32_t*>(matrix.largest);
}

}  // namespace

void fp8_quantize(const Exec& exec, TensorView x, const Fp8Matrix& to, TensorView largest) {
  if (x.elements() == 0) return;
  const float* noted = data<float>(largest);
  const int64_t padded = fp8_padded(to.rows);
  with_type(x.dtype(), "fp8_quantize", [&](auto element) {
    using T = decltype(element);
    SB_CHECK(vectors_fit<T>(to.columns, {x.raw()}), "fp8_quantize: rows that are not aligned to 16 bytes");
    if (noted == nullptr) {
      forget_largest(exec, to);
      const int64_t vectors = x.elements() / kVector<T>;
      const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, ceil_div(vectors, 4 * kThreads)));
      launch_kernel(largest_kernel<T>, {blocks, kThreads, 0, stream_of(exec)}, data<T>(x), vectors, largest_of(to));
      noted = to.largest;
    }
    const auto kernel = !to.by_column ? cast_kernel<T, true, false>
                        : !to.by_row  ? cast_kernel<T, false, true>
                                      : cast_kernel<T, true, true>;
    launch_kernel(kernel, {tiles(to.by_column ? padded : to.rows, to.columns), kThreads, 0, stream_of(exec)},
                  data<T>(x), padded, noted, to);
  });
  SB_CUDA_LAUNCHED();
}

void fp8_swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, const Fp8Matrix& dgate_up,
                         const Fp8Matrix& h) {
  if (h.rows == 0) return;
  forget_largest(exec, dgate_up);
  forget_largest(exec, h);
  with_type(dh.dtype(), "fp8_swiglu_backward", [&](auto element) {
    using T = decltype(element);
    SB_CHECK(vectors_fit<T>(h.columns, {gate_up.raw(), dh.raw()}),
             "fp8_swiglu_backward: rows that are not aligned to 16 bytes");
    const int64_t pieces = ceil_div(h.columns, kThreads * kVector<T>);
    const dim3 grid(static_cast<unsigned>(std::min(h.rows, ceil_div(kMostBlocks, pieces))),
                    static_cast<unsigned>(pieces));
    launch_kernel(swiglu_largest_kernel<T>, {grid, kThreads, 0, stream_of(exec)}, data<T>(gate_up), data<T>(dh), h.rows,
                  h.columns, largest_of(dgate_up), largest_of(h));
    const int64_t padded = fp8_padded(h.rows);
    launch_kernel(swiglu_cast_kernel<T>, {tiles(padded, h.columns), kThreads, 0, stream_of(exec)}, data<T>(gate_up),
                  data<T>(dh), h.rows, h.columns, padded, dgate_up, h);
  });
  SB_CUDA_LAUNCHED();
}

void fp8_multiply(const Exec& exec, const Fp8Operand& a, const Fp8Operand& b, TensorView bias, TensorView c,
                  TensorView d) {
  exec.products->run(exec.stream, {.transpose_b = true,
                                   .m = a.count,
                                   .n = b.count,
                                   .k = a.length,
                                   .fp8 = true,
                                   .output = d.dtype(),
                                   .a = a.codes,
                                   .b = b.codes,
                                   .c = c.raw(),
                                   .d = d.raw(),
                                   .bias = bias.raw(),
                                   .a_scale = a.worth,
                                   .b_scale = b.worth});
}

}  // namespace sb::cuda
