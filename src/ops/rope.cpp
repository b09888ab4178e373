#include "ops/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ops/backends.h"
#include "ops/check_shape.h"
#include "ops/cuda_partial_sums.h"

namespace sb {
namespace {

// Long wavelengths are stretched by `factor`, short ones kept, those between blended.
void scale_llama3(const RopeConfig& config, std::vector<double>& inverse) {
  const double context = static_cast<double>(config.original_max_position_embeddings);
  const double longest = context / config.low_freq_factor, shortest = context / config.high_freq_factor;
  for (double& frequency : inverse) {
    const double wavelength = 2.0 * std::numbers::pi / frequency;
    if (wavelength < shortest) continue;
    if (wavelength > longest) {
      frequency /= config.factor;
    } else {
      const double smooth =
          (context / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor);
      frequency = (1.0 - smooth) * frequency / config.factor + smooth * frequency;
    }
  }
}

// YaRN: channels that turn more than beta_fast times over the original context are kept, those that turn less than
// beta_slow times are stretched, with a linear ramp between.
void scale_yarn(const RopeConfig& config, int head_dim, std::vector<double>& inverse) {
  const double context = static_cast<double>(config.original_max_position_embeddings);
  const auto channel_turning = [&](double turns) {
    return head_dim * std::log(context / (turns * 2.0 * std::numbers::pi)) / (2.0 * std::log(config.theta));
  };
  double low = channel_turning(config.beta_fast), high = channel_turning(config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, head_dim - 1.0);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inverse.size(); ++i) {
    const double stretched = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    inverse[i] = inverse[i] / config.factor * stretched + inverse[i] * (1.0 - stretched);
  }
}

double yarn_mscale(double factor, double mscale) {
  return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double yarn_attention_scaling(const RopeConfig& config) {
  if (config.attention_factor != 0.0) return config.attention_factor;
  if (config.mscale != 0.0 && config.mscale_all_dim != 0.0) {
    return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim);
  }
  return yarn_mscale(config.factor, 1.0);
}

}  // namespace

RopeFrequencies rope_frequencies(const RopeConfig& config, int head_dim) {
  SB_CHECK(head_dim > 0 && head_dim % 2 == 0, "rope over a head of {} channels", head_dim);
  SB_CHECK(config.theta > 0 && config.factor > 0, "rope theta {}, factor {}", config.theta, config.factor);
  RopeFrequencies result;
  result.inverse.resize(static_cast<size_t>(head_dim / 2));
  for (int i = 0; i < head_dim / 2; ++i) {
    result.inverse[static_cast<size_t>(i)] = std::pow(config.theta, -2.0 * i / head_dim);
  }
  switch (config.type) {
    case RopeConfig::Type::standard:
      break;
    case RopeConfig::Type::linear:
      for (double& frequency : result.inverse) frequency /= config.factor;
      break;
    case RopeConfig::Type::llama3:
      SB_CHECK(config.original_max_position_embeddings > 0, "llama3 rope without original_max_position_embeddings");
      scale_llama3(config, result.inverse);
      break;
    case RopeConfig::Type::yarn:
      SB_CHECK(config.original_max_position_embeddings > 0, "yarn rope without original_max_position_embeddings");
      scale_yarn(config, head_dim, result.inverse);
      result.attention_scaling = yarn_attention_scaling(config);
      break;
  }
  return result;
}

void rope_fill_table(const RopeFrequencies& frequencies, int64_t max_positions, TensorView cos, TensorView sin) {
  const int64_t half = static_cast<int64_t>(frequencies.inverse.size());
  const Shape shape = {max_positions, half};
  SB_CHECK(cos.shape() == shape && sin.shape() == shape, "rope table {} and {}, expected {}", cos.shape().to_string(),
           sin.shape().to_string(), shape.to_string());
  for (int64_t position = 0; position < max_positions; ++position) {
    for (int64_t c = 0; c < half; ++c) {
      const double angle = static_cast<double>(position) * frequencies.inverse[static_cast<size_t>(c)];
      cos.f32()[position * half + c] = static_cast<float>(std::cos(angle) * frequencies.attention_scaling);
      sin.f32()[position * half + c] = static_cast<float>(std::sin(angle) * frequencies.attention_scaling);
    }
  }
}

