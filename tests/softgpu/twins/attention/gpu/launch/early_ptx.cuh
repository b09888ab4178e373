#pragma once

// src/attention/gpu/launch/early_ptx.cuh on the software device.

#include "softgpu/cuda/engine.h"

namespace sb::gpu {

inline void wait_for_dependencies() {
  softgpu::wait_for_previous_kernel();
}
inline void launch_dependents() {
  softgpu::launch_next_kernel();
}

}  // namespace sb::gpu
