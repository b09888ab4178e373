#include "model/decoder_layer.h"

#include <algorithm>
#include <cmath>

#include "device/memory.h"
#include "model/layer_widths.h"
#include "model/tensor_parallel/row_sums.h"
#include "ops/adamw.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace sb {

namespace {

TensorView kept_or_new(TensorView kept, Arena& workspace, DType dtype, Shape shape) {
  return kept.empty() ? workspace.allocate(dtype, shape) : kept;
}

// [T, heads, d] as the products see it: [T, heads·d].
TensorView flat_heads(TensorView heads) {
  return heads.reshaped({heads.dim(0), heads.dim(1) * heads.dim(2)});
}

// The rows of keys or values that a rank has: those of its own heads, or of the one head that several ranks share.
TensorCut key_rows(const TensorShare& share, const ModelConfig& whole) {
  const int64_t rows = int64_t{whole.kv_heads} * whole.head_dim;
  if (share.ranks <= whole.kv_heads) return share.rows(rows);
  const int copies = share.ranks / whole.kv_heads;
  const int64_t begin = int64_t{share.rank / copies} * whole.head_dim;
  return {TensorCut::Axis::rows, rows, begin, begin + whole.head_dim, copies, share.rank % copies};
}

}  // namespace

DecoderLayer::DecoderLayer(const ModelConfig& config, const ModelConfig& whole, int index, StageParameters& parameters,
                           DType dtype)
    : config_(config),
      index_(index),
      dtype_(dtype),
      attention_shape_{config.heads, config.kv_heads, config.head_dim,
                       static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)))},
      qkv_shape_{config.heads, config.kv_heads, config.head_dim} {
  const LayerWidths width(config), all(whole);
  const TensorShare& share = parameters.share();
  const std::string own = fmt::format("layers.{}.", index), hf = "model." + own;
  using Kind = StageParameters::Kind;
  const auto single = [&](const std::string& name, const std::string& hf_name, Shape shape, const TensorCut& cut,
                          Kind kind = Kind::product) {
    return parameters.declare(kind, own + name, shape, {{hf + hf_name, 0, shape[0], cut}});
  };
  const auto norm = [&](const std::string& name, const std::string& hf_name, int64_t size) {
    return single(name, hf_name, {size}, share.whole(), Kind::norm);
  };
  // One product computes q, k and v.
  const TensorCut queries = share.rows(all.query), keys = key_rows(share, whole);
  const auto fused_qkv = [&](const std::string& kind, Shape shape) {
    return parameters.declare(Kind::product, own + "qkv." + kind, shape,
                              {{hf + "self_attn.q_proj." + kind, 0, width.query, queries},
                               {hf + "self_attn.k_proj." + kind, width.query, width.query + width.key, keys},
                               {hf + "self_attn.v_proj." + kind, width.query + width.key, width.qkv, keys}});
  };
  input_norm_ = norm("input_norm.weight", "input_layernorm.weight", width.hidden);
  const ParameterPlace qkv_weight = fused_qkv("weight", {width.qkv, width.hidden});
  qkv_ = LayerProduct(qkv_weight, config.qkv_bias ? fused_qkv("bias", {width.qkv}) : ParameterPlace());
  if (config.qk_norm) {
    q_norm_ = norm("q_norm.weight", "self_attn.q_norm.weight", config.head_dim);
    k_norm_ = norm("k_norm.weight", "self_attn.k_norm.weight", config.head_dim);
  }
  const ParameterPlace output_weight =
      single("output.weight", "self_attn.o_proj.weight", {width.hidden, width.query}, share.columns(all.query));
  ParameterPlace output_bias;
  if (config.output_bias) output_bias = single("output.bias", "self_attn.o_proj.bias", {width.hidden}, share.whole());
  // Of ranks whose products are summed, the first one adds the bias.
  output_ = LayerProduct(output_weight, share.rank == 0 ? output_bias : ParameterPlace());
  post_attention_norm_ = norm("post_attention_norm.weight", "post_attention_layernorm.weight", width.hidden);
  const TensorCut channels = share.rows(all.intermediate);
  gate_up_ = LayerProduct(
      parameters.declare(Kind::product, own + "gate_up.weight", {2 * width.intermediate, width.hidden},
                         {{hf + "mlp.gate_proj.weight", 0, width.intermediate, channels},
                          {hf + "mlp.up_proj.weight", width.intermediate, 2 * width.intermediate, channels}}));
  down_ = LayerProduct(single("down.weight", "mlp.down_proj.weight", {width.hidden, width.intermediate},
                              share.columns(all.intermediate)));
  if (!parameters.lora().enabled()) return;
  using enum LoraModule;
  qkv_.declare_adapter(parameters, index, "qkv",
                       {{q, 0, width.query}, {k, width.query, width.key}, {v, width.query + width.key, width.key}});
  output_.declare_adapter(parameters, index, "output", {{o, 0, width.hidden}});
  gate_up_.declare_adapter(parameters, index, "gate_up",
                           {{gate, 0, width.intermediate}, {up, width.intermediate, width.intermediate}});
  down_.declare_adapter(parameters, index, "down", {{down, 0, width.hidden}});
}

