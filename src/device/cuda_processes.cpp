// The driver's management library (NVML), taken when it is there: nothing else needs it.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "device/cuda.h"

namespace sb::cuda {
namespace {

// Of nvml.h, which not every machine has.
using NvmlDevice = void*;
constexpr int kSuccess = 0, kInsufficientSize = 7;

class ManagementLibrary {
 public:
  ManagementLibrary() : module_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
    find(init_, "nvmlInit_v2");
    find(shutdown_, "nvmlShutdown");
    find(handle_, "nvmlDeviceGetHandleByPciBusId_v2");
    find(running_, "nvmlDeviceGetComputeRunningProcesses_v3");
    if (running_ == nullptr) find(running_, "nvmlDeviceGetComputeRunningProcesses");
  }
  ~ManagementLibrary() {
    if (module_ != nullptr) dlclose(module_);
  }
  ManagementLibrary(const ManagementLibrary&) = delete;
  ManagementLibrary& operator=(const ManagementLibrary&) = delete;

  int processes(const char* bus) const {
    if (init_ == nullptr || shutdown_ == nullptr || handle_ == nullptr || running_ == nullptr) return -1;
    if (init_() != kSuccess) return -1;
    NvmlDevice device = nullptr;
    unsigned count = 0;  // room for none: it then says how many there are
    int result = handle_(bus, &device);
    if (result == kSuccess) result = running_(device, &count, nullptr);
    shutdown_();
    return result == kSuccess || result == kInsufficientSize ? static_cast<int>(count) : -1;
  }

 private:
  template <typename Function>
  void find(Function& function, const char* name) const {
    if (module_ != nullptr) function = reinterpret_cast<Function>(dlsym(module_, name));
  }

  void* module_;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*handle_)(const char* bus, NvmlDevice* device) = nullptr;
  int (*running_)(NvmlDevice device, unsigned* count, void* infos) = nullptr;
};

}  // namespace

int processes() {
  char bus[32] = {};
  if (cudaFree(nullptr) != cudaSuccess) return -1;  // so that this process counts itself
  if (cudaDeviceGetPCIBusId(bus, sizeof bus, current_device()) != cudaSuccess) return -1;
  return ManagementLibrary().processes(bus);
}

}  // namespace sb::cuda
