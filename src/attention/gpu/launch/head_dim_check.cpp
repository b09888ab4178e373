#include "attention/gpu/launch/head_dim_check.h"

#include <fmt/format.h>

#include <algorithm>

#include "attention/gpu/launch/head_dims.h"
#include "core/errors.h"

namespace sb {

void require_cuda_head_dim(int64_t head_dim, DType dtype, const std::string& model, const HeadDimCures& cures) {
  const std::string begin = fmt::format("{}: head_dim is {}, and on GPUs attention", model, head_dim);
  SB_USER_CHECK(head_dim <= kMaxFp32HeadDim, "{} has kernels up to {}; {}", begin, kMaxFp32HeadDim, cures.too_large);
  SB_USER_CHECK(dtype != DType::bf16 || std::ranges::count(kBf16HeadDims, head_dim) > 0,
                "{} in bf16 has kernels for {}; {}", begin, fmt::join(kBf16HeadDims, ", "), cures.not_in_bf16);
}

}  // namespace sb
