#pragma once

#include <span>

#include "comm/communicator.h"

namespace sb {

// What every implementation must do, for any number of ranks; each rank runs the body with its own communicator.
struct CommCase {
  const char* name;
  void (*body)(Communicator& world);
};
std::span<const CommCase> comm_cases();

}  // namespace sb
