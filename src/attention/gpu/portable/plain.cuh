#pragma once

// The fp32 half of the portable kernels, and what both halves of the backward share. CUDA files only.

#include <cuda_runtime.h>

#include "attention/gpu/launch/params.h"

namespace sb::gpu {

void plain_forward(const ForwardParams& params, cudaStream_t stream);
// dK and dV, then dQ; `statistics` is ready.
void plain_backward(const BackwardParams& params, cudaStream_t stream);

// Log-sum-exp and dO·O of every row into `statistics` [subtile][2][64]; padding and rows that see nothing get a
// log-sum-exp of +infinity, so that their probabilities come out as zero.
void portable_statistics(const BackwardParams& params, Precision precision, cudaStream_t stream);
// dK and dV of split columns from their parts [slot][dK, dV][128][d], in a fixed order.
void portable_finish_columns(const BackwardParams& params, Precision precision, cudaStream_t stream);

}  // namespace sb::gpu
