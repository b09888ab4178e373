#include "model/decoder_layer.h"

#include <algorithm>
#include <cmath>

#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace sb {

namespace {

// Widths of a layer's tensors, in columns a token.
struct Widths {
  int64_t hidden, query, key, qkv, intermediate, heads, kv_heads;

  explicit Widths(const ModelConfig& config)
      : hidden(config.hidden_size),
        query(int64_t{config.heads} * config.head_dim),
        key(int64_t{config.kv_heads} * config.head_dim),
        qkv(query + 2 * key),
        intermediate(config.intermediate_size),
        heads(config.heads),
        kv_heads(config.kv_heads) {}
};

// Bytes that tensors take in an arena.
struct TensorBytes {
  int64_t tokens;
  DType dtype;

  // [tokens, columns] tensors of activations, or of fp32 statistics, summed.
  int64_t activations(std::initializer_list<int64_t> columns) const { return bytes(dtype, columns); }
  int64_t statistics(std::initializer_list<int64_t> columns) const { return bytes(DType::f32, columns); }

 private:
  int64_t bytes(DType type, std::initializer_list<int64_t> columns) const {
    int64_t sum = 0;
    for (const int64_t width : columns) sum += Arena::rounded(tokens * width * dtype_bytes(type));
    return sum;
  }
};

TensorView kept_or_new(TensorView kept, Arena& workspace, DType dtype, Shape shape) {
  return kept.empty() ? workspace.allocate(dtype, shape) : kept;
}

// [T, heads, d] as the products see it: [T, heads·d].
TensorView flat_heads(TensorView heads) {
  return heads.reshaped({heads.dim(0), heads.dim(1) * heads.dim(2)});
}

}  // namespace

DecoderLayer::DecoderLayer(const ModelConfig& config, int index, ParameterSet& parameters, DType dtype)
    : config_(config),
      parameters_(parameters),
      index_(index),
      dtype_(dtype),
      attention_shape_{config.heads, config.kv_heads, config.head_dim,
                       static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim)))},
      qkv_shape_{config.heads, config.kv_heads, config.head_dim} {
  const Widths width(config);
  const std::string own = fmt::format("layers.{}.", index), hf = "model." + own;
  const auto single = [&](const std::string& name, const std::string& hf_name, Shape shape) {
    return parameters.declare(own + name, shape, {{hf + hf_name, 0, shape[0]}});
  };
  // One product computes q, k and v.
  const auto fused_qkv = [&](const std::string& kind, Shape shape) {
    return parameters.declare(own + "qkv." + kind, shape,
                              {{hf + "self_attn.q_proj." + kind, 0, width.query},
                               {hf + "self_attn.k_proj." + kind, width.query, width.query + width.key},
                               {hf + "self_attn.v_proj." + kind, width.query + width.key, width.qkv}});
  };
  input_norm_ = single("input_norm.weight", "input_layernorm.weight", {width.hidden});
  qkv_weight_ = fused_qkv("weight", {width.qkv, width.hidden});
  if (config.qkv_bias) qkv_bias_ = fused_qkv("bias", {width.qkv});
  if (config.qk_norm) {
    q_norm_ = single("q_norm.weight", "self_attn.q_norm.weight", {config.head_dim});
    k_norm_ = single("k_norm.weight", "self_attn.k_norm.weight", {config.head_dim});
  }
  output_weight_ = single("output.weight", "self_attn.o_proj.weight", {width.hidden, width.query});
  if (config.output_bias) output_bias_ = single("output.bias", "self_attn.o_proj.bias", {width.hidden});
  post_attention_norm_ = single("post_attention_norm.weight", "post_attention_layernorm.weight", {width.hidden});
  gate_up_weight_ = parameters.declare(own + "gate_up.weight", {2 * width.intermediate, width.hidden},
                                       {{hf + "mlp.gate_proj.weight", 0, width.intermediate},
                                        {hf + "mlp.up_proj.weight", width.intermediate, 2 * width.intermediate}});
  down_weight_ = single("down.weight", "mlp.down_proj.weight", {width.hidden, width.intermediate});
}

TensorView DecoderLayer::weight(int parameter) const {
  return parameter < 0 ? TensorView() : parameters_.weight(parameter);
}

TensorView DecoderLayer::gradient_of(int parameter) const {
  return parameter < 0 ? TensorView() : parameters_.gradient(parameter);
}

