#pragma once

#include <cstdint>
#include <string>

#include "core/tensor.h"

namespace sb {

// What whoever runs a model can do about heads that have no kernel.
struct HeadDimCures {
  const char *too_large, *not_in_bf16;
};

// UserError for head dimensions that attention on GPUs would refuse in the first forward; to be asked before anything
// is built or loaded, and needs no GPU. `model` is what says the head dimension.
void require_cuda_head_dim(int64_t head_dim, DType dtype, const std::string& model, const HeadDimCures& cures);

}  // namespace sb
