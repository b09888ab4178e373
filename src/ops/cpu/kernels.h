#pragma once

#include <cstdint>

#include "ops/adamw_scalars.h"
#include "ops/row_part.h"

namespace sb {

// Rotary embedding of some rows: cos and sin already point at the table, positions say which row of it.
struct RopeRows {
  int heads, kv_heads, head_dim;
  int64_t rows;
  const int32_t* positions;
  const float *cos, *sin;
  const float *q_norm, *k_norm;  // both null: no normalisation
  float eps;
};

// The inner loops of the CPU operations, compiled per instruction set. All work on contiguous fp32 rows.
struct CpuKernels {
  void (*rmsnorm_forward)(const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* y,
                          float* rstd);
  // dweight_sum [width] += over these rows.
  void (*rmsnorm_backward)(const float* x, const float* weight, const float* rstd, const float* dy, int64_t rows,
                           int64_t width, float* dx, bool accumulate, float* dweight_sum);
  void (*swiglu_forward)(const float* gate_up, int64_t rows, int64_t width, float* h);
  void (*swiglu_backward)(const float* gate_up, const float* dh, int64_t rows, int64_t width, float* dgate_up,
                          float* h);  // h: forward's result besides, or none
  void (*rope_forward)(const RopeRows& rope, const float* qkv, float* q, float* k, float* v, float* rstd_q,
                       float* rstd_k);
  // dq_norm_sum, dk_norm_sum [d] += over these rows.
  void (*rope_backward)(const RopeRows& rope, const float* dq, const float* dk, const float* dv, const float* qkv,
                        const float* rstd_q, const float* rstd_k, float* dqkv, float* dq_norm_sum, float* dk_norm_sum);
  // A row of logits, or a part of one; label: its place there, -1: elsewhere. With `keep` the logits become
  // exp(logit - largest).
  RowPart (*cross_entropy_part)(float* logits, int64_t vocabulary, int64_t label, bool keep);
  void (*scale)(float factor, int64_t count, float* x);  // x *= factor
  void (*adamw)(const AdamWScalars& scalars, int64_t count, float* parameters, const float* gradients, float* m,
                float* v);
  double (*squared_sum)(const float* x, int64_t count);
  void (*add)(const float* x, int64_t count, float* y);  // y += x
  // sums [columns] += column sums of x [rows, columns], rows `stride` floats apart.
  void (*column_sums)(const float* x, int64_t rows, int64_t columns, int64_t stride, float* sums);
};

const CpuKernels& cpu_kernels();

}  // namespace sb
