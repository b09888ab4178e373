#include <algorithm>

#include "device/cuda_products.h"
#include "device/kernel.cuh"
#include "device/memory.h"
#include "ops/backends.h"
#include "ops/cuda/vector.cuh"
#include "ops/row_part.h"

namespace sb::cuda {
namespace {

constexpr int kThreads = 512;
// Every chunk passes over the weight and its gradient: as long as so many rows take, by memory bandwidth and FLOP/s.
constexpr int64_t kWorthSkipping = 256;

// Largest logit and Σ exp(logit - largest) of a part of a row, and its largest logit apart from the label's.
struct Partial {
  float largest, sum, others;
};

template <typename T>
__device__ Partial merged(const Partial& a, const Partial& b) {
  const float largest = fmaxf(a.largest, b.largest);
  // An empty part has nothing to scale (and its -inf would make NaN of it).
  const float first = a.largest == -INFINITY && a.sum == 0.0f ? 0.0f : a.sum * exp_for<T>(a.largest - largest);
  const float second = b.largest == -INFINITY && b.sum == 0.0f ? 0.0f : b.sum * exp_for<T>(b.largest - largest);
  return {largest, first + second, fmaxf(a.others, b.others)};
}

template <typename T>
__device__ Partial block_merged(Partial part) {
  SB_SHARED(Partial, warps, [kThreads / 32]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    part = merged<T>(
        part, {__shfl_xor_sync(0xffffffffu, part.largest, offset), __shfl_xor_sync(0xffffffffu, part.sum, offset),
               __shfl_xor_sync(0xffffffffu, part.others, offset)});
  }
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = part;
  __syncthreads();
  part = warps[0];
  for (int warp = 1; warp < kThreads / 32; ++warp) part = merged<T>(part, warps[warp]);
  return part;
}

// Of a row of logits, by one block; label: its place there, outside: in another part of the row.
template <typename T, int N>
__device__ Partial row_partial(const T* row, int64_t vocabulary, int64_t label) {
  Partial part = {-INFINITY, 0, -INFINITY};
#pragma unroll 4
  for (int64_t c = threadIdx.x * N; c < vocabulary; c += kThreads * N) {
    float logit[N];
    load(row + c, logit);
    float largest = logit[0];
#pragma unroll
    for (int i = 1; i < N; ++i) largest = fmaxf(largest, logit[i]);
    float others = largest;
    if (c <= label && label < c + N) {
      others = -INFINITY;
#pragma unroll
      for (int i = 0; i < N; ++i) others = fmaxf(others, c + i == label ? -INFINITY : logit[i]);
    }
    part.others = fmaxf(part.others, others);
    if (largest > part.largest) {
      part.sum *= part.sum == 0.0f ? 0.0f : exp_for<T>(part.largest - largest);
      part.largest = largest;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) part.sum += exp_for<T>(logit[i] - part.largest);
  }
  return block_merged<T>(part);
}

// The logits give way to their gradient; this second reading of the row finds most of it in the L2 cache.
template <typename T, int N>
__device__ void write_gradient(T* row, int64_t vocabulary, int64_t label, float weight, float largest, float sum) {
  const float scale = weight / sum;
#pragma unroll 4
  for (int64_t c = threadIdx.x * N; c < vocabulary; c += kThreads * N) {
    float logit[N];
    load(row + c, logit);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      logit[i] = scale * exp_for<T>(logit[i] - largest) - (c + i == label ? weight : 0.0f);
    }
    store(row + c, logit);
  }
}

// A row whose label does not count.
template <typename T, int N, bool kGradient>
__device__ void clear_row(T* row, int64_t vocabulary, float* losses, int32_t* correct, float* token_loss) {
  if (threadIdx.x == 0) {
    losses[blockIdx.x] = 0;
    correct[blockIdx.x] = 0;
    if (token_loss != nullptr) token_loss[blockIdx.x] = 0;
  }
  if constexpr (kGradient) {
    const float zeros[N] = {};
    for (int64_t c = threadIdx.x * N; c < vocabulary; c += kThreads * N) store(row + c, zeros);
  }
}

// One block a row of logits, which with kGradient give way to their gradient.
template <typename T, int N, bool kGradient>
__global__ void __launch_bounds__(kThreads)
    row_kernel(T* logits, int64_t vocabulary, const int32_t* labels, const float* weights, float* losses,
               int32_t* correct, float* token_loss) {
  T* row = logits + blockIdx.x * vocabulary;
  const int32_t label = labels[blockIdx.x];
  if (label == kIgnoredLabel) return clear_row<T, N, kGradient>(row, vocabulary, losses, correct, token_loss);
  const bool known = 0 <= label && label < vocabulary;
  const float target = known ? to_float(row[label]) : NAN;  // before the gradient takes its place
  const Partial all = row_partial<T, N>(row, vocabulary, label);
  if (threadIdx.x == 0) {
    const float loss = all.largest + logf(all.sum) - target;
    losses[blockIdx.x] = loss;
    correct[blockIdx.x] = target > all.others ? 1 : 0;
    if (token_loss != nullptr) token_loss[blockIdx.x] = loss;
  }
  if constexpr (kGradient) write_gradient<T, N>(row, vocabulary, label, weights[blockIdx.x], all.largest, all.sum);
}

// Where ranks share the vocabulary: first what each has of the rows, ...
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    part_kernel(const T* logits, int64_t vocabulary, int64_t first, const int32_t* labels, RowPart* parts) {
  const T* row = logits + blockIdx.x * vocabulary;
  const int64_t label = labels[blockIdx.x] - first;
  const Partial part = row_partial<T, N>(row, vocabulary, label);
  if (threadIdx.x != 0) return;
  const bool here = 0 <= label && label < vocabulary;
  parts[blockIdx.x] = {part.largest, part.sum, part.others, here ? to_float(row[label]) : -INFINITY};
}

// ... then the loss from all parts [ranks, rows], and the gradient of this one. A label that no part has makes NaN.
template <typename T, int N, bool kGradient>
__global__ void __launch_bounds__(kThreads)
    merge_kernel(T* logits, int64_t vocabulary, int64_t first, const RowPart* parts, int ranks, const int32_t* labels,
                 const float* weights, float* losses, int32_t* correct, float* token_loss) {
  T* row = logits + blockIdx.x * vocabulary;
  if (labels[blockIdx.x] == kIgnoredLabel)
    return clear_row<T, N, kGradient>(row, vocabulary, losses, correct, token_loss);
  Partial all = {-INFINITY, 0, -INFINITY};
  float target = -INFINITY;
  for (int r = 0; r < ranks; ++r) {
    const RowPart& part = parts[int64_t{r} * gridDim.x + blockIdx.x];
    all = merged<T>(all, {part.largest, part.sum, part.others});
    target = fmaxf(target, part.target);
  }
  if (threadIdx.x == 0) {
    const float loss = target == -INFINITY ? NAN : all.largest + logf(all.sum) - target;
    losses[blockIdx.x] = loss;
    correct[blockIdx.x] = target > all.others ? 1 : 0;
    if (token_loss != nullptr) token_loss[blockIdx.x] = loss;
  }
  if constexpr (kGradient)
    write_gradient<T, N>(row, vocabulary, labels[blockIdx.x] - first, weights[blockIdx.x], all.largest, all.sum);
}

__device__ double block_sum(double x, double* warps) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0;
  for (int warp = 0; warp < kThreads / 32; ++warp) x += warps[warp];
  return x;
}

