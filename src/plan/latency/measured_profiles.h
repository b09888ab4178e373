#pragma once

#include <span>

namespace sb {

// Profiles measured on a machine and compiled in, as `sparsebalance profile` wrote them.
struct MeasuredProfile {
  const char* name;  // of the machine: what a user asks for
  const char* json;
};
std::span<const MeasuredProfile> measured_profiles();

}  // namespace sb
