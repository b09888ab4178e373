#pragma once

// Declarations between the files compiled per instruction set; see kernels.h for what each does.

#include "ops/cpu/kernels.h"

namespace sb::SB_ISA {

void rmsnorm_forward(const float* x, const float* weight, float eps, int64_t rows, int64_t width, float* y,
                     float* rstd);
void rmsnorm_backward(const float* x, const float* weight, const float* rstd, const float* dy, int64_t rows,
                      int64_t width, float* dx, bool accumulate, float* dweight_sum);
void swiglu_forward(const float* gate_up, int64_t rows, int64_t width, float* h);
void swiglu_backward(const float* gate_up, const float* dh, int64_t rows, int64_t width, float* dgate_up, float* h);
void rope_forward(const RopeRows& rope, const float* qkv, float* q, float* k, float* v, float* rstd_q, float* rstd_k);
void rope_backward(const RopeRows& rope, const float* dq, const float* dk, const float* dv, const float* qkv,
                   const float* rstd_q, const float* rstd_k, float* dqkv, float* dq_norm_sum, float* dk_norm_sum);
RowPart cross_entropy_part(float* logits, int64_t vocabulary, int64_t label, bool keep);
void scale(float factor, int64_t count, float* x);
void adamw(const AdamWScalars& scalars, int64_t count, float* parameters, const float* gradients, float* m, float* v);
double squared_sum(const float* x, int64_t count);
void add(const float* x, int64_t count, float* y);
void column_sums(const float* x, int64_t rows, int64_t columns, int64_t stride, float* sums);

CpuKernels kernel_table();

}  // namespace sb::SB_ISA