// Adds a chunk to the sums, by one block: the order is fixed.
__global__ void __launch_bounds__(kThreads) sum_kernel(const int32_t* labels, const float* weights, const float* losses,
                                                       const int32_t* correct, int64_t rows, LossSums* sums) {
  SB_SHARED(double, warps, [kThreads / 32]);
  double weighted = 0, nll = 0, targets = 0, right = 0;
  for (int64_t r = threadIdx.x; r < rows; r += kThreads) {
    if (labels[r] == kIgnoredLabel) continue;
    weighted += static_cast<double>(weights[r]) * losses[r];
    nll += losses[r];
    targets += 1;
    right += correct[r];
  }
  weighted = block_sum(weighted, warps);
  nll = block_sum(nll, warps);
  targets = block_sum(targets, warps);
  right = block_sum(right, warps);
  if (threadIdx.x != 0) return;
  LossSums total = *sums;
  total.weighted += weighted;
  total.nll += nll;
  total.targets += static_cast<int64_t>(targets);
  total.correct += static_cast<int64_t>(right);
  *sums = total;
}

struct LossOperands {
  TensorView hidden, weight, labels, weights, token_loss;
  TensorView dhidden, dweight;  // both empty: forward only; dweight alone: the weight is not trained
  bool accumulate = true;       // dweight
  const VocabularyPart& part;
  bool backward() const { return !dhidden.empty() || !dweight.empty(); }
};

