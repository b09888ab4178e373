#include "run/machine.h"

#include <fmt/format.h>

#include <fstream>

#include "device/cuda.h"

namespace sb {

std::string processor_name() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

std::string machine_text(DeviceKind device, int cores) {
  if (device == DeviceKind::cuda) return cuda::device_info().name;
  return fmt::format("{}, {} core{}", processor_name(), cores, cores == 1 ? "" : "s");
}

}  // namespace sb