LayerSaved DecoderLayer::allocate_saved(Arena& arena, int64_t tokens, Recompute recompute) const {
  const Widths width(config_);
  const int64_t d = config_.head_dim;
  LayerSaved saved;
  saved.x = arena.allocate(dtype_, {tokens, width.hidden});
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
  saved.middle = arena.allocate(dtype_, {tokens, width.hidden});
  saved.gate_up = arena.allocate(dtype_, {tokens, 2 * width.intermediate});
  return saved;
}

int64_t DecoderLayer::saved_bytes(const ModelConfig& config, DType dtype, int64_t tokens, Recompute recompute) {
  const Widths width(config);
  const TensorBytes of{tokens, dtype};
  int64_t bytes = of.activations({width.hidden});
  if (recompute == Recompute::layer) return bytes;
  bytes += of.activations({width.query}) + of.statistics({width.heads});
  if (recompute == Recompute::attention) return bytes;
  bytes += config.qk_norm ? of.activations({width.qkv}) : of.activations({width.query, width.key, width.key});
  return bytes + of.activations({width.hidden, 2 * width.intermediate});
}

int64_t DecoderLayer::forward_workspace_bytes(const ModelConfig& config, DType dtype, int64_t tokens) {
  const Widths width(config);
  const TensorBytes of{tokens, dtype};
  int64_t attention =
      of.activations({width.qkv, width.query, width.key, width.key, width.query}) + of.statistics({width.heads});
  if (config.qk_norm) attention += of.statistics({width.heads, width.kv_heads});
  const int64_t mlp = of.activations({2 * width.intermediate, width.intermediate});
  return of.activations({width.hidden, width.hidden}) + of.statistics({1}) + std::max(attention, mlp);
}

int64_t DecoderLayer::backward_workspace_bytes(const ModelConfig& config, DType dtype, int64_t tokens,
                                               Recompute recompute) {
  const Widths width(config);
  const TensorBytes of{tokens, dtype};
  const int64_t norm = of.activations({width.hidden}) + of.statistics({1});
  const int64_t qkv = of.activations({width.qkv});
  const int64_t operands = of.activations({width.query, width.key, width.key});
  const bool none = recompute == Recompute::none;

  int64_t restored = norm;
  if (!none || config.qk_norm) restored += operands;
  if (config.qk_norm) restored += of.statistics({width.heads, width.kv_heads}) + (none ? 0 : qkv);
  if (recompute == Recompute::layer) restored += of.activations({width.query}) + of.statistics({width.heads});
  if (!none) restored += of.activations({width.hidden});
  const int64_t mlp =
      norm + of.activations({width.intermediate}) + (none ? 0 : of.activations({2 * width.intermediate}));
  const int64_t attention = qkv + operands;  // their gradients
  return restored + std::max(mlp, attention);
}

int64_t DecoderLayer::scratch_bytes(const ModelConfig& config, DeviceKind device) {
  const Widths width(config);
  int64_t bytes = rmsnorm_scratch_bytes(device, width.hidden);
  if (config.qkv_bias) bytes = std::max(bytes, linear_scratch_bytes(device, width.qkv));
  if (config.output_bias) bytes = std::max(bytes, linear_scratch_bytes(device, width.hidden));
  if (config.qk_norm) {
    bytes = std::max(bytes, qkv_rope_scratch_bytes(device, {config.heads, config.kv_heads, config.head_dim}));
  }
  return bytes;
}

void DecoderLayer::project_qkv(const LayerRun& run, TensorView normed, TensorView qkv) const {
  linear_forward(run.exec, normed, weight(qkv_weight_), weight(qkv_bias_), qkv);
}

void DecoderLayer::split_and_rotate(const LayerRun& run, TensorView qkv, TensorView q, TensorView k, TensorView v,
                                    TensorView rstd_q, TensorView rstd_k) const {
  qkv_rope_forward(run.exec, qkv_shape_, qkv, run.positions, run.cos, run.sin, weight(q_norm_), weight(k_norm_),
                   config_.rms_norm_eps, q, k, v, rstd_q, rstd_k);
}

void DecoderLayer::add_attention(const LayerRun& run, TensorView x, TensorView out, TensorView middle) const {
  linear_forward(run.exec, flat_heads(out), weight(output_weight_), weight(output_bias_), middle, /*residual=*/x);
}