// Rows that go through the vocabulary together.
struct Piece {
  int64_t begin, rows;
  float* losses;
  int32_t* correct;
  RowPart* parts;  // [ranks, rows] where ranks share the vocabulary
};

template <typename T, int N>
void launch_rows(const Exec& exec, const LossOperands& o, T* logits, const Piece& piece) {
  const int64_t vocabulary = o.weight.dim(0);
  const int32_t* labels = data<int32_t>(o.labels) + piece.begin;
  const float* weights = data<float>(o.weights) + piece.begin;
  float* token_loss = o.token_loss.empty() ? nullptr : o.token_loss.f32() + piece.begin;
  const auto grid = static_cast<unsigned>(piece.rows);
  if (o.part.ranks > 1) {
    launch_kernel(part_kernel<T, N>, {grid, kThreads, 0, stream_of(exec)}, logits, vocabulary, o.part.first, labels,
                  piece.parts + o.part.rank * piece.rows);
    SB_CUDA_LAUNCHED();
    o.part.gather(TensorView(piece.parts, DType::f32, {o.part.ranks, piece.rows * 4}, DeviceKind::cuda));
    const auto kernel = o.backward() ? merge_kernel<T, N, true> : merge_kernel<T, N, false>;
    launch_kernel(kernel, {grid, kThreads, 0, stream_of(exec)}, logits, vocabulary, o.part.first, piece.parts,
                  o.part.ranks, labels, weights, piece.losses, piece.correct, token_loss);
  } else {
    const auto kernel = o.backward() ? row_kernel<T, N, true> : row_kernel<T, N, false>;
    launch_kernel(kernel, {grid, kThreads, 0, stream_of(exec)}, logits, vocabulary, labels, weights, piece.losses,
                  piece.correct, token_loss);
  }
  SB_CUDA_LAUNCHED();
}

// What a stretch of rows that is not computed must hold: nothing.
void clear_rows(const Exec& exec, const LossOperands& o, int64_t begin, int64_t end) {
  if (begin == end) return;
  if (!o.token_loss.empty()) zero_tensor(exec, o.token_loss.rows(begin, end));
  if (o.backward()) zero_tensor(exec, o.dhidden.rows(begin, end));
}