namespace {

struct Operands {
  const char* operation;
  TensorView positions, cos, sin, q_norm, k_norm, rstd_q, rstd_k;
};

void check_common(const Exec& exec, const QkvShape& shape, const Operands& o, int64_t tokens, DType dtype) {
  const int64_t half = shape.head_dim / 2;
  SB_CHECK(shape.head_dim % 2 == 0, "{}: head_dim {}", o.operation, shape.head_dim);
  check_operand(exec, o.operation, "positions", o.positions, DType::i32, {tokens});
  check_operand(exec, o.operation, "cos", o.cos, DType::f32, {o.cos.dim(0), half});
  check_operand(exec, o.operation, "sin", o.sin, DType::f32, {o.cos.dim(0), half});
  SB_CHECK(o.q_norm.empty() == o.k_norm.empty(), "{}: one of q_norm and k_norm is missing", o.operation);
  if (o.q_norm.empty()) return;
  check_operand(exec, o.operation, "q_norm", o.q_norm, dtype, {shape.head_dim});
  check_operand(exec, o.operation, "k_norm", o.k_norm, dtype, {shape.head_dim});
  check_operand(exec, o.operation, "rstd_q", o.rstd_q, DType::f32, {tokens, shape.heads});
  check_operand(exec, o.operation, "rstd_k", o.rstd_k, DType::f32, {tokens, shape.kv_heads});
}

}  // namespace

void qkv_rope_forward(const Exec& exec, const QkvShape& shape, TensorView qkv, TensorView positions, TensorView cos,
                      TensorView sin, TensorView q_norm, TensorView k_norm, float eps, TensorView q, TensorView k,
                      TensorView v, TensorView rstd_q, TensorView rstd_k) {
  const char* operation = "qkv_rope_forward";
  const int64_t tokens = qkv.dim(0);
  const Shape narrow = {tokens, shape.kv_heads, shape.head_dim};
  check_operand(exec, operation, "qkv", qkv, qkv.dtype(), {tokens, shape.width()});
  check_operand(exec, operation, "q", q, qkv.dtype(), {tokens, shape.heads, shape.head_dim});
  check_operand(exec, operation, "k", k, qkv.dtype(), narrow);
  check_operand(exec, operation, "v", v, qkv.dtype(), narrow);
  check_common(exec, shape, {operation, positions, cos, sin, q_norm, k_norm, rstd_q, rstd_k}, tokens, qkv.dtype());
  if (exec.device == DeviceKind::cuda) {
    return cuda::qkv_rope_forward(exec, shape, qkv, positions, cos, sin, q_norm, k_norm, eps, q, k, v, rstd_q, rstd_k);
  }
  cpu::qkv_rope_forward(exec, shape, qkv, positions, cos, sin, q_norm, k_norm, eps, q, k, v, rstd_q, rstd_k);
}

void qkv_rope_backward(const Exec& exec, const QkvShape& shape, TensorView dq, TensorView dk, TensorView dv,
                       TensorView positions, TensorView cos, TensorView sin, TensorView qkv, TensorView q_norm,
                       TensorView k_norm, TensorView rstd_q, TensorView rstd_k, TensorView dqkv, TensorView dq_norm,
                       TensorView dk_norm) {
  const char* operation = "qkv_rope_backward";
  const int64_t tokens = dqkv.dim(0);
  const Shape narrow = {tokens, shape.kv_heads, shape.head_dim};
  check_operand(exec, operation, "dq", dq, dqkv.dtype(), {tokens, shape.heads, shape.head_dim});
  check_operand(exec, operation, "dk", dk, dqkv.dtype(), narrow);
  check_operand(exec, operation, "dv", dv, dqkv.dtype(), narrow);
  check_operand(exec, operation, "dqkv", dqkv, dqkv.dtype(), {tokens, shape.width()});
  check_common(exec, shape, {operation, positions, cos, sin, q_norm, k_norm, rstd_q, rstd_k}, tokens, dqkv.dtype());
  if (!q_norm.empty()) {
    check_operand(exec, operation, "qkv", qkv, dqkv.dtype(), {tokens, shape.width()});
    SB_CHECK(dq_norm.empty() == dk_norm.empty(), "{}: one of dq_norm and dk_norm is missing", operation);
    if (!dq_norm.empty()) {
      check_operand(exec, operation, "dq_norm", dq_norm, DType::f32, {shape.head_dim});
      check_operand(exec, operation, "dk_norm", dk_norm, DType::f32, {shape.head_dim});
    }
    SB_CHECK(qkv.raw() != dqkv.raw() || tokens == 0, "{}: qkv and dqkv alias", operation);
  }
  if (exec.device == DeviceKind::cuda) {
    return cuda::qkv_rope_backward(exec, shape, dq, dk, dv, positions, cos, sin, qkv, q_norm, k_norm, rstd_q, rstd_k,
                                   dqkv, dq_norm, dk_norm);
  }
  cpu::qkv_rope_backward(exec, shape, dq, dk, dv, positions, cos, sin, qkv, q_norm, k_norm, rstd_q, rstd_k, dqkv,
                         dq_norm, dk_norm);
}

int64_t qkv_rope_scratch_bytes(DeviceKind device, const QkvShape& shape) {
  if (device == DeviceKind::cpu) return 0;
  // Partial sums of both norms' gradients, and their sum.
  const int64_t sums = 2 * int64_t{shape.head_dim} * static_cast<int64_t>(sizeof(float));
  return Arena::rounded((cuda::kPartialRows - 1) * sums) + Arena::rounded(sums);
}

}  // namespace sb