void DecoderLayer::use_fp8() {
  fp8_ = true;
  for (LayerProduct* product : {&qkv_, &output_, &gate_up_, &down_}) product->use_fp8();
}

void DecoderLayer::keep_codes(Arena& arena) {
  for (LayerProduct* product : {&qkv_, &output_, &gate_up_, &down_}) product->keep_codes(arena);
}

void DecoderLayer::round_weights(const Exec& exec) const {
  for (const LayerProduct* product : {&qkv_, &output_, &gate_up_, &down_}) product->round_weight(exec);
}

LayerSaved DecoderLayer::allocate_saved(Arena& arena, int64_t tokens, int64_t rows, Recompute recompute) const {
  const LayerWidths width(config_);
  const int64_t d = config_.head_dim;
  LayerSaved saved;
  if (recompute == Recompute::layer) return saved;
  saved.out = arena.allocate(dtype_, {tokens, width.heads, d});
  saved.lse = arena.allocate(DType::f32, {width.heads, tokens});
  if (recompute == Recompute::attention) return saved;
  if (config_.qk_norm) {
    saved.qkv = arena.allocate(dtype_, {tokens, width.qkv});
  } else {
    saved.q = arena.allocate(dtype_, {tokens, width.heads, d});
    saved.k = arena.allocate(dtype_, {tokens, width.kv_heads, d});
    saved.v = arena.allocate(dtype_, {tokens, width.kv_heads, d});
  }
  saved.middle = arena.allocate(dtype_, {rows, width.hidden});
  for (Normed* normed : {&saved.input, &saved.post_attention}) {
    *normed = {arena.allocate(dtype_, {rows, width.hidden}), arena.allocate(DType::f32, {rows})};
  }
  saved.gate_up = arena.allocate(dtype_, {tokens, 2 * width.intermediate});
  return saved;
}

Normed DecoderLayer::norm(const LayerRun& run, const ParameterPlace& norm, TensorView x, const Normed& kept,
                          Arena& memory) const {
  const Normed to = {kept_or_new(kept.rows, memory, dtype_, x.shape()),
                     kept_or_new(kept.rstd, run.workspace, DType::f32, {x.dim(0)})};
  rmsnorm_forward(run.exec, x, weight(norm), config_.rms_norm_eps, to.rows, to.rstd);
  return to;
}

DecoderLayer::NormRooms DecoderLayer::norm_rooms(const LayerRun& run) const {
  NormRooms rooms;
  const TokenShares& shares = run.rows.shares();
  const int64_t tokens = run.tokens(), own = shares.padded_piece(tokens) / shares.share().ranks;
  rooms.rows = run.rows.allocate_rooms(run.workspace, dtype_, tokens, config_.hidden_size);
  for (int64_t i = 0; i < shares.rooms(tokens); ++i)
    rooms.rstd[static_cast<size_t>(i)] = run.workspace.allocate(DType::f32, {own});
  return rooms;
}

DecoderLayer::PieceRows DecoderLayer::begin_norm(const LayerRun& run, const SharedRows::Piece& piece,
                                                 const ParameterPlace& of, TensorView x, const Normed& kept_rows,
                                                 bool again, const NormRooms& rooms, size_t room) const {
  const TensorView own = x.rows(piece.own_begin, piece.own_end);
  const Normed kept = kept_rows.piece(piece.own_begin, piece.own_end);
  const bool there = again && !kept.rows.empty();
  if (!run.rows.shared()) {
    const Normed normed = there ? kept : norm(run, of, own, kept, again ? run.operands() : run.workspace);
    return {normed.rows, normed.rstd};
  }
  const TensorView all = run.rows.part(rooms.rows[room], piece), place = run.rows.own(all, piece);
  const Normed to = kept.rows.empty() ? Normed{place, rooms.rstd[room].rows(0, piece.own())} : kept;
  if (!there) norm(run, of, own, to, run.workspace);
  if (!kept.rows.empty()) copy_tensor(run.exec, kept.rows, place);
  return {all, to.rstd, run.rows.gather(all)};
}