void DecoderLayer::forward(const LayerRun& run, const LayerSaved& saved, TensorView y) const {
  const Exec& exec = run.exec;
  Arena& workspace = run.workspace;
  const Widths width(config_);
  const int64_t tokens = saved.x.dim(0), d = config_.head_dim;
  ArenaScope scope(workspace);
  // Never y itself: the same products on the same kinds of operands give the same bits at all levels of recompute.
  const TensorView middle = kept_or_new(saved.middle, workspace, dtype_, {tokens, width.hidden});
  const TensorView normed = workspace.allocate(dtype_, {tokens, width.hidden});
  const TensorView rstd = workspace.allocate(DType::f32, {tokens});
  {
    ArenaScope attention_scope(workspace);
    const TensorView qkv = kept_or_new(saved.qkv, workspace, dtype_, {tokens, width.qkv});
    const TensorView q = kept_or_new(saved.q, workspace, dtype_, {tokens, width.heads, d});
    const TensorView k = kept_or_new(saved.k, workspace, dtype_, {tokens, width.kv_heads, d});
    const TensorView v = kept_or_new(saved.v, workspace, dtype_, {tokens, width.kv_heads, d});
    TensorView rstd_q, rstd_k;
    if (config_.qk_norm) {
      rstd_q = workspace.allocate(DType::f32, {tokens, width.heads});
      rstd_k = workspace.allocate(DType::f32, {tokens, width.kv_heads});
    }
    const TensorView out = kept_or_new(saved.out, workspace, dtype_, {tokens, width.heads, d});
    const TensorView lse = kept_or_new(saved.lse, workspace, DType::f32, {width.heads, tokens});

    rmsnorm_forward(exec, saved.x, weight(input_norm_), config_.rms_norm_eps, normed, rstd);
    project_qkv(run, normed, qkv);
    split_and_rotate(run, qkv, q, k, v, rstd_q, rstd_k);
    run.attention.forward(exec, index_, attention_shape_, run.sequences, {q, k, v, out, lse}, *saved.state,
                          /*replay=*/false);
    add_attention(run, saved.x, out, middle);
  }
  const TensorView gate_up = kept_or_new(saved.gate_up, workspace, dtype_, {tokens, 2 * width.intermediate});
  const TensorView inner = workspace.allocate(dtype_, {tokens, width.intermediate});
  rmsnorm_forward(exec, middle, weight(post_attention_norm_), config_.rms_norm_eps, normed, rstd);
  linear_forward(exec, normed, weight(gate_up_weight_), {}, gate_up);
  swiglu_forward(exec, gate_up, inner);
  linear_forward(exec, inner, weight(down_weight_), {}, y, /*residual=*/middle);
}

