#pragma once

// Which GPU the software device says it is.

#include <cstddef>
#include <string>

#include "softgpu/interface/device.h"

namespace softgpu {

struct DeviceModel {
  std::string name;
  DeviceLimits limits;
  size_t memory_bytes = 0;
  int devices = 1;               // SOFTGPU_DEVICES
  unsigned char pattern = 0xFF;  // what new memory is full of
};

const DeviceModel& device_model();

}  // namespace softgpu