DecoderLayer::PieceRows DecoderLayer::begin_gather(const LayerRun& run, const SharedRows::Piece& piece,
                                                   TensorView stream, TensorView room) {
  const TensorView own = stream.rows(piece.own_begin, piece.own_end);
  if (!run.rows.shared()) return {own};
  const TensorView all = run.rows.part(room, piece);
  copy_tensor(run.exec, own, run.rows.own(all, piece));
  return {all, {}, run.rows.gather(all)};
}

void DecoderLayer::backward_normed_product(const LayerRun& run, const SharedRows::Piece& piece,
                                           const LayerProduct& product, const ProductRows& dy,
                                           const ParameterPlace& norm, TensorView x, PieceRows& normed,
                                           TensorView gradient) const {
  TensorView dnormed = normed.all;
  if (run.waiting) {
    product.add_gradients(run, piece.begin, normed.all, dy);
    dnormed = run.workspace.allocate(dtype_, normed.all.shape());
    product.backward_input(run, piece.begin, dy, dnormed);
  } else if (!run.rows.shared()) {
    product.add_gradients(run, piece.begin, normed.all, dy);
    product.backward_input(run, piece.begin, dy, dnormed);  // the rows were last used in the line above
  } else {
    // Each rank has a part of the input's gradient; the sum travels while the weights' gradients are computed.
    dnormed = run.rows.allocate(run.workspace, dtype_, piece, x.dim(1));
    product.backward_input(run, piece.begin, dy, SharedRows::tokens(dnormed, piece));
    CommRequest sum = run.rows.reduce_scatter(dnormed);
    product.add_gradients(run, piece.begin, normed.tokens(piece), dy);
    sum.wait();
  }
  rmsnorm_backward(run.exec, x.rows(piece.own_begin, piece.own_end), weight(norm), normed.rstd,
                   run.rows.own(dnormed, piece), gradient.rows(piece.own_begin, piece.own_end),
                   /*accumulate=*/true, gradient_of(norm));
}

void DecoderLayer::project(const LayerRun& run, TensorView x, const Normed& kept, TensorView kept_qkv,
                           const Operands& to) const {
  ArenaScope scope(run.workspace);
  const NormRooms rooms = norm_rooms(run);
  run.rows.each_piece_ahead(
      run.workspace, run.tokens(),
      [&](const SharedRows::Piece& piece, size_t room) {
        return begin_norm(run, piece, input_norm_, x, kept, /*again=*/false, rooms, room);
      },
      [&](const SharedRows::Piece& piece, PieceRows& normed) {
        const TensorView qkv = kept_qkv.empty() ? run.workspace.allocate(dtype_, {piece.tokens(), qkv_shape_.width()})
                                                : kept_qkv.rows(piece.begin, piece.end);
        qkv_.forward(run, piece.begin, normed.tokens(piece), qkv);
        split_and_rotate(run, qkv, to, piece.begin, piece.end);
      });
}

void DecoderLayer::split_and_rotate(const LayerRun& run, TensorView qkv, const Operands& to, int64_t begin,
                                    int64_t end) const {
  const auto rows = [&](TensorView view) { return view.empty() ? view : view.rows(begin, end); };
  qkv_rope_forward(run.exec, qkv_shape_, qkv, run.positions.rows(begin, end), run.cos, run.sin, weight(q_norm_),
                   weight(k_norm_), config_.rms_norm_eps, rows(to.q), rows(to.k), rows(to.v), rows(to.rstd_q),
                   rows(to.rstd_k));
}

DecoderLayer::Operands DecoderLayer::operands(const LayerSaved& saved, Arena& workspace, int64_t tokens) const {
  const int64_t d = config_.head_dim;
  Operands to;
  to.q = kept_or_new(saved.q, workspace, dtype_, {tokens, config_.heads, d});
  to.k = kept_or_new(saved.k, workspace, dtype_, {tokens, config_.kv_heads, d});
  to.v = kept_or_new(saved.v, workspace, dtype_, {tokens, config_.kv_heads, d});
  if (config_.qk_norm) {
    to.rstd_q = workspace.allocate(DType::f32, {tokens, config_.heads});
    to.rstd_k = workspace.allocate(DType::f32, {tokens, config_.kv_heads});
  }
  return to;
}

