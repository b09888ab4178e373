#pragma once

#include <string>

#include "core/tensor.h"

namespace sb {

// The processor's name, as the kernel gives it; "unknown processor" where it does not.
std::string processor_name();
// What a run computes on, in words: "AMD EPYC 9454, 2 cores" or "NVIDIA H200".
std::string machine_text(DeviceKind device, int cores);

}  // namespace sb
