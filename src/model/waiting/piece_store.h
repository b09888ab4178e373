#pragma once

#include <vector>

#include "attention/attention.h"
#include "core/arena.h"
#include "device/exec.h"

namespace sb {

// How much a stage keeps of sequences that come in pieces.
struct PieceStorePlan {
  int layers = 0, kv_heads = 0, head_dim = 0;
  int64_t tokens = 0;   // of all pieces in flight
  int64_t longest = 0;  // sequence that may come in pieces; 0: none
  int64_t summed = 0;   // tokens of it that this rank holds, at most
  bool gradients = true;
  DType dtype = DType::f32;  // of keys and values
  int64_t packed = 0;        // bytes for every token in flight that attention wants beside its key and value

  // Of one layer.
  int64_t key_bytes() const;
  int64_t packed_bytes() const;
  int64_t sum_bytes() const;
};

// What a layer keeps of sequences that come in pieces.
struct LayerPieces {
  TensorView k, v;    // of all pieces in flight, a page for every slot
  TensorView packed;  // beside them (AttentionOperands); empty where attention wants nothing
  TensorView dk, dv;  // [summed, kv_heads, d] fp32: sums of the sequence whose pieces go backward
};

// One piece: tokens [begin, begin + tokens) of a sequence of `length`, of which this rank holds `own`.
struct PiecePlace {
  int64_t begin = 0, tokens = 0, length = 0, own = 0;
  int64_t end() const { return begin + tokens; }
};

// The keys and values of pieces in flight, with those whose backward is still to come, and the sums of gradients of the
// one sequence that is on its way back. It watches over the order in which pieces run: forward one after the other,
// backward in reverse.
class PieceStore {
 public:
  PieceStore(const PieceStorePlan& plan, DeviceKind device);
  // From here on, with nothing in flight: so many slots for pieces of at most so many tokens.
  void divide(int slots, int64_t tokens);

  // A piece goes forward in a slot, in which its keys and values will wait.
  void begin_forward(const PiecePlace& piece, int slot);
  // A piece goes backward.
  void begin_backward(const Exec& exec, const PiecePlace& piece, int slot);

  // The piece that ran forward in the slot last, as attention sees it.
  SequencePiece seen(int slot) const;
  const LayerPieces& layer(size_t layer) const { return layers_[layer]; }
  // Keys and values of the slot's own piece.
  TensorView own(TensorView pages, int slot) const;

 private:
  struct Held {
    PiecePlace piece;
    std::vector<KeyPage> pages;
  };
  PieceStorePlan plan_;
  Arena keys_, packed_, sums_;
  std::vector<LayerPieces> layers_;
  std::vector<Held> slots_;
  int64_t page_tokens_ = 0;
  int newest_ = -1;          // slot of the piece that ran forward last
  int64_t summed_from_ = 0;  // tokens from here on have gone backward, of the sequence on its way back
};

}  // namespace sb
