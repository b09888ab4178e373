#include "model/stage/slot.h"

#include <algorithm>
#include <cstring>

namespace sb {

namespace {

TensorView vector_view(const std::vector<int32_t>& values) {
  return {values.data(), {static_cast<int64_t>(values.size())}};
}

// Only the last stage in training copies them to the host, and on the CPU they are there.
int64_t token_loss_bytes(const StageOptions& options, bool has_loss) {
  if (options.device == DeviceKind::cpu || !options.training || !has_loss) return 0;
  return options.max_micro_batch_tokens * static_cast<int64_t>(sizeof(float));
}

void number_sequences(const MicroBatch& batch, std::vector<int32_t>& of_tokens) {
  SB_CHECK(std::ssize(batch.sequence_ids) == batch.sequences(), "{} ids of {} sequences", batch.sequence_ids.size(),
           batch.sequences());
  of_tokens.resize(static_cast<size_t>(batch.size()));
  for (size_t s = 0; s < batch.sequence_ids.size(); ++s)
    std::fill(of_tokens.begin() + batch.cu_seqlens[s], of_tokens.begin() + batch.cu_seqlens[s + 1],
              static_cast<int32_t>(batch.sequence_ids[s]));
}

}  // namespace

Slot::Slot(const StageOptions& options, const StageBytes& bytes, bool has_loss)
    : loss_memory(bytes.loss_pieces * static_cast<int64_t>(sizeof(LossSums)), options.device),
      token_loss_memory(token_loss_bytes(options, has_loss), options.device),
      staging(bytes.inputs, options.device),
      inputs(std::make_unique<Arena>(make_arena("micro-batch ids", bytes.inputs, options.device))),
      uploaded(options.device),
      loss_ready(options.device) {
  for (int64_t i = 0; i < bytes.loss_pieces; ++i) new (loss(i)) LossSums;
}

void Slot::begin(const Exec& exec, const StageOptions& options, const MicroBatch& batch, bool has_loss,
                 int64_t hidden) {
  arena->release(0);
  tokens = batch.size();
  rows = options.token_shares().own(tokens);
  end = token_loss = {};
  if (options.training || has_loss) end = arena->allocate(options.dtype, {rows, hidden});
  if (has_loss) token_loss = arena->allocate(DType::f32, {tokens});
  if (options.lora.dropout > 0) number_sequences(batch, sequences);
  ids = {vector_view(batch.tokens), vector_view(batch.positions), vector_view(batch.labels),
         TensorView(batch.weights.data(), {static_cast<int64_t>(batch.weights.size())}), vector_view(sequences)};
  if (options.device == DeviceKind::cuda) upload_ids(exec);
}

// Through page-locked memory, so that the host does not wait; from then on the ids lie on the device.
void Slot::upload_ids(const Exec& exec) {
  uploaded.wait();  // for the ids before these
  inputs->release(0);
  auto* next = static_cast<char*>(staging.data());
  for (TensorView* view : {&ids.tokens, &ids.positions, &ids.labels, &ids.weights, &ids.sequences}) {
    // Stages in the middle have no labels, and a rank that shares short sequences maybe no tokens.
    const TensorView there = inputs->allocate(view->dtype(), view->shape());
    if (view->elements() > 0) std::memcpy(next, view->raw(), static_cast<size_t>(view->bytes()));
    upload(exec, next, there);
    next += Arena::rounded(view->bytes());
    *view = there;
  }
  uploaded.record(exec);
}

}  // namespace sb
