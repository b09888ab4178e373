#pragma once

// What kernels took, printed at the end with SOFTGPU_STATS=1.

#include <cstdint>
#include <span>

#include "softgpu/interface/kernel.h"

namespace softgpu {

struct Statistics {
  uint64_t blocks = 0, switches = 0;
};
Statistics& statistics();
void note_kernels(std::span<const Kernel> chain, double seconds);

}  // namespace softgpu
