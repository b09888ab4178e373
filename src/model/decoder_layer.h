#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "model/layer_product.h"
#include "model/layer_run.h"
#include "model/model_config.h"
#include "model/parameters.h"
#include "model/recompute.h"
#include "model/waiting/piece_store.h"

namespace sb {

// A norm's output and its rows' factors.
struct Normed {
  TensorView rows, rstd;

  Normed piece(int64_t begin, int64_t end) const {
    return rows.empty() ? Normed() : Normed{rows.rows(begin, end), rstd.rows(begin, end)};
  }
};

// What a layer keeps of a micro-batch between forward and backward. An empty view was not kept: backward brings it back
// with the operations forward used, so that it has the same bits. silu(gate)·up is never kept: it comes back in a pass
// that reads its operands anyway.
struct LayerSaved {
  TensorView x;         // [T, H] the layer's input; the stage's, which may have moved it in between
  TensorView qkv;       // [T, (heads + 2 kv_heads)·d] the projection's output; in place of q, k, v with q/k norms
  TensorView q, k, v;   // attention's operands
  TensorView out, lse;  // attention's results
  TensorView middle;    // [T, H] x + attention's projection
  TensorView gate_up;   // [T, 2·I]; backward overwrites it with its gradient
  Normed input, post_attention;  // the norms' outputs [T, H]; overwritten too
  AttentionState* state = nullptr;
  const LayerPieces* pieces = nullptr;  // of a piece; k and v are then rows of it
};

// Pre-norm decoder layer of the Qwen2 / Llama / Qwen3 family.
class DecoderLayer {
 public:
  // Declares the layer's parameters. `config`: as the rank of parameters.share() sees the `whole` model; kept by
  // reference. `dtype` is that of the activations.
  DecoderLayer(const ModelConfig& config, const ModelConfig& whole, int index, StageParameters& parameters,
               DType dtype);

  // The layer's products are of e4m3 codes from here on.
  void use_fp8();
  bool uses_fp8() const { return fp8_; }
  // Those of its weights stay in `arena` from one round_weights() to the next.
  void keep_codes(Arena& arena);
  void round_weights(const Exec& exec) const;

  int index() const { return index_; }

  // The saved tensors of `tokens` tokens but x, carved from `arena`; `rows`: of these, that this rank has between the
  // products.
  LayerSaved allocate_saved(Arena& arena, int64_t tokens, int64_t rows, Recompute recompute) const;

  // y [T, H] from saved.x; writes what `saved` has room for. Without backward, y may be saved.x itself.
  void forward(const LayerRun& run, const LayerSaved& saved, TensorView y) const;
  // `gradient` [T, H] holds the loss's gradient of y and gets that of x; parameter gradients accumulate, those of the
  // products' weights at once or in run.waiting.
  void backward(const LayerRun& run, const LayerSaved& saved, TensorView gradient) const;

  static int64_t saved_bytes(const ModelConfig& config, DType dtype, int64_t tokens, int64_t rows, Recompute recompute);
  // Most that forward (one that keeps nothing: the others need less) and backward hold in the workspace.
  static int64_t forward_workspace_bytes(const ModelConfig& config, DType dtype, int64_t tokens,
                                         const TokenShares& shares);
  static int64_t backward_workspace_bytes(const ModelConfig& config, DType dtype, int64_t tokens,
                                          const TokenShares& shares, Recompute recompute, bool split);
  // What the weights' gradients that wait are computed from, besides what was saved.
  static int64_t waiting_bytes(const ModelConfig& config, DType dtype, int64_t tokens, const TokenShares& shares,
                               Recompute recompute, bool fp8);
  // What adapters take besides, in either.
  static int64_t adapter_bytes(const ModelConfig& config, const LoraConfig& lora, DType dtype, int64_t tokens,
                               int64_t chunk);
  // And what codes of fp8 products do, with those of weights where these are not kept.
  static int64_t fp8_forward_bytes(const ModelConfig& config, int64_t tokens, int64_t chunk, bool with_weights);
  static int64_t fp8_backward_bytes(const ModelConfig& config, int64_t tokens, int64_t chunk, bool with_weights);
  static int64_t kept_codes_bytes(const ModelConfig& config);
  // Of exec.scratch, for all operations but attention.
  static int64_t scratch_bytes(const ModelConfig& config, DeviceKind device);

