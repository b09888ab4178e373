#include "device/context.h"

#include "device/cuda.h"
#include "device/cuda_products.h"
#include "device/memory.h"

namespace sb {

DeviceContext::DeviceContext(DeviceKind device, ThreadPool& pool, int64_t scratch_bytes)
    : scratch_(make_arena("operations", scratch_bytes, device)) {
  if (device == DeviceKind::cuda) {
    stream_ = cuda::make_stream();
    products_ = std::make_unique<CudaProducts>();
  }
  exec_ = {.device = device, .pool = &pool, .stream = stream_.get(), .scratch = &scratch_, .products = products_.get()};
}

DeviceContext::~DeviceContext() = default;

void DeviceContext::synchronize() const {
  if (stream_) cuda::synchronize(stream_.get());
}

}  // namespace sb
