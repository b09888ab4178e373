#pragma once

#include "core/labels.h"
#include "device/exec.h"

namespace sb {

struct LossSums {
  double weighted = 0;  // Σ weight · token loss: what training minimises
  double nll = 0;       // Σ token loss over counted targets
  int64_t targets = 0;  // labels that count
  int64_t correct = 0;  // of these, how many had the largest logit
  LossSums& operator+=(const LossSums& other) {
    weighted += other.weighted;
    nll += other.nll;
    targets += other.targets;
    correct += other.correct;
    return *this;
  }
};

// Vocabulary projection and cross-entropy in chunks of `chunk` tokens, so that all logits never exist at once.
// hidden [T, H], weight [V, H], labels [T] (i32, kIgnoredLabel does not count), weights [T] (f32; see
// model/micro_batch.h). token_loss [T] gets each token's loss (0 where it does not count); empty: not wanted. `sums` is
// host memory (HostMemory of device/memory.h on CUDA: it holds the sums once the stream has come that far; a label
// outside the vocabulary makes them NaN there and is refused on the CPU).
void loss_forward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels, TensorView weights,
                  int64_t chunk, TensorView token_loss, LossSums* sums);

// The same, and in the same pass over the logits dhidden [T, H] (written) and dweight [V, H] (accumulated) of
// Σ weight · token loss. `hidden` and `dhidden` may not alias.
void loss_forward_backward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels,
                           TensorView weights, int64_t chunk, TensorView token_loss, TensorView dhidden,
                           TensorView dweight, LossSums* sums);

// Bytes of exec.scratch that either needs.
int64_t loss_scratch_bytes(DeviceKind device, DType dtype, int64_t vocabulary, int64_t chunk);

}  // namespace sb
