#pragma once

#include <string>
#include <vector>

namespace sb::testing {

struct ProgramResult {
  int exit_code = -1;  // 128 + signal when killed by one
  std::string out;
  std::string err;
};

// Runs the sparsebalance binary with these arguments and waits for it.
ProgramResult run_program(const std::vector<std::string>& arguments);

}  // namespace sb::testing
