#pragma once

#include <cstdio>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <type_traits>
#include <utility>

#include "device/cuda.h"

namespace sb::test {

// Whether what seems to be a GPU is the tests' own software device (tests/softgpu), on which sizes have to be smaller.
inline bool on_software_device() {
  return cuda::problem().empty() && cuda::device_info().name.starts_with("software device");
}

// The same, and says once for every place in the tests what is smaller there.
inline bool smaller_on_software_device(const std::string& what, const char* file = __builtin_FILE(),
                                       int line = __builtin_LINE()) {
  if (!on_software_device()) return false;
  static std::mutex mutex;
  static std::set<std::pair<std::string, int>> said;
  const std::lock_guard lock(mutex);
  const char* slash = std::strrchr(file, '/');
  if (said.emplace(file, line).second)
    std::printf("[ SMALLER  ] on a software device, which is slow: %s (%s:%d)\n", what.c_str(),
                slash != nullptr ? slash + 1 : file, line);
  return true;
}

// A size of a test, on a GPU and on the software device.
template <typename T>
T sized(T on_gpu, T on_software_device, const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  std::string what = "a smaller or shorter list";
  if constexpr (std::is_arithmetic_v<T>)
    what = std::to_string(on_software_device) + " for " + std::to_string(on_gpu);
  else if constexpr (std::is_convertible_v<T, std::string>)
    what = std::string(on_software_device) + " for " + std::string(on_gpu);
  return smaller_on_software_device(what, file, line) ? std::move(on_software_device) : std::move(on_gpu);
}

}  // namespace sb::test
