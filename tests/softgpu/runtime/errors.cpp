#include "softgpu/runtime/errors.h"

#include <atomic>
#include <cstdarg>

#include "softgpu/interface/kernel.h"

namespace softgpu {
namespace {

thread_local cudaError_t last = cudaSuccess;
std::atomic<cudaError_t> lost{cudaSuccess};

}  // namespace

cudaError_t result(cudaError_t error) {
  if (const cudaError_t always = lost; always != cudaSuccess) error = always;
  if (error != cudaSuccess) last = error;
  return error;
}

cudaError_t refused(cudaError_t error, const char* format, ...) {
  va_list list;
  va_start(list, format);
  say_refused("", format, list);
  va_end(list);
  return result(error);
}

void lose_device(cudaError_t error) {
  lost = error;
}

}  // namespace softgpu

using namespace softgpu;

extern "C" {

cudaError_t cudaGetLastError() {
  const cudaError_t error = result(cudaSuccess) != cudaSuccess ? result(cudaSuccess) : last;
  last = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  const cudaError_t always = result(cudaSuccess);
  return always != cudaSuccess ? always : last;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorInvalidConfiguration:
      return "invalid configuration argument";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorInvalidMemcpyDirection:
      return "invalid copy direction for memcpy";
    case cudaErrorInvalidResourceHandle:
      return "invalid resource handle";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorIllegalAddress:
      return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureUnsupported:
      return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureImplicit:
      return "dependency created on uncaptured work in another stream";
    case cudaErrorNotSupported:
      return "operation not supported";
    default:
      return "another error";
  }
}

}  // extern "C"