void DecoderLayer::backward(const LayerRun& run, const LayerSaved& saved, TensorView gradient) const {
  const Exec& exec = run.exec;
  Arena& workspace = run.workspace;
  const Widths width(config_);
  const int64_t tokens = saved.x.dim(0), d = config_.head_dim;

  // Bring back what forward did not keep.
  ArenaScope scope(workspace);
  const TensorView normed = workspace.allocate(dtype_, {tokens, width.hidden});
  const TensorView rstd = workspace.allocate(DType::f32, {tokens});
  rmsnorm_forward(exec, saved.x, weight(input_norm_), config_.rms_norm_eps, normed, rstd);

  const TensorView q = kept_or_new(saved.q, workspace, dtype_, {tokens, width.heads, d});
  const TensorView k = kept_or_new(saved.k, workspace, dtype_, {tokens, width.kv_heads, d});
  const TensorView v = kept_or_new(saved.v, workspace, dtype_, {tokens, width.kv_heads, d});
  TensorView qkv, rstd_q, rstd_k;  // of use in backward with q/k norms only
  if (config_.qk_norm) {
    rstd_q = workspace.allocate(DType::f32, {tokens, width.heads});
    rstd_k = workspace.allocate(DType::f32, {tokens, width.kv_heads});
    qkv = kept_or_new(saved.qkv, workspace, dtype_, {tokens, width.qkv});
    if (saved.qkv.empty()) project_qkv(run, normed, qkv);
    split_and_rotate(run, qkv, q, k, v, rstd_q, rstd_k);
  } else if (saved.q.empty()) {
    ArenaScope projection_scope(workspace);
    const TensorView projection = workspace.allocate(dtype_, {tokens, width.qkv});
    project_qkv(run, normed, projection);
    split_and_rotate(run, projection, q, k, v, {}, {});
  }
  const TensorView out = kept_or_new(saved.out, workspace, dtype_, {tokens, width.heads, d});
  const TensorView lse = kept_or_new(saved.lse, workspace, DType::f32, {width.heads, tokens});
  const AttentionOperands operands{q, k, v, out, lse};
  if (saved.out.empty()) {
    run.attention.forward(exec, index_, attention_shape_, run.sequences, operands, *saved.state, /*replay=*/true);
  }
  const TensorView middle = kept_or_new(saved.middle, workspace, dtype_, {tokens, width.hidden});
  if (saved.middle.empty()) add_attention(run, saved.x, out, middle);

  backward_mlp(run, saved, middle, gradient);

  // gradient: of middle, and through the residual of x. Attention's part is added.
  linear_backward_weight(exec, flat_heads(out), gradient, gradient_of(output_weight_), gradient_of(output_bias_));
  // The gradient of attention's output is done with when that of the projection comes: they share memory.
  const TensorView dqkv = workspace.allocate(dtype_, {tokens, width.qkv});
  const TensorView dout(dqkv.raw(), dtype_, {tokens, width.heads, d}, dqkv.device());
  linear_backward_input(exec, gradient, weight(output_weight_), flat_heads(dout));
  const TensorView dq = workspace.allocate(dtype_, {tokens, width.heads, d});
  const TensorView dk = workspace.allocate(dtype_, {tokens, width.kv_heads, d});
  const TensorView dv = workspace.allocate(dtype_, {tokens, width.kv_heads, d});
  run.attention.backward(exec, index_, attention_shape_, run.sequences, operands, {dout, dq, dk, dv}, *saved.state);
  qkv_rope_backward(exec, qkv_shape_, dq, dk, dv, run.positions, run.cos, run.sin, qkv, weight(q_norm_),
                    weight(k_norm_), rstd_q, rstd_k, dqkv, gradient_of(q_norm_), gradient_of(k_norm_));
  linear_backward_weight(exec, normed, dqkv, gradient_of(qkv_weight_), gradient_of(qkv_bias_));
  const TensorView dnormed = normed;  // its last use was the line above
  linear_backward_input(exec, dqkv, weight(qkv_weight_), dnormed);
  rmsnorm_backward(exec, saved.x, weight(input_norm_), rstd, dnormed, gradient, /*accumulate=*/true,
                   gradient_of(input_norm_));
}

void DecoderLayer::backward_mlp(const LayerRun& run, const LayerSaved& saved, TensorView middle,
                                TensorView gradient) const {
  const Exec& exec = run.exec;
  Arena& workspace = run.workspace;
  const Widths width(config_);
  const int64_t tokens = middle.dim(0);

  ArenaScope scope(workspace);
  const TensorView normed = workspace.allocate(dtype_, {tokens, width.hidden});
  const TensorView rstd = workspace.allocate(DType::f32, {tokens});
  rmsnorm_forward(exec, middle, weight(post_attention_norm_), config_.rms_norm_eps, normed, rstd);
  const TensorView gate_up = kept_or_new(saved.gate_up, workspace, dtype_, {tokens, 2 * width.intermediate});
  if (saved.gate_up.empty()) linear_forward(exec, normed, weight(gate_up_weight_), {}, gate_up);

  // Each gradient takes the place of its tensor after the tensor's last use, and silu(gate)·up comes back in the pass
  // that needs the same operands.
  const TensorView dinner = workspace.allocate(dtype_, {tokens, width.intermediate}), inner = dinner,
                   dgate_up = gate_up;
  linear_backward_input(exec, gradient, weight(down_weight_), dinner);
  swiglu_backward(exec, gate_up, dinner, dgate_up, inner);
  linear_backward_weight(exec, inner, gradient, gradient_of(down_weight_), {});
  linear_backward_weight(exec, normed, dgate_up, gradient_of(gate_up_weight_), {});
  const TensorView dnormed = normed;
  linear_backward_input(exec, dgate_up, weight(gate_up_weight_), dnormed);
  rmsnorm_backward(exec, middle, weight(post_attention_norm_), rstd, dnormed, gradient, /*accumulate=*/true,
                   gradient_of(post_attention_norm_));
}

}  // namespace sb
