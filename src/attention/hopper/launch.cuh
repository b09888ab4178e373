#pragma once

// Shared by the launchers: tensor maps and error checks. CUDA files only.

#include <cuda.h>
#include <cuda_runtime.h>

#include "attention/cuda/check.cuh"
#include "attention/cuda/params.h"

namespace sb::gpu {

int multiprocessors();

// A packed bf16 tensor [tokens, heads, d], read in boxes of 64 columns × `box_heads` × `box_tokens`, 128-byte swizzled;
// tokens past the end read as zeros.
CUtensorMap packed_map(const void* data, int64_t tokens, int heads, int d, int box_heads, int box_tokens);

// Copied rows of gathered columns, read 128 at a time.
CUtensorMap gathered_map(const void* data, const GatheredColumns& gathered, int d);

void check_shape(const Shape& shape, const Tiling& tiling);

}  // namespace sb::gpu
