#include <algorithm>
#include <cstring>

#include "device/blas.h"
#include "device/memory.h"
#include "ops/backends.h"
#include "ops/cpu/kernels.h"

namespace sb::cpu {
namespace {

struct LossOperands {
  TensorView hidden, weight, labels, weights, token_loss;
  TensorView dhidden, dweight;  // empty: forward only
  bool accumulate = true;       // dweight
};

// Every chunk passes over the weight and its gradient: as long as so many rows take.
constexpr int64_t kWorthSkipping = 32;

LossSums run(const Exec& exec, const LossOperands& operands, int64_t chunk) {
  const int64_t tokens = operands.hidden.dim(0), width = operands.hidden.dim(1), vocabulary = operands.weight.dim(0);
  const int32_t* labels = operands.labels.as<int32_t>();
  const float* weights = operands.weights.f32();
  const float* hidden = operands.hidden.f32();
  float* token_loss = operands.token_loss.empty() ? nullptr : operands.token_loss.f32();
  float* dhidden = operands.dweight.empty() ? nullptr : operands.dhidden.f32();
  for (int64_t t = 0; t < tokens; ++t) {
    SB_CHECK(labels[t] == kIgnoredLabel || (0 <= labels[t] && labels[t] < vocabulary),
             "label {} of token {} with a vocabulary of {}", labels[t], t, vocabulary);
  }

  const ArenaScope scope(*exec.scratch);
  float* logits = exec.scratch->allocate_array<float>(chunk * vocabulary);
  float* losses = exec.scratch->allocate_array<float>(chunk);
  int32_t* correct = exec.scratch->allocate_array<int32_t>(chunk);

  LossSums sums;
  bool holds_sums = operands.accumulate;  // dweight
  int64_t done = 0;
  const auto skip_to = [&](int64_t row) {
    if (token_loss != nullptr) std::fill(token_loss + done, token_loss + row, 0.0f);
    if (dhidden != nullptr) std::fill(dhidden + done * width, dhidden + row * width, 0.0f);
    done = row;
  };
  while (done < tokens) {
    const auto [begin, end] = next_loss_rows({labels, static_cast<size_t>(tokens)}, done, chunk, kWorthSkipping);
    skip_to(begin);
    const int64_t rows = end - begin;
    if (rows == 0) break;
    parallel_sgemm(*exec.pool, {.transpose_b = true,
                                .m = rows,
                                .n = vocabulary,
                                .k = width,
                                .a = hidden + begin * width,
                                .lda = width,
                                .b = operands.weight.f32(),
                                .ldb = width,
                                .c = logits,
                                .ldc = vocabulary});
    // `begin` by name: clang before 16 does not capture structured bindings on its own.
    exec.pool->parallel_for(rows, 8, [&, begin = begin](int64_t first, int64_t last, int) {
      for (int64_t r = first; r < last; ++r) {
        float* row = logits + r * vocabulary;
        const int32_t label = labels[begin + r];
        if (label == kIgnoredLabel) {
          losses[r] = 0.0f;
          correct[r] = 0;
          if (dhidden != nullptr) std::memset(row, 0, static_cast<size_t>(vocabulary) * sizeof(float));
          continue;
        }
        const RowLoss loss =
            cpu_kernels().cross_entropy_row(row, vocabulary, label, weights[begin + r], dhidden != nullptr);
        losses[r] = loss.loss;
        correct[r] = loss.correct ? 1 : 0;
      }
    });
    for (int64_t r = 0; r < rows; ++r) {
      if (labels[begin + r] == kIgnoredLabel) continue;
      sums.weighted += static_cast<double>(weights[begin + r]) * losses[r];
      sums.nll += losses[r];
      sums.targets += 1;
      sums.correct += correct[r];
    }
    if (token_loss != nullptr) std::copy(losses, losses + rows, token_loss + begin);
    if (dhidden != nullptr) {
      parallel_sgemm(*exec.pool, {.m = rows,
                                  .n = width,
                                  .k = vocabulary,
                                  .a = logits,
                                  .lda = vocabulary,
                                  .b = operands.weight.f32(),
                                  .ldb = width,
                                  .c = dhidden + begin * width,
                                  .ldc = width});
      parallel_sgemm(*exec.pool, {.transpose_a = true,
                                  .m = vocabulary,
                                  .n = width,
                                  .k = rows,
                                  .a = logits,
                                  .lda = vocabulary,
                                  .b = hidden + begin * width,
                                  .ldb = width,
                                  .beta = holds_sums ? 1.0f : 0.0f,
                                  .c = operands.dweight.f32(),
                                  .ldc = width});
      holds_sums = true;
    }
    done = end;
  }
  if (!operands.dweight.empty() && !holds_sums) zero_tensor(exec, operands.dweight);
  return sums;
}

}  // namespace

void loss_forward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels, TensorView weights,
                  int64_t chunk, TensorView token_loss, LossSums* sums) {
  *sums = run(exec, {hidden, weight, labels, weights, token_loss, {}, {}}, chunk);
}

void loss_forward_backward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels,
                           TensorView weights, int64_t chunk, TensorView token_loss, TensorView dhidden,
                           TensorView dweight, LossSums* sums, bool accumulate) {
  *sums = run(exec, {hidden, weight, labels, weights, token_loss, dhidden, dweight, accumulate}, chunk);
}

}  // namespace sb::cpu
