#pragma once

// What every backend provides. The public functions (linear.h, …) check shapes and call the one that exec.device names.

#include "ops/adamw.h"
#include "ops/column_products.h"
#include "ops/cross_entropy.h"
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"
#include "ops/swiglu.h"

namespace sb::cpu {

void linear_forward(const Exec& exec, TensorView x, TensorView weight, TensorView bias, TensorView y,
                    TensorView residual);
void linear_backward_input(const Exec& exec, TensorView dy, TensorView weight, TensorView dx, bool accumulate);
void linear_backward_weight(const Exec& exec, TensorView x, TensorView dy, TensorView dweight, bool accumulate);
void linear_backward_bias(const Exec& exec, TensorView dy, TensorView dbias);
void add(const Exec& exec, TensorView a, TensorView b, TensorView y);
void multiply_transposed(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y,
                         bool accumulate);
void multiply(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y, bool accumulate);
void add_outer_products(const Exec& exec, const Columns& dy, const Columns& x, TensorView gradient, bool accumulate);
void dropout(const Exec& exec, const DropoutRows& rows, TensorView from, TensorView to, bool add);
void rmsnorm_forward(const Exec& exec, TensorView x, TensorView weight, float eps, TensorView y, TensorView rstd);
void rmsnorm_backward(const Exec& exec, TensorView x, TensorView weight, TensorView rstd, TensorView dy, TensorView dx,
                      bool accumulate, TensorView dweight);
void qkv_rope_forward(const Exec& exec, const QkvShape& shape, TensorView qkv, TensorView positions, TensorView cos,
                      TensorView sin, TensorView q_norm, TensorView k_norm, float eps, TensorView q, TensorView k,
                      TensorView v, TensorView rstd_q, TensorView rstd_k);
void qkv_rope_backward(const Exec& exec, const QkvShape& shape, TensorView dq, TensorView dk, TensorView dv,
                       TensorView positions, TensorView cos, TensorView sin, TensorView qkv, TensorView q_norm,
                       TensorView k_norm, TensorView rstd_q, TensorView rstd_k, TensorView dqkv, TensorView dq_norm,
                       TensorView dk_norm);
void swiglu_forward(const Exec& exec, TensorView gate_up, TensorView h);
void swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, TensorView dgate_up, TensorView h);
void embedding_forward(const Exec& exec, TensorView tokens, TensorView table, TensorView x, int64_t first);
void embedding_backward(const Exec& exec, TensorView tokens, TensorView dx, TensorView dtable, int64_t first);
void loss_forward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels, TensorView weights,
                  int64_t chunk, TensorView token_loss, LossSums* sums, const VocabularyPart& part);
void loss_forward_backward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels,
                           TensorView weights, int64_t chunk, TensorView token_loss, TensorView dhidden,
                           TensorView dweight, LossSums* sums, bool accumulate, const VocabularyPart& part);
void adamw_update(const Exec& exec, const AdamWStep& step, std::span<const DecayRange> ranges,
                  const AdamWBuffers& buffers);
void clip_by_norm(const Exec& exec, TensorView gradients, double max_norm, TensorView clip);
double squared_norm(const Exec& exec, TensorView x);

}  // namespace sb::cpu

namespace sb::cuda {

void linear_forward(const Exec& exec, TensorView x, TensorView weight, TensorView bias, TensorView y,
                    TensorView residual);
void linear_backward_input(const Exec& exec, TensorView dy, TensorView weight, TensorView dx, bool accumulate);
void linear_backward_weight(const Exec& exec, TensorView x, TensorView dy, TensorView dweight, bool accumulate);
void linear_backward_bias(const Exec& exec, TensorView dy, TensorView dbias);
void add(const Exec& exec, TensorView a, TensorView b, TensorView y);
void multiply_transposed(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y,
                         bool accumulate);
void multiply(const Exec& exec, const Columns& x, TensorView weight, float scale, const Columns& y, bool accumulate);
void add_outer_products(const Exec& exec, const Columns& dy, const Columns& x, TensorView gradient, bool accumulate);
void dropout(const Exec& exec, const DropoutRows& rows, TensorView from, TensorView to, bool add);
void rmsnorm_forward(const Exec& exec, TensorView x, TensorView weight, float eps, TensorView y, TensorView rstd);
void rmsnorm_backward(const Exec& exec, TensorView x, TensorView weight, TensorView rstd, TensorView dy, TensorView dx,
                      bool accumulate, TensorView dweight);
void qkv_rope_forward(const Exec& exec, const QkvShape& shape, TensorView qkv, TensorView positions, TensorView cos,
                      TensorView sin, TensorView q_norm, TensorView k_norm, float eps, TensorView q, TensorView k,
                      TensorView v, TensorView rstd_q, TensorView rstd_k);
void qkv_rope_backward(const Exec& exec, const QkvShape& shape, TensorView dq, TensorView dk, TensorView dv,
                       TensorView positions, TensorView cos, TensorView sin, TensorView qkv, TensorView q_norm,
                       TensorView k_norm, TensorView rstd_q, TensorView rstd_k, TensorView dqkv, TensorView dq_norm,
                       TensorView dk_norm);
void swiglu_forward(const Exec& exec, TensorView gate_up, TensorView h, TensorView largest);
void swiglu_backward(const Exec& exec, TensorView gate_up, TensorView dh, TensorView dgate_up, TensorView h);
void embedding_forward(const Exec& exec, TensorView tokens, TensorView table, TensorView x, int64_t first);
void embedding_backward(const Exec& exec, TensorView tokens, TensorView dx, TensorView dtable, int64_t first,
                        int64_t vocabulary);
void loss_forward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels, TensorView weights,
                  int64_t chunk, TensorView token_loss, LossSums* sums, std::span<const int32_t> host_labels,
                  const VocabularyPart& part);
void loss_forward_backward(const Exec& exec, TensorView hidden, TensorView weight, TensorView labels,
                           TensorView weights, int64_t chunk, TensorView token_loss, TensorView dhidden,
                           TensorView dweight, LossSums* sums, std::span<const int32_t> host_labels, bool accumulate,
                           const VocabularyPart& part);
void adamw_update(const Exec& exec, const AdamWStep& step, std::span<const DecayRange> ranges,
                  const AdamWBuffers& buffers);
void clip_by_norm(const Exec& exec, TensorView gradients, double max_norm, TensorView clip);
double squared_norm(const Exec& exec, std::span<const TensorView> pieces);
void round_parameters(const Exec& exec, TensorView parameters, TensorView weights);
// Scratch: what embedding_backward sorts with; what the norms need.
int64_t embedding_scratch_bytes(int64_t tokens);
int64_t norm_scratch_bytes();

}  // namespace sb::cuda
