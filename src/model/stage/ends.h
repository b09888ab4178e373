#pragma once

#include <span>

#include "core/arena.h"
#include "model/micro_batch.h"
#include "model/stage/slot.h"
#include "model/stage/stage_model.h"
#include "model/tensor_parallel/shared_rows.h"
#include "ops/cross_entropy.h"

namespace sb {

// Where the vocabulary comes in: the embedding before the first layer, final norm, head and loss after the last one.
// Ranks that share the products of a stage share the vocabulary, too.
class StageEnds {
 public:
  // All of them the stage's, which outlive it. `loss_pieces`: of the rows, each of which has its own sums.
  StageEnds(const ModelConfig& config, const StageOptions& options, StageModel& model, const SharedRows& shared,
            Arena& workspace, int64_t loss_pieces)
      : config_(config),
        options_(options),
        model_(model),
        shared_(shared),
        workspace_(workspace),
        loss_pieces_(loss_pieces) {}

  // x [rows, H] of the slot's tokens.
  void embed(const Exec& exec, const Slot& slot, TensorView x) const;
  void embedding_gradients(const Exec& exec, const Slot& slot, TensorView gradient) const;
  // Loss and, on the way, the gradient of `x`, the last layer's output; it stays in slot.end.
  void loss_with_gradient(const Exec& exec, const MicroBatch& batch, Slot& slot, TensorView x) const;
  // Loss alone; the normed hidden state stays in slot.end.
  void loss_only(const Exec& exec, const MicroBatch& batch, Slot& slot, TensorView x) const;

 private:
  template <typename Body>
  void each_loss_piece(const Slot& slot, const Body& body) const;
  VocabularyPart vocabulary_part() const;

  const ModelConfig& config_;
  const StageOptions& options_;
  StageModel& model_;
  const SharedRows& shared_;
  Arena& workspace_;
  int64_t loss_pieces_;
};

}  // namespace sb
