#include "attention/factory/make_attention.h"

#include "attention/cpu/dense_attention.h"
#include "attention/gpu/cuda_attention.h"

namespace sb {

std::unique_ptr<Attention> make_attention(SparseAttention::Options options, DeviceKind device, bool deterministic) {
  const bool dense = options.selection.pattern == SelectionPattern::dense;
  if (dense) options.coverage_rows = 0;  // it is 1
  if (device == DeviceKind::cuda) return make_cuda_attention({.attention = options, .deterministic = deterministic});
  if (dense) return std::make_unique<DenseAttention>();
  return std::make_unique<SparseAttention>(options);
}

}  // namespace sb
