#include "softgpu/runtime/device_model.h"

#include <cstdio>
#include <cstdlib>

#include "softgpu/interface/options.h"

namespace softgpu {
namespace {

int number_from(const char* name, int otherwise, int most) {
  const char* text = std::getenv(name);
  if (text == nullptr) return otherwise;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 0);
  if (*text == 0 || *end != 0 || value < 1 || value > most) {
    std::fprintf(stderr, "softgpu: %s=%s is no number from 1 to %d\n", name, text, most);
    std::exit(2);
  }
  return static_cast<int>(value);
}

// Of NVIDIA's data sheets and of the CUDA programming guide's table of compute capabilities. Fewer multiprocessors than
// there are: kernels that stay on theirs then have several items each, as they have at full size.
DeviceModel model() {
  DeviceModel m;
  m.limits.multiprocessors = number_from("SOFTGPU_MULTIPROCESSORS", m.limits.multiprocessors, 1024);
  m.devices = number_from("SOFTGPU_DEVICES", 1, 16);
  m.pattern = static_cast<unsigned char>(number_from("SOFTGPU_PATTERN", 0xFF, 0xFF));
  if (options().device == Model::a100) {
    m.name = "software device like an A100";
    m.limits.major = 8;
    m.limits.shared_per_block_most = 163 << 10;
    m.limits.shared_per_multiprocessor = 164 << 10;
    m.memory_bytes = size_t{81152} << 20;
  } else {
    m.name = "software device like an H200";
    m.memory_bytes = size_t{143771} << 20;
  }
  return m;
}

}  // namespace

const DeviceModel& device_model() {
  static const DeviceModel read_once = model();
  return read_once;
}

const DeviceLimits& device_limits() {
  return device_model().limits;
}

}  // namespace softgpu
