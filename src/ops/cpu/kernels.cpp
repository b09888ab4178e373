#include "ops/cpu/kernels.h"

#include "core/cpu_isa.h"

namespace sb {

namespace avx2 {
CpuKernels kernel_table();
}
namespace avx512 {
CpuKernels kernel_table();
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels kernels = cpu_isa() == CpuIsa::avx512 ? avx512::kernel_table() : avx2::kernel_table();
  return kernels;
}

}  // namespace sb
