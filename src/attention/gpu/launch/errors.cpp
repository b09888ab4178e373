// Apart from the kernels, so that no CUDA file needs the formatting library.

#include "core/errors.h"

#include <cstdint>

namespace sb::gpu {

[[noreturn]] void throw_cuda(const char* what, const char* error) {
  throw InternalError("{}: {}", what, error);
}
[[noreturn]] void throw_unsupported(const char* what, int64_t value) {
  throw UserError("attention on CUDA does not support {} = {}", what, value);
}

}  // namespace sb::gpu