AttentionOperands DecoderLayer::attended(const LayerSaved& saved, const Operands& own, TensorView out,
                                         TensorView lse) const {
  if (saved.pieces) return {own.q, saved.pieces->k, saved.pieces->v, out, lse, saved.pieces->packed};
  return {own.q, own.k, own.v, out, lse};
}

TensorView DecoderLayer::kept_as_it_is(const LayerRun& run, TensorView gradient) const {
  if (!run.waiting) return gradient;
  const TensorView copy = run.operands().allocate(dtype_, gradient.shape());
  copy_tensor(run.exec, gradient, copy);
  return copy;
}

TensorView DecoderLayer::largest_magnitude(const LayerRun& run) const {
  if (!fp8_ || run.exec.device == DeviceKind::cpu) return {};
  const TensorView largest = run.workspace.allocate(DType::f32, {1});
  zero_tensor(run.exec, largest);
  return largest;
}

TensorView DecoderLayer::as_activations(const LayerRun& run, TensorView sums) const {
  if (dtype_ == DType::f32) return sums;
  const TensorView rounded = run.workspace.allocate(dtype_, sums.shape());
  round_parameters(run.exec, sums, rounded);
  return rounded;
}

void DecoderLayer::add_attention(const LayerRun& run, TensorView x, TensorView out, TensorView middle) const {
  if (!run.rows.shared()) return output_.forward(run, 0, flat_heads(out), middle, /*residual=*/x);
  ArenaScope scope(run.workspace);
  RowSums sums(run.exec, run.rows, run.workspace, dtype_, run.tokens(), config_.hidden_size);
  run.rows.shares().each_piece(run.tokens(), [&](const SharedRows::Piece& piece) {
    output_.forward(run, piece.begin, flat_heads(out.rows(piece.begin, piece.end)), sums.place(piece));
    sums.add(piece, x.rows(piece.own_begin, piece.own_end), middle.rows(piece.own_begin, piece.own_end));
  });
  sums.finish();
}

void DecoderLayer::add_mlp(const LayerRun& run, const LayerSaved& saved, TensorView middle, TensorView y) const {
  Arena& workspace = run.workspace;
  const LayerWidths width(config_);
  ArenaScope scope(workspace);
  const NormRooms rooms = norm_rooms(run);
  RowSums sums(run.exec, run.rows, workspace, dtype_, run.tokens(), width.hidden);
  run.rows.each_piece_ahead(
      workspace, run.tokens(),
      [&](const SharedRows::Piece& piece, size_t room) {
        return begin_norm(run, piece, post_attention_norm_, middle, saved.post_attention, /*again=*/false, rooms, room);
      },
      [&](const SharedRows::Piece& piece, PieceRows& normed) {
        const TensorView gate_up = saved.gate_up.empty()
                                       ? workspace.allocate(dtype_, {piece.tokens(), 2 * width.intermediate})
                                       : saved.gate_up.rows(piece.begin, piece.end);
        const TensorView inner = workspace.allocate(dtype_, {piece.tokens(), width.intermediate});
        gate_up_.forward(run, piece.begin, normed.tokens(piece), gate_up);
        const TensorView largest = largest_magnitude(run);
        swiglu_forward(run.exec, gate_up, inner, largest);
        const TensorView residual = middle.rows(piece.own_begin, piece.own_end),
                         own = y.rows(piece.own_begin, piece.own_end);
        if (!run.rows.shared()) return down_.forward(run, piece.begin, {inner, largest}, own, residual);
        down_.forward(run, piece.begin, {inner, largest}, sums.place(piece));
        sums.add(piece, residual, own);
      });
  sums.finish();
}

void DecoderLayer::forward(const LayerRun& run, const LayerSaved& saved, TensorView y) const {
  const Exec& exec = run.exec;
  Arena& workspace = run.workspace;
  const LayerWidths width(config_);
  const int64_t tokens = run.tokens(), d = config_.head_dim;
  ArenaScope scope(workspace);
  // Never y itself: the same products on the same kinds of operands give the same bits at all levels of recompute.
  const TensorView middle = kept_or_new(saved.middle, workspace, dtype_, {saved.x.dim(0), width.hidden});
  {
    ArenaScope attention_scope(workspace);
    const Operands to = operands(saved, workspace, tokens);
    project(run, saved.x, saved.input, saved.qkv, to);
    const TensorView out = kept_or_new(saved.out, workspace, dtype_, {tokens, width.heads, d});
    const TensorView lse = kept_or_new(saved.lse, workspace, DType::f32, {width.heads, tokens});
    run.attention.forward(exec, index_, attention_shape_, run.sequences, attended(saved, to, out, lse), *saved.state,
                          /*replay=*/false);
    add_attention(run, saved.x, out, middle);
  }
  add_mlp(run, saved, middle, y);
}

