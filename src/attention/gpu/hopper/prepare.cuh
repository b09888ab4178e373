#pragma once

// The kernels before and after the products of the backward. CUDA files only.

#include <cuda_runtime.h>

#include "attention/gpu/launch/params.h"

namespace sb::gpu {

// Log-sum-exp (base 2) and dO·O of every row into `statistics`, padding and rows that see nothing as +infinity, so that
// their probabilities come out as zero; clears the counters, and the sum of dQ if asked.
void prepare_rows(const BackwardParams& params, bool clear_dq, cudaStream_t stream);
// dQ from its fp32 sum.
void finish_dq(const BackwardParams& params, cudaStream_t stream);
// dK and dV of split columns from their parts, in a fixed order.
void finish_split_columns(const BackwardParams& params, cudaStream_t stream);
// dK and dV alone, for the deterministic backward, after prepare_rows. A kernel that starts early behind it does so as
// its thread blocks end.
void backward_keys(const BackwardParams& params, cudaStream_t stream);

}  // namespace sb::gpu