void run(const Exec& exec, const LossOperands& o, int64_t chunk, LossSums* result,
         std::span<const int32_t> host_labels) {
  const int64_t tokens = o.hidden.dim(0), width = o.hidden.dim(1), vocabulary = o.weight.dim(0);
  const DType dtype = o.hidden.dtype();
  const ArenaScope scope(*exec.scratch);
  const TensorView logits = exec.scratch->allocate(dtype, {chunk, vocabulary});
  Piece piece = {};
  piece.losses = exec.scratch->allocate_array<float>(chunk);
  piece.correct = exec.scratch->allocate_array<int32_t>(chunk);
  if (o.part.ranks > 1) piece.parts = exec.scratch->allocate_array<RowPart>(o.part.ranks * chunk);
  LossSums* sums = exec.scratch->allocate_array<LossSums>(1);
  SB_CUDA_CHECK(cudaMemsetAsync(sums, 0, sizeof(LossSums), stream_of(exec)));
  bool holds_sums = o.accumulate;  // dweight
  for (int64_t done = 0; done < tokens;) {
    const auto [begin, end] = host_labels.empty() ? LossRows{done, std::min(tokens, done + chunk)}
                                                  : next_loss_rows(host_labels, done, chunk, kWorthSkipping);
    clear_rows(exec, o, done, begin);
    done = end;
    const int64_t rows = end - begin;
    if (rows == 0) break;
    piece.begin = begin;
    piece.rows = rows;
    const TensorView hidden = o.hidden.rows(begin, begin + rows);
    exec.products->run(exec.stream, {.transpose_b = true,
                                     .m = rows,
                                     .n = vocabulary,
                                     .k = width,
                                     .input = dtype,
                                     .output = dtype,
                                     .a = hidden.raw(),
                                     .b = o.weight.raw(),
                                     .d = logits.raw()});
    with_type(dtype, "cross entropy", [&](auto element) {
      using T = decltype(element);
      if (vectors_fit<T>(vocabulary, {logits.raw()}))
        launch_rows<T, kVector<T>>(exec, o, data<T>(logits), piece);
      else
        launch_rows<T, 1>(exec, o, data<T>(logits), piece);
    });
    launch_kernel(sum_kernel, {1, kThreads, 0, stream_of(exec)}, data<int32_t>(o.labels) + begin,
                  data<float>(o.weights) + begin, piece.losses, piece.correct, rows, sums);
    SB_CUDA_LAUNCHED();
    if (!o.backward()) continue;
    exec.products->run(exec.stream, {.m = rows,
                                     .n = width,
                                     .k = vocabulary,
                                     .input = dtype,
                                     .output = dtype,
                                     .a = logits.raw(),
                                     .b = o.weight.raw(),
                                     .d = o.dhidden.rows(begin, begin + rows).raw()});
    if (o.dweight.empty()) continue;
    exec.products->run(exec.stream, {.transpose_a = true,
                                     .m = vocabulary,
                                     .n = width,
                                     .k = rows,
                                     .input = dtype,
                                     .output = DType::f32,
                                     .a = logits.raw(),
                                     .b = hidden.raw(),
                                     .c = holds_sums ? o.dweight.raw() : nullptr,
                                     .d = o.dweight.raw()});
    holds_sums = true;
  }
  if (!o.dweight.empty() && !holds_sums) zero_tensor(exec, o.dweight);
  SB_CUDA_CHECK(cudaMemcpyAsync(result, sums, sizeof(LossSums), cudaMemcpyDefault, stream_of(exec)));
}

}  // namespace

void loss_forward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels, TensorView weights,
                  int64_t chunk, TensorView token_loss, LossSums* sums, std::span<const int32_t> host_labels,
                  const VocabularyPart& part) {
  run(exec, {hidden, weight, labels, weights, token_loss, {}, {}, true, part}, chunk, sums, host_labels);
}

void loss_forward_backward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels,
                           TensorView weights, int64_t chunk, TensorView token_loss, TensorView dhidden,
                           TensorView dweight, LossSums* sums, std::span<const int32_t> host_labels, bool accumulate,
                           const VocabularyPart& part) {
  run(exec, {hidden, weight, labels, weights, token_loss, dhidden, dweight, accumulate, part}, chunk, sums,
      host_labels);
}

}  // namespace sb::cuda
