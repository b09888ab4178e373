#pragma once

// What a kernel that starts while the one before it ends (early.cuh) tells the device. CUDA files only.

namespace sb::gpu {

// Everything that the kernels before this one wrote is there.
__device__ __forceinline__ void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may be brought to multiprocessors that have room.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace sb::gpu
