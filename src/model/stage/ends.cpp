#include "model/stage/ends.h"

#include "device/memory.h"
#include "ops/embedding.h"
#include "ops/rmsnorm.h"

namespace sb {

namespace {

std::span<const int32_t> labels_of(const MicroBatch& batch, const SharedRows::Piece& piece) {
  return std::span(batch.labels).subspan(static_cast<size_t>(piece.begin), static_cast<size_t>(piece.tokens()));
}

}  // namespace

void StageEnds::embed(const Exec& exec, const Slot& slot, TensorView x) const {
  if (!shared_.shared()) return embedding_forward(exec, slot.ids.tokens, model_.embedding.weight(), x);
  // Every rank knows some tokens: their sum is all of them.
  shared_.shares().each_piece(slot.tokens, [&](const SharedRows::Piece& piece) {
    ArenaScope scope(workspace_);
    const TensorView all = shared_.allocate(workspace_, options_.dtype, piece, config_.hidden_size);
    embedding_forward(exec, slot.ids.tokens.rows(piece.begin, piece.end), model_.embedding.weight(),
                      SharedRows::tokens(all, piece), options_.tensor.begin(config_.vocab_size));
    shared_.reduce_scatter(all).wait();
    copy_tensor(exec, shared_.own(all, piece), x.rows(piece.own_begin, piece.own_end));
  });
}

void StageEnds::embedding_gradients(const Exec& exec, const Slot& slot, TensorView gradient) const {
  const TensorView table = model_.embedding.gradient();
  if (!model_.embedding.add_to_gradient()) zero_tensor(exec, table);  // it gets rows, not all of it
  if (!shared_.shared()) return embedding_backward(exec, slot.ids.tokens, gradient, table);
  shared_.shares().each_piece(slot.tokens, [&](const SharedRows::Piece& piece) {
    ArenaScope scope(workspace_);
    const TensorView all = shared_.allocate(workspace_, options_.dtype, piece, config_.hidden_size);
    copy_tensor(exec, gradient.rows(piece.own_begin, piece.own_end), shared_.own(all, piece));
    shared_.gather(all).wait();
    embedding_backward(exec, slot.ids.tokens.rows(piece.begin, piece.end), SharedRows::tokens(all, piece), table,
                       options_.tensor.begin(config_.vocab_size), config_.vocab_size);
  });
}

// body(piece, its number) for all rows: where ranks share the vocabulary as many at a time as layers take, else all.
template <typename Body>
void StageEnds::each_loss_piece(const Slot& slot, const Body& body) const {
  int64_t number = 0;
  if (shared_.shared())
    shared_.shares().each_piece(slot.tokens, [&](const SharedRows::Piece& piece) { body(piece, number++); });
  else
    body(SharedRows::Piece{0, slot.tokens, slot.tokens, 0, slot.tokens}, number++);
  for (; number < loss_pieces_; ++number) *slot.loss(number) = {};
}

VocabularyPart StageEnds::vocabulary_part() const {
  if (!shared_.shared()) return {};
  const TensorShare& share = options_.tensor;
  return {share.begin(config_.vocab_size), config_.vocab_size, share.ranks, share.rank,
          [this](TensorView all) { shared_.gather(all).wait(); }};
}

void StageEnds::loss_with_gradient(const Exec& exec, const MicroBatch& batch, Slot& slot, TensorView x) const {
  const VocabularyPart part = vocabulary_part();
  each_loss_piece(slot, [&](const SharedRows::Piece& piece, int64_t number) {
    ArenaScope scope(workspace_);
    const TensorView own = x.rows(piece.own_begin, piece.own_end), end = slot.end.rows(piece.own_begin, piece.own_end);
    const TensorView hidden = shared_.allocate(workspace_, options_.dtype, piece, config_.hidden_size);
    const TensorView rstd = workspace_.allocate(DType::f32, {piece.own()});
    rmsnorm_forward(exec, own, model_.final_norm.weight(), config_.rms_norm_eps, shared_.own(hidden, piece), rstd);
    shared_.gather(hidden).wait();
    const TensorView gradient =
        shared_.shared() ? shared_.allocate(workspace_, options_.dtype, piece, config_.hidden_size) : end;
    loss_forward_backward(exec, SharedRows::tokens(hidden, piece), model_.head.weight(),
                          slot.ids.labels.rows(piece.begin, piece.end), slot.ids.weights.rows(piece.begin, piece.end),
                          options_.loss_chunk, slot.token_loss.rows(piece.begin, piece.end),
                          SharedRows::tokens(gradient, piece), model_.head.gradient(), slot.loss(number),
                          labels_of(batch, piece), model_.head.trained() && model_.head.add_to_gradient(), part);
    shared_.reduce_scatter(gradient).wait();
    rmsnorm_backward(exec, own, model_.final_norm.weight(), rstd, shared_.own(gradient, piece), end,
                     /*accumulate=*/false, model_.final_norm.gradient());
  });
  if (!batch.sources.empty() && options_.device != DeviceKind::cpu)
    download(exec, slot.token_loss, slot.token_loss_memory.data());
  slot.loss_ready.record(exec);
}

void StageEnds::loss_only(const Exec& exec, const MicroBatch& batch, Slot& slot, TensorView x) const {
  const VocabularyPart part = vocabulary_part();
  each_loss_piece(slot, [&](const SharedRows::Piece& piece, int64_t number) {
    ArenaScope scope(workspace_);
    const TensorView hidden =
        shared_.shared() ? shared_.allocate(workspace_, options_.dtype, piece, config_.hidden_size) : slot.end;
    const TensorView rstd = workspace_.allocate(DType::f32, {piece.own()});
    rmsnorm_forward(exec, x.rows(piece.own_begin, piece.own_end), model_.final_norm.weight(), config_.rms_norm_eps,
                    shared_.own(hidden, piece), rstd);
    shared_.gather(hidden).wait();
    loss_forward(exec, SharedRows::tokens(hidden, piece), model_.head.weight(),
                 slot.ids.labels.rows(piece.begin, piece.end), slot.ids.weights.rows(piece.begin, piece.end),
                 options_.loss_chunk, slot.token_loss.rows(piece.begin, piece.end), slot.loss(number),
                 labels_of(batch, piece), part);
  });
  slot.loss_ready.record(exec);
}

}  // namespace sb
