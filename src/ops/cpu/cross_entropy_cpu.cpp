#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/blas.h"
#include "device/memory.h"
#include "ops/backends.h"
#include "ops/cpu/kernels.h"

namespace sb::cpu {
namespace {

struct LossOperands {
  TensorView hidden, weight, labels, weights, token_loss;
  TensorView dhidden, dweight;  // both empty: forward only; dweight alone: the weight is not trained
  bool accumulate = true;       // dweight
  const VocabularyPart& part;
  bool backward() const { return !dhidden.empty() || !dweight.empty(); }
};

// Every chunk passes over the weight and its gradient: as long as so many rows take.
constexpr int64_t kWorthSkipping = 32;

// Rows that go through the vocabulary together.
struct Piece {
  int64_t begin, rows;
  float* logits;  // with backward: replaced by their gradient
  float* losses;
  int32_t* correct;
  RowPart* parts;  // [ranks, rows] where ranks share the vocabulary
};

// Of a whole row from its parts, `stride` apart.
RowPart merged(const RowPart* parts, int count, int64_t stride) {
  RowPart whole = parts[0];
  for (int i = 1; i < count; ++i) {
    const RowPart& part = parts[i * stride];
    whole.largest = std::max(whole.largest, part.largest);
    whole.others = std::max(whole.others, part.others);
    whole.target = std::max(whole.target, part.target);
  }
  if (count == 1) return whole;
  whole.sum = 0;
  for (int i = 0; i < count; ++i) {
    const RowPart& part = parts[i * stride];
    whole.sum += part.sum * std::exp(part.largest - whole.largest);
  }
  return whole;
}

void make_logits(const Exec& exec, const LossOperands& operands, const Piece& piece) {
  const int64_t width = operands.hidden.dim(1), vocabulary = operands.weight.dim(0);
  parallel_sgemm(*exec.pool, {.transpose_b = true,
                              .m = piece.rows,
                              .n = vocabulary,
                              .k = width,
                              .a = operands.hidden.f32() + piece.begin * width,
                              .lda = width,
                              .b = operands.weight.f32(),
                              .ldb = width,
                              .c = piece.logits,
                              .ldc = vocabulary});
}

// The label's place in this rank's part of the vocabulary; -1: it is another's.
int64_t own_label(const LossOperands& operands, int32_t label) {
  const int64_t place = label - operands.part.first;
  return 0 <= place && place < operands.weight.dim(0) ? place : -1;
}

RowPart part_of_row(const LossOperands& operands, const Piece& piece, int64_t row) {
  const int64_t vocabulary = operands.weight.dim(0);
  const int32_t label = operands.labels.as<int32_t>()[piece.begin + row];
  return cpu_kernels().cross_entropy_part(piece.logits + row * vocabulary, vocabulary, own_label(operands, label),
                                          operands.backward());
}

// From exp(logit - largest of this part) to the gradient weight · (softmax - onehot(label)).
void finish_row(const LossOperands& operands, const Piece& piece, int64_t row, float own_largest,
                const RowPart& whole) {
  piece.losses[row] = std::log(whole.sum) + (whole.largest - whole.target);
  piece.correct[row] = whole.target > whole.others ? 1 : 0;
  if (!operands.backward()) return;
  const int64_t vocabulary = operands.weight.dim(0);
  const float weight = operands.weights.f32()[piece.begin + row];
  float* gradient = piece.logits + row * vocabulary;
  const float shift = own_largest == whole.largest ? 1.0f : std::exp(own_largest - whole.largest);
  cpu_kernels().scale(weight / whole.sum * shift, vocabulary, gradient);
  const int64_t label = own_label(operands, operands.labels.as<int32_t>()[piece.begin + row]);
  if (label >= 0) gradient[label] -= weight;
}

void make_losses(const Exec& exec, const LossOperands& operands, const Piece& piece) {
  const int64_t vocabulary = operands.weight.dim(0);
  const int32_t* labels = operands.labels.as<int32_t>() + piece.begin;
  const VocabularyPart& part = operands.part;
  const bool shared = part.ranks > 1;
  RowPart* own = shared ? piece.parts + part.rank * piece.rows : nullptr;
  const auto each_row = [&](const auto& body) {
    exec.pool->parallel_for(piece.rows, 8, [&](int64_t first, int64_t last, int) {
      for (int64_t r = first; r < last; ++r)
        if (labels[r] != kIgnoredLabel) body(r);
    });
  };
  for (int64_t r = 0; r < piece.rows; ++r) {
    if (labels[r] != kIgnoredLabel) continue;
    piece.losses[r] = 0.0f;
    piece.correct[r] = 0;
    if (shared) own[r] = {};
    if (operands.backward())
      std::memset(piece.logits + r * vocabulary, 0, static_cast<size_t>(vocabulary) * sizeof(float));
  }
  if (!shared)
    return each_row([&](int64_t r) {
      const RowPart whole = part_of_row(operands, piece, r);
      finish_row(operands, piece, r, whole.largest, whole);
    });
  each_row([&](int64_t r) { own[r] = part_of_row(operands, piece, r); });
  part.gather(TensorView(&piece.parts->largest, {part.ranks, piece.rows * 4}));
  each_row([&](int64_t r) {
    finish_row(operands, piece, r, own[r].largest, merged(piece.parts + r, part.ranks, piece.rows));
  });
}

void add_sums(const LossOperands& operands, const Piece& piece, LossSums& sums) {
  const int32_t* labels = operands.labels.as<int32_t>() + piece.begin;
  const float* weights = operands.weights.f32() + piece.begin;
  for (int64_t r = 0; r < piece.rows; ++r) {
    if (labels[r] == kIgnoredLabel) continue;
    sums.weighted += static_cast<double>(weights[r]) * piece.losses[r];
    sums.nll += piece.losses[r];
    sums.targets += 1;
    sums.correct += piece.correct[r];
  }
}

void make_gradients(const Exec& exec, const LossOperands& operands, const Piece& piece, bool add_to_dweight) {
  const int64_t width = operands.hidden.dim(1), vocabulary = operands.weight.dim(0);
  parallel_sgemm(*exec.pool, {.m = piece.rows,
                              .n = width,
                              .k = vocabulary,
                              .a = piece.logits,
                              .lda = vocabulary,
                              .b = operands.weight.f32(),
                              .ldb = width,
                              .c = operands.dhidden.f32() + piece.begin * width,
                              .ldc = width});
  if (operands.dweight.empty()) return;
  parallel_sgemm(*exec.pool, {.transpose_a = true,
                              .m = vocabulary,
                              .n = width,
                              .k = piece.rows,
                              .a = piece.logits,
                              .lda = vocabulary,
                              .b = operands.hidden.f32() + piece.begin * width,
                              .ldb = width,
                              .beta = add_to_dweight ? 1.0f : 0.0f,
                              .c = operands.dweight.f32(),
                              .ldc = width});
}

LossSums run(const Exec& exec, const LossOperands& operands, int64_t chunk) {
  const int64_t tokens = operands.hidden.dim(0), width = operands.hidden.dim(1), vocabulary = operands.weight.dim(0);
  const int32_t* labels = operands.labels.as<int32_t>();
  float* token_loss = operands.token_loss.empty() ? nullptr : operands.token_loss.f32();
  const bool backward = operands.backward();
  const int64_t whole_vocabulary = operands.part.ranks > 1 ? operands.part.whole : vocabulary;
  for (int64_t t = 0; t < tokens; ++t) {
    SB_CHECK(labels[t] == kIgnoredLabel || (0 <= labels[t] && labels[t] < whole_vocabulary),
             "label {} of token {} with a vocabulary of {}", labels[t], t, whole_vocabulary);
  }

  const ArenaScope scope(*exec.scratch);
  Piece piece{};
  piece.logits = exec.scratch->allocate_array<float>(chunk * vocabulary);
  piece.losses = exec.scratch->allocate_array<float>(chunk);
  piece.correct = exec.scratch->allocate_array<int32_t>(chunk);
  if (operands.part.ranks > 1) piece.parts = exec.scratch->allocate_array<RowPart>(operands.part.ranks * chunk);

  LossSums sums;
  bool holds_sums = operands.accumulate;  // dweight
  int64_t done = 0;
  while (done < tokens) {
    const LossRows next = next_loss_rows({labels, static_cast<size_t>(tokens)}, done, chunk, kWorthSkipping);
    // What is skipped on the way there counts nothing.
    if (token_loss != nullptr) std::fill(token_loss + done, token_loss + next.begin, 0.0f);
    if (backward) std::fill(operands.dhidden.f32() + done * width, operands.dhidden.f32() + next.begin * width, 0.0f);
    done = next.end;
    piece.begin = next.begin;
    piece.rows = next.end - next.begin;
    if (piece.rows == 0) break;
    make_logits(exec, operands, piece);
    make_losses(exec, operands, piece);
    add_sums(operands, piece, sums);
    if (token_loss != nullptr) std::copy(piece.losses, piece.losses + piece.rows, token_loss + piece.begin);
    if (backward) {
      make_gradients(exec, operands, piece, holds_sums);
      holds_sums = true;
    }
  }
  if (!operands.dweight.empty() && !holds_sums) zero_tensor(exec, operands.dweight);
  return sums;
}

}  // namespace

void loss_forward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels, TensorView weights,
                  int64_t chunk, TensorView token_loss, LossSums* sums, const VocabularyPart& part) {
  *sums = run(exec, {hidden, weight, labels, weights, token_loss, {}, {}, true, part}, chunk);
}

void loss_forward_backward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels,
                           TensorView weights, int64_t chunk, TensorView token_loss, TensorView dhidden,
                           TensorView dweight, LossSums* sums, bool accumulate, const VocabularyPart& part) {
  *sums = run(exec, {hidden, weight, labels, weights, token_loss, dhidden, dweight, accumulate, part}, chunk);
}

}  // namespace sb::cpu
