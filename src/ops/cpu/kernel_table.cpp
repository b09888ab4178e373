#include "ops/cpu/isa_kernels.h"

namespace sb::SB_ISA {

CpuKernels kernel_table() {
  return CpuKernels{
      .rmsnorm_forward = rmsnorm_forward,
      .rmsnorm_backward = rmsnorm_backward,
      .swiglu_forward = swiglu_forward,
      .swiglu_backward = swiglu_backward,
      .rope_forward = rope_forward,
      .rope_backward = rope_backward,
      .cross_entropy_part = cross_entropy_part,
      .scale = scale,
      .adamw = adamw,
      .squared_sum = squared_sum,
      .add = add,
      .column_sums = column_sums,
  };
}

}  // namespace sb::SB_ISA
