#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/exec.h"

namespace sb {

// Rotary embedding as `config.json` describes it, in either spelling.
struct RopeConfig {
  enum class Type { standard, linear, llama3, yarn };
  Type type = Type::standard;
  double theta = 10000.0;
  double factor = 1.0;                           // linear, llama3, yarn
  int64_t original_max_position_embeddings = 0;  // llama3, yarn
  double low_freq_factor = 1.0;                  // llama3
  double high_freq_factor = 4.0;                 // llama3
  double beta_fast = 32.0;                       // yarn
  double beta_slow = 1.0;                        // yarn
  double attention_factor = 0.0;                 // yarn; 0: 0.1·ln(factor) + 1 (or from mscale, mscale_all_dim)
  double mscale = 0.0;                           // yarn
  double mscale_all_dim = 0.0;                   // yarn
  bool truncate = true;                          // yarn: round the correction range to whole channels
  bool operator==(const RopeConfig&) const = default;
};

// Angular frequency of each of the head_dim / 2 channel pairs, and the factor on cos and sin (yarn; 1 otherwise).
struct RopeFrequencies {
  std::vector<double> inverse;
  double attention_scaling = 1.0;
};
RopeFrequencies rope_frequencies(const RopeConfig& config, int head_dim);

// cos and sin for positions 0 … max_positions - 1, [max_positions, head_dim / 2] each, scaled. Computed in fp64.
void rope_fill_table(const RopeFrequencies& frequencies, int64_t max_positions, TensorView cos, TensorView sin);

struct QkvShape {
  int heads, kv_heads, head_dim;
  int64_t width() const { return int64_t{heads + 2 * kv_heads} * head_dim; }
};

// From the fused projection to attention's operands in one pass over memory: splits qkv [T, (heads + 2 kv_heads)·d]
// into q [T, heads, d], k, v [T, kv_heads, d]; normalises every head of q and k with q_norm, k_norm [d] when given
// (Qwen3; rstd_q [T, heads] and rstd_k [T, kv_heads] kept for backward); rotates q and k by positions [T] (channel c
// pairs with c + d/2).
void qkv_rope_forward(const Exec& exec, const QkvShape& shape, TensorView qkv, TensorView positions, TensorView cos,
                      TensorView sin, TensorView q_norm, TensorView k_norm, float eps, TensorView q, TensorView k,
                      TensorView v, TensorView rstd_q, TensorView rstd_k);

// The way back: dqkv from dq, dk, dv. With norms, qkv (the projection's output) and the rstds are needed, and dq_norm,
// dk_norm accumulate unless both are empty; otherwise all of these are empty.
void qkv_rope_backward(const Exec& exec, const QkvShape& shape, TensorView dq, TensorView dk, TensorView dv,
                       TensorView positions, TensorView cos, TensorView sin, TensorView qkv, TensorView q_norm,
                       TensorView k_norm, TensorView rstd_q, TensorView rstd_k, TensorView dqkv, TensorView dq_norm,
                       TensorView dk_norm);

// Bytes of exec.scratch that backward needs.
int64_t qkv_rope_scratch_bytes(DeviceKind device, const QkvShape& shape);

}  // namespace sb