 private:
  static TensorView weight(const ParameterPlace& parameter) { return parameter.weight(); }
  static TensorView gradient_of(const ParameterPlace& parameter) { return parameter.gradient(); }
  // What attention reads, and with q/k norms what their backward needs.
  struct Operands {
    TensorView q, k, v, rstd_q, rstd_k;
  };
  Operands operands(const LayerSaved& saved, Arena& workspace, int64_t tokens) const;
  // What attention gets to see.
  AttentionOperands attended(const LayerSaved& saved, const Operands& own, TensorView out, TensorView lse) const;
  // The gradient of a product's output as it is now: the residual stream's, which goes on changing.
  TensorView kept_as_it_is(const LayerRun& run, TensorView gradient) const;
  // A zero, for the largest magnitude of a tensor that an fp8 product reads; empty where nobody reads it.
  TensorView largest_magnitude(const LayerRun& run) const;
  // Sums in fp32 in the type of the activations.
  TensorView as_activations(const LayerRun& run, TensorView sums) const;
  // Of the rows `x`; where there is nothing kept to write to, in `memory`.
  Normed norm(const LayerRun& run, const ParameterPlace& norm, TensorView x, const Normed& kept, Arena& memory) const;
  // Rows of a piece as the products need them: those of all ranks, padding included, which may still be on their way.
  struct PieceRows {
    TensorView all;
    TensorView rstd = {};  // of a norm's output: factors of this rank's rows
    CommRequest travel = {};
    TensorView tokens(const SharedRows::Piece& piece) {
      travel.wait();
      return SharedRows::tokens(all, piece);
    }
  };
  // Where these rows lie, in turn; nowhere where nobody shares them.
  struct NormRooms {
    SharedRows::Rooms rows, rstd;
  };
  NormRooms norm_rooms(const LayerRun& run) const;
  // A piece of a norm's output from this rank's rows `x`, with what is kept of it; `again`: that is there already.
  PieceRows begin_norm(const LayerRun& run, const SharedRows::Piece& piece, const ParameterPlace& norm, TensorView x,
                       const Normed& kept, bool again, const NormRooms& rooms, size_t room) const;
  // The rows of all ranks from this rank's rows of the stream.
  static PieceRows begin_gather(const LayerRun& run, const SharedRows::Piece& piece, TensorView stream,
                                TensorView room);
  // From the gradient of a product's output, whose input is a norm's output, to the product's own gradients, and to
  // this rank's rows of `gradient`, to which it adds what comes through the norm of `x`.
  void backward_normed_product(const LayerRun& run, const SharedRows::Piece& piece, const LayerProduct& product,
                               const ProductRows& dy, const ParameterPlace& norm, TensorView x, PieceRows& normed,
                               TensorView gradient) const;
  void project(const LayerRun& run, TensorView x, const Normed& kept, TensorView kept_qkv, const Operands& to) const;
  // qkv: rows begin to end of the projection.
  void split_and_rotate(const LayerRun& run, TensorView qkv, const Operands& to, int64_t begin, int64_t end) const;
  void add_attention(const LayerRun& run, TensorView x, TensorView out, TensorView middle) const;
  // y = middle + the MLP's output.
  void add_mlp(const LayerRun& run, const LayerSaved& saved, TensorView middle, TensorView y) const;
  void backward_mlp(const LayerRun& run, const LayerSaved& saved, TensorView middle, TensorView gradient) const;
  void backward_mlp_piece(const LayerRun& run, const SharedRows::Piece& piece, PieceRows& normed, PieceRows& dy,
                          TensorView kept_gate_up, TensorView middle, TensorView gradient) const;
  // From the gradient of the output product to that of attention's output.
  void backward_output(const LayerRun& run, TensorView out, TensorView gradient, TensorView dout) const;
  void backward_attention(const LayerRun& run, const LayerSaved& saved, const AttentionOperands& seen,
                          const Operands& to, TensorView qkv, TensorView gradient) const;

  const ModelConfig& config_;
  int index_;
  DType dtype_;
  AttentionShape attention_shape_;
  QkvShape qkv_shape_;
  // Nowhere where the family has none.
  ParameterPlace input_norm_, q_norm_, k_norm_, post_attention_norm_;
  LayerProduct qkv_, output_, gate_up_, down_;
  bool fp8_ = false;
};

}  // namespace sb
