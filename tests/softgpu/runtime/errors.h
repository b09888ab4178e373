#pragma once

// The errors that the runtime's functions return, and which cudaGetLastError() finds.

#include <cuda_runtime_api.h>

namespace softgpu {

// What a function returns: this error, or the one that the device has for good; the calling thread's last error from
// now on.
cudaError_t result(cudaError_t error);

// The same, with a line on stderr that says what was wrong.
cudaError_t refused(cudaError_t error, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The device is lost (a kernel that failed): all that is asked of it from now on fails so.
void lose_device(cudaError_t error);

}  // namespace softgpu
