#pragma once

#include <algorithm>
#include <functional>
#include <span>

#include "core/labels.h"
#include "device/exec.h"

namespace sb {

struct LossSums {
  double weighted = 0;  // Σ weight · token loss: what training minimises
  double nll = 0;       // Σ token loss over counted targets
  int64_t targets = 0;  // labels that count
  int64_t correct = 0;  // of these, how many had the largest logit, alone
  LossSums& operator+=(const LossSums& other) {
    weighted += other.weighted;
    nll += other.nll;
    targets += other.targets;
    correct += other.correct;
    return *this;
  }
};

// What one rank has of a vocabulary that several share: `weight` below has the rows of the tokens from `first` on. All
// of them compute the loss of the same rows with the same labels; dhidden is this rank's part of a sum.
struct VocabularyPart {
  int64_t first = 0, whole = 0;
  int ranks = 1, rank = 0;
  // `all` [ranks, …], fp32, has this rank's part (number `rank`) and gets those of the others.
  std::function<void(TensorView all)> gather;
};

// Vocabulary projection and cross-entropy in chunks of `chunk` tokens, so that all logits never exist at once.
// hidden [T, H], weight [V, H], labels [T] (i32, kIgnoredLabel does not count), weights [T] (f32; see
// model/micro_batch.h). token_loss [T] gets each token's loss (0 where it does not count); empty: not wanted. `sums` is
// host memory (HostMemory of device/memory.h on CUDA: it holds the sums once the stream has come that far; a label
// outside the vocabulary makes them NaN there and is refused on the CPU). Long stretches that do not count (prompts)
// are not computed; CUDA sees them in host_labels, the labels once more in host memory (empty: it computes all rows).
// `part`: where ranks share the vocabulary.
void loss_forward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels, TensorView weights,
                  int64_t chunk, TensorView token_loss, LossSums* sums, std::span<const int32_t> host_labels = {},
                  const VocabularyPart& part = {});

// The same, and in the same pass over the logits dhidden [T, H] (written) and dweight [V, H] (added to, or with
// accumulate false written; empty: not wanted) of Σ weight · token loss. `hidden` and `dhidden` may not alias.
void loss_forward_backward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels,
                           TensorView weights, int64_t chunk, TensorView token_loss, TensorView dhidden,
                           TensorView dweight, LossSums* sums, std::span<const int32_t> host_labels = {},
                           bool accumulate = true, const VocabularyPart& part = {});

// The next rows to compute at or after `row`: starts and ends with a label that counts, at most `chunk` rows, and stops
// before a stretch of more than `worth_skipping` that do not count. No rows: none is left.
struct LossRows {
  int64_t begin, end;
};
inline LossRows next_loss_rows(std::span<const int32_t> labels, int64_t row, int64_t chunk, int64_t worth_skipping) {
  const auto tokens = static_cast<int64_t>(labels.size());
  while (row < tokens && labels[static_cast<size_t>(row)] == kIgnoredLabel) ++row;
  int64_t end = row;
  for (int64_t t = row; t < std::min(tokens, row + chunk); ++t) {
    if (labels[static_cast<size_t>(t)] != kIgnoredLabel) end = t + 1;
    if (t - end >= worth_skipping) break;
  }
  return {row, end};
}

// Bytes of exec.scratch that either needs, with a part of the vocabulary as one of `ranks`.
int64_t loss_scratch_bytes(DeviceKind device, DType dtype, int64_t vocabulary, int64_t chunk, int ranks = 1);

}  // namespace sb
