#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "device/exec.h"

namespace sb {

struct AttentionShape {
  int heads, kv_heads, head_dim;
  float scale;  // on q·k, usually 1/sqrt(head_dim)
  int group() const { return heads / kv_heads; }
};

// Where keys of a cut sequence lie: those from token `begin` on, up to the next page's, in the rows of k and v from
// `row` on. Pages begin at multiples of attention's blocks. Where ranks share the sequence, tokens are counted among
// those that this rank holds, and a page may be empty.
struct KeyPage {
  int64_t begin = 0, row = 0;
};

// One piece of a sequence that runs piece by piece, the pieces in order forward and in reverse order backward. Its
// queries see the keys of the pieces before it.
struct SequencePiece {
  int64_t begin = 0;                    // its first token in the sequence
  int64_t length = 0;                   // of the whole sequence; 0: this is no piece
  std::span<const KeyPage> pages = {};  // of this piece and all before it, ascending
};

// The packed sequences of one micro-batch as attention sees them: sequence i is tokens cu_seqlens[i] …
// cu_seqlens[i+1]-1.
struct PackedSequences {
  std::span<const int32_t> cu_seqlens;
  // Attention budget in keys per query of every sequence, for the layer at hand; empty: the configured one.
  std::span<const int32_t> budgets;
  // Where several ranks share the sequences (context parallelism): the same for the whole sequences, of which
  // cu_seqlens has the part of this rank, some maybe empty. Empty: nothing is shared.
  std::span<const int32_t> whole_cu_seqlens = {};
  // The only sequence is a piece of one. Where ranks share it, cu_seqlens has this rank's part of the piece,
  // whole_cu_seqlens the piece.
  SequencePiece piece = {};
  // A forward that ran before, with the same operands and in the same step: it selects the same, and nothing is counted
  // or measured a second time.
  bool again = false;
  bool is_piece() const { return piece.length > 0; }
  int64_t piece_end() const {  // in the whole sequence
    return piece.begin + (whole_cu_seqlens.empty() ? tokens() : whole_cu_seqlens.back());
  }
  int sequences() const { return static_cast<int>(cu_seqlens.size()) - 1; }
  int64_t tokens() const { return cu_seqlens.back(); }
};

// What an implementation keeps between forward and backward of one (layer, micro-batch) beyond output and log-sum-exp:
// the block index of sparse attention. Dense attention keeps nothing.
class AttentionState {
 public:
  virtual ~AttentionState() = default;
};

// Of a piece: k and v are those of all pieces in flight, which SequencePiece::pages tells apart.
struct AttentionOperands {
  TensorView q;    // [T, heads, d]
  TensorView k;    // [T, kv_heads, d]
  TensorView v;    // [T, kv_heads, d]
  TensorView out;  // [T, heads, d]
  TensorView lse;  // [heads, T] fp32: log-sum-exp of the scaled scores; -inf for a row without keys
  // Of a piece: [rows of k, PieceBytes::page / 4] fp32, for what an implementation makes of keys and values. The
  // forward of a piece writes its own page; the forwards after it and all backwards read it.
  TensorView packed = {};
};

// Of a piece: dk and dv are fp32 [end of the piece, kv_heads, d], by tokens of the sequence (where ranks share it, by
// those that this rank holds), and added to. When the backward of a piece has run, the rows of its own tokens have
// their final values.
struct AttentionGradients {
  TensorView dout;        // [T, heads, d]
  TensorView dq, dk, dv;  // written, not accumulated
};

// Memory that pieces need, in bytes.
struct PieceBytes {
  int64_t scratch = 0, state = 0, call = 0;  // as Attention::scratch_bytes, state_bytes and call_bytes
  int64_t layer = 0;                         // what an implementation keeps of a cut sequence in every layer
  int64_t page = 0;                          // in every layer, for each token in flight: of AttentionOperands::packed
  int64_t reserved = 0;                      // what reserve_pieces() takes besides those of states and layers
};

// The attention a decoder layer calls. Dense, block-sparse and ring versions implement it; the model does not know
// which one it has. Causal, never across sequences.
class Attention {
 public:
  virtual ~Attention() = default;
  // A fresh state for one (layer, micro-batch) slot; reused from step to step.
  virtual std::unique_ptr<AttentionState> make_state() const = 0;
  // Writes out and lse. With `replay`, the state holds the selections of an earlier forward of the same operands and
  // they are used again (recompute); otherwise the state is written.
  virtual void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                       const AttentionOperands& operands, AttentionState& state, bool replay) = 0;
  // Writes dq, dk, dv of every token (zeros for keys that no query used).
  virtual void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                        const AttentionOperands& operands, const AttentionGradients& gradients,
                        AttentionState& state) = 0;
  // Before the first forward: these states will see micro-batches of this type and of at most so many tokens. What an
  // implementation would allocate on the device for them later it takes now.
  virtual void reserve(const AttentionShape& shape, int64_t max_tokens, DType dtype,
                       std::span<const std::unique_ptr<AttentionState>> states) {}
  // Bytes of exec.scratch that forward or backward needs for micro-batches of at most this many tokens.
  virtual int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const = 0;
  // Bytes a state may hold for a micro-batch of at most this many tokens, for the memory plan.
  virtual int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const = 0;
  // Bytes that reserve() takes besides those of so many states, likewise.
  virtual int64_t reserved_bytes(const AttentionShape& shape, int64_t max_tokens, DType dtype, int64_t states) const {
    return 0;
  }
  // Bytes that a call on the CPU allocates besides exec.scratch, likewise.
  virtual int64_t call_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const { return 0; }
  // Why sequences cannot come in pieces, to follow a colon; empty: they can.
  virtual std::string refuses_pieces() const { return "this attention computes whole sequences only"; }
  // Of pieces in flight on a stage.
  struct PieceLimits {
    int64_t max_tokens = 0;  // of a piece
    int64_t longest = 0;     // of their sequences, on all ranks that share them
    DType dtype = DType::f32;
    int64_t states = 1;                   // for every (layer, piece) in flight
    int first_layer = 0, last_layer = 1;  // of the stage; the last exclusive
    bool in_order = false;                // the pages of a sequence always follow each other
  };
  // What they need.
  virtual PieceBytes piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int threads) const {
    return {};
  }
  // After reserve(): the same states will see such pieces, too.
  virtual void reserve_pieces(const AttentionShape& shape, const PieceLimits& limits,
                              std::span<const std::unique_ptr<AttentionState>> states) {}
};

}  // namespace sb