void DecoderLayer::backward(const LayerRun& run, const LayerSaved& saved, TensorView gradient) const {
  Arena& workspace = run.workspace;
  const LayerWidths width(config_);
  const int64_t tokens = run.tokens(), d = config_.head_dim;

  // Bring back what forward did not keep.
  ArenaScope scope(workspace);
  const Operands to = operands(saved, workspace, tokens);
  TensorView qkv;  // of use in backward with q/k norms only
  if (config_.qk_norm) qkv = kept_or_new(saved.qkv, workspace, dtype_, {tokens, width.qkv});
  if (!saved.qkv.empty())
    split_and_rotate(run, qkv, to, 0, tokens);
  else if (saved.q.empty())
    project(run, saved.x, {}, qkv, to);
  const TensorView out = kept_or_new(saved.out, run.operands(), dtype_, {tokens, width.heads, d});
  const TensorView lse = kept_or_new(saved.lse, workspace, DType::f32, {width.heads, tokens});
  const AttentionOperands operands_seen = attended(saved, to, out, lse);
  if (saved.out.empty()) {
    run.attention.forward(run.exec, index_, attention_shape_, run.sequences, operands_seen, *saved.state,
                          /*replay=*/true);
  }
  {
    ArenaScope mlp_scope(workspace);
    const TensorView middle = kept_or_new(saved.middle, workspace, dtype_, {saved.x.dim(0), width.hidden});
    if (saved.middle.empty()) add_attention(run, saved.x, out, middle);
    backward_mlp(run, saved, middle, gradient);
  }
  backward_attention(run, saved, operands_seen, to, qkv, gradient);
}

void DecoderLayer::backward_output(const LayerRun& run, TensorView out, TensorView gradient, TensorView dout) const {
  if (!run.rows.shared()) {
    ArenaScope codes(run.workspace);
    const ProductRows of_gradient = output_.output_gradient(run, kept_as_it_is(run, gradient));
    output_.add_gradients(run, 0, flat_heads(out), of_gradient);
    return output_.backward_input(run, 0, of_gradient, flat_heads(dout));
  }
  ArenaScope scope(run.workspace);
  const SharedRows::Rooms rooms = run.rows.allocate_rooms(run.workspace, dtype_, run.tokens(), config_.hidden_size);
  run.rows.each_piece_ahead(
      run.workspace, run.tokens(),
      [&](const SharedRows::Piece& piece, size_t room) { return begin_gather(run, piece, gradient, rooms[room]); },
      [&](const SharedRows::Piece& piece, PieceRows& gathered) {
        const TensorView dy = gathered.tokens(piece);
        output_.add_gradients(run, piece.begin, flat_heads(out.rows(piece.begin, piece.end)), dy);
        output_.backward_input(run, piece.begin, dy, flat_heads(dout.rows(piece.begin, piece.end)));
      });
}

