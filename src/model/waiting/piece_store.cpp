#include "model/waiting/piece_store.h"

#include "core/errors.h"
#include "device/memory.h"

namespace sb {
int64_t PieceStorePlan::key_bytes() const {
  return longest == 0 ? 0 : 2 * array_bytes(tokens * kv_heads * head_dim, dtype);
}

int64_t PieceStorePlan::packed_bytes() const {
  return longest == 0 ? 0 : Arena::rounded(tokens * packed);
}

int64_t PieceStorePlan::sum_bytes() const {
  return longest == 0 || !gradients ? 0 : 2 * array_bytes(summed * kv_heads * head_dim, DType::f32);
}

PieceStore::PieceStore(const PieceStorePlan& plan, DeviceKind device)
    : plan_(plan),
      keys_(make_arena("keys and values of pieces", plan.layers * plan.key_bytes(), device)),
      packed_(make_arena("packed keys and values of pieces", plan.layers * plan.packed_bytes(), device)),
      sums_(make_arena("gradient sums of pieces", plan.layers * plan.sum_bytes(), device)) {
  if (plan.longest == 0) return;
  const Shape pages{plan.tokens, plan.kv_heads, plan.head_dim};
  const Shape sums{plan.summed, plan.kv_heads, plan.head_dim};
  for (int i = 0; i < plan.layers; ++i) {
    LayerPieces& layer = layers_.emplace_back();
    layer.k = keys_.allocate(plan.dtype, pages);
    layer.v = keys_.allocate(plan.dtype, pages);
    if (plan.packed > 0) layer.packed = packed_.allocate(DType::f32, {plan.tokens, plan.packed / 4});
    if (!plan.gradients) continue;
    layer.dk = sums_.allocate(DType::f32, sums);
    layer.dv = sums_.allocate(DType::f32, sums);
  }
}

void PieceStore::divide(int slots, int64_t tokens) {
  if (plan_.longest == 0) return;
  SB_CHECK(slots * tokens <= plan_.tokens, "{} pieces of {} tokens, planned for {} in all", slots, tokens,
           plan_.tokens);
  slots_.resize(static_cast<size_t>(slots));
  page_tokens_ = tokens;
  newest_ = -1;
}

void PieceStore::begin_forward(const PiecePlace& piece, int slot) {
  SB_CHECK(
      0 < piece.tokens && piece.own <= page_tokens_ && piece.end() <= piece.length && piece.length <= plan_.longest,
      "tokens {} to {} of a sequence of {}, {} of them here; planned for pieces of {} of sequences of {}", piece.begin,
      piece.end(), piece.length, piece.own, page_tokens_, plan_.longest);
  Held& own = slots_[static_cast<size_t>(slot)];
  int64_t own_begin = 0;
  if (piece.begin == 0) {
    own.pages.clear();
  } else {
    SB_CHECK(newest_ >= 0 && newest_ != slot, "a piece from token {} on without those before it", piece.begin);
    const Held& before = slots_[static_cast<size_t>(newest_)];
    SB_CHECK(before.piece.end() == piece.begin && before.piece.length == piece.length,
             "a piece from token {} of {} on after one up to {} of {}", piece.begin, piece.length, before.piece.end(),
             before.piece.length);
    own.pages = before.pages;
    own_begin = before.pages.back().begin + before.piece.own;
  }
  SB_CHECK(own_begin + piece.own <= plan_.summed, "{} tokens of a sequence here, planned for {}", own_begin + piece.own,
           plan_.summed);
  own.piece = piece;
  own.pages.push_back({own_begin, slot * page_tokens_});
  newest_ = slot;
}

void PieceStore::begin_backward(const Exec& exec, const PiecePlace& piece, int slot) {
  if (piece.end() == piece.length) {
    const int64_t all = slots_[static_cast<size_t>(slot)].pages.back().begin + piece.own;
    for (const LayerPieces& layer : layers_) {
      zero_tensor(exec, layer.dk.rows(0, all));
      zero_tensor(exec, layer.dv.rows(0, all));
    }
    summed_from_ = piece.length;
  }
  SB_CHECK(summed_from_ == piece.end(), "the piece up to token {} goes backward before those up to {}", piece.end(),
           summed_from_);
  summed_from_ = piece.begin;
}

SequencePiece PieceStore::seen(int slot) const {
  const Held& held = slots_[static_cast<size_t>(slot)];
  return {held.piece.begin, held.piece.length, held.pages};
}

TensorView PieceStore::own(TensorView pages, int slot) const {
  const int64_t row = slot * page_tokens_;
  return pages.rows(row, row + slots_[static_cast<size_t>(slot)].piece.own);
}

}  // namespace sb
