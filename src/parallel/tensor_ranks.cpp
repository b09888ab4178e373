#include "parallel/tensor_ranks.h"

namespace sb {

CommRequest TensorRanks::gather(TensorView all) {
  SB_CHECK(all.elements() % ranks_.size() == 0, "{} elements of {} ranks", all.elements(), ranks_.size());
  return ranks_.all_gather_async(all.raw(), all.bytes() / ranks_.size(), CommType::u8);
}

CommRequest TensorRanks::reduce_scatter(TensorView all) {
  SB_CHECK(all.elements() % ranks_.size() == 0, "{} elements of {} ranks", all.elements(), ranks_.size());
  SB_CHECK(all.dtype() == DType::f32 || all.dtype() == DType::bf16, "sums of {}", dtype_name(all.dtype()));
  const CommType type = all.dtype() == DType::f32 ? CommType::f32 : CommType::bf16;
  return ranks_.reduce_scatter_async(all.raw(), all.elements() / ranks_.size(), type, ReduceOp::sum);
}

}  // namespace sb