void DecoderLayer::backward_attention(const LayerRun& run, const LayerSaved& saved, const AttentionOperands& seen,
                                      const Operands& to, TensorView qkv, TensorView gradient) const {
  const Exec& exec = run.exec;
  Arena& workspace = run.workspace;
  const LayerWidths width(config_);
  const int64_t tokens = run.tokens(), d = config_.head_dim;

  // gradient: of middle, and through the residual of x. Attention's part is added.
  // The gradient of attention's output is done with when that of the projection comes: they share memory.
  const TensorView dqkv = run.operands().allocate(dtype_, {tokens, width.qkv});
  {
    ArenaScope scope(workspace);
    const TensorView dout(dqkv.raw(), dtype_, {tokens, width.heads, d}, dqkv.device());
    backward_output(run, seen.out, gradient, dout);
    const TensorView dq = workspace.allocate(dtype_, {tokens, width.heads, d});
    TensorView dk, dv;
    if (saved.pieces) {
      const int64_t begin = run.sequences.piece.pages.back().begin, end = begin + tokens;
      const LayerPieces& sums = *saved.pieces;
      run.attention.backward(exec, index_, attention_shape_, run.sequences, seen,
                             {dout, dq, sums.dk.rows(0, end), sums.dv.rows(0, end)}, *saved.state);
      // Later pieces have added their part before: what this piece's keys get is complete.
      dk = as_activations(run, sums.dk.rows(begin, end));
      dv = as_activations(run, sums.dv.rows(begin, end));
    } else {
      dk = workspace.allocate(dtype_, {tokens, width.kv_heads, d});
      dv = workspace.allocate(dtype_, {tokens, width.kv_heads, d});
      run.attention.backward(exec, index_, attention_shape_, run.sequences, seen, {dout, dq, dk, dv}, *saved.state);
    }
    qkv_rope_backward(exec, qkv_shape_, dq, dk, dv, run.positions, run.cos, run.sin, qkv, weight(q_norm_),
                      weight(k_norm_), to.rstd_q, to.rstd_k, dqkv, gradient_of(q_norm_), gradient_of(k_norm_));
  }
  const NormRooms rooms = norm_rooms(run);
  run.rows.each_piece_ahead(
      workspace, tokens,
      [&](const SharedRows::Piece& piece, size_t room) {
        return begin_norm(run, piece, input_norm_, saved.x, saved.input, /*again=*/true, rooms, room);
      },
      [&](const SharedRows::Piece& piece, PieceRows& normed) {
        const ProductRows of_own = qkv_.output_gradient(run, dqkv.rows(piece.begin, piece.end));
        backward_normed_product(run, piece, qkv_, of_own, input_norm_, saved.x, normed, gradient);
      });
}

void DecoderLayer::backward_mlp(const LayerRun& run, const LayerSaved& saved, TensorView middle,
                                TensorView gradient) const {
  struct Begun {
    PieceRows normed, dy;
  };
  ArenaScope scope(run.workspace);
  const NormRooms rooms = norm_rooms(run);
  const SharedRows::Rooms gradient_rooms =
      run.rows.allocate_rooms(run.workspace, dtype_, run.tokens(), config_.hidden_size);
  run.rows.each_piece_ahead(
      run.workspace, run.tokens(),
      [&](const SharedRows::Piece& piece, size_t room) {
        return Begun{
            begin_norm(run, piece, post_attention_norm_, middle, saved.post_attention, /*again=*/true, rooms, room),
            begin_gather(run, piece, gradient, gradient_rooms[room])};
      },
      [&](const SharedRows::Piece& piece, Begun& begun) {
        backward_mlp_piece(run, piece, begun.normed, begun.dy,
                           saved.gate_up.empty() ? TensorView() : saved.gate_up.rows(piece.begin, piece.end), middle,
                           gradient);
      });
}

void DecoderLayer::backward_mlp_piece(const LayerRun& run, const SharedRows::Piece& piece, PieceRows& normed,
                                      PieceRows& dy, TensorView kept_gate_up, TensorView middle,
                                      TensorView gradient) const {
  const Exec& exec = run.exec;
  Arena& workspace = run.workspace;
  const LayerWidths width(config_);
  const int64_t tokens = piece.tokens(), begin = piece.begin;

  // Of an fp8 product the codes are what its weight's gradient is computed from.
  Arena& operands = fp8_ ? workspace : run.operands();
  const TensorView gate_up = kept_or_new(kept_gate_up, operands, dtype_, {tokens, 2 * width.intermediate});
  if (kept_gate_up.empty()) gate_up_.forward(run, begin, normed.tokens(piece), gate_up);

  // Each gradient takes the place of its tensor after the tensor's last use, and silu(gate)·up comes back in the pass
  // that needs the same operands.
  const TensorView dinner = operands.allocate(dtype_, {tokens, width.intermediate}), inner = dinner, dgate_up = gate_up;
  const ProductRows of_gradient = down_.output_gradient(run, kept_as_it_is(run, dy.tokens(piece)));
  down_.backward_input(run, begin, of_gradient, dinner);
  ProductRows of_inner = inner, of_dgate_up = dgate_up;
  if (fp8_) {
    of_inner.codes = fp8_allocate(run.operands(), tokens, width.intermediate, Fp8Layout::by_column);
    of_dgate_up.codes = fp8_allocate(run.operands(), tokens, 2 * width.intermediate, Fp8Layout::both);
    fp8_swiglu_backward(exec, gate_up, dinner, of_dgate_up.codes, of_inner.codes);
  } else {
    swiglu_backward(exec, gate_up, dinner, dgate_up, inner);
  }
  down_.add_gradients(run, begin, of_inner, of_gradient);
  backward_normed_product(run, piece, gate_up_, of_dgate_up, post_attention_norm_, middle, normed, gradient);
}

}  // namespace sb
