#pragma once

#include <string>
#include <vector>

namespace sb::test {

struct ProgramResult {
  int exit_code = -1;  // 128 + signal when killed by one
  std::string out;
  std::string err;
};

// Runs the sparsebalance binary with these arguments and waits for it.
ProgramResult run_program(const std::vector<std::string>& arguments);
// The same with this text on standard input.
ProgramResult run_program_with_input(const std::vector<std::string>& arguments, const std::string& input);
// The same with standard output to a device that has no room for anything; `out` is empty.
ProgramResult run_program_into_full_device(const std::vector<std::string>& arguments);
// The same with standard output to a pipe that nobody reads any more.
ProgramResult run_program_into_broken_pipe(const std::vector<std::string>& arguments);
// The same with standard input, output and error closed; returns the exit code.
int run_program_without_streams(const std::vector<std::string>& arguments);

}  // namespace sb::test
