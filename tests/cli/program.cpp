#include "tests/cli/program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>

namespace sb::test {
namespace {

std::string read_and_remove(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  return text;
}

std::string scratch_file(const char* extension) {
  return ::testing::TempDir() + "/sparsebalance_program_" + std::to_string(getpid()) + extension;
}

// `set_streams` runs in the new process and says whether it could.
int exit_code_of(const std::vector<std::string>& arguments, const std::function<bool()>& set_streams) {
  std::vector<char*> argv{const_cast<char*>(SB_PROGRAM)};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    if (!set_streams()) _exit(127);
    execv(SB_PROGRAM, argv.data());
    _exit(127);
  }
  EXPECT_GT(child, 0);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// `open_out` gives standard output's descriptor.
ProgramResult run_program_into(const std::function<int()>& open_out, const std::vector<std::string>& arguments) {
  const std::string err = scratch_file(".err");
  ProgramResult result;
  result.exit_code = exit_code_of(arguments, [&] {
    const int out_file = open_out(), err_file = open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    return out_file >= 0 && err_file >= 0 && dup2(out_file, 1) >= 0 && dup2(err_file, 2) >= 0;
  });
  result.err = read_and_remove(err);
  return result;
}

}  // namespace

ProgramResult run_program(const std::vector<std::string>& arguments) {
  // Files rather than pipes: nothing can block, however much is written.
  const std::string out = scratch_file(".out");
  ProgramResult result =
      run_program_into([&] { return open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600); }, arguments);
  result.out = read_and_remove(out);
  return result;
}

ProgramResult run_program_with_input(const std::vector<std::string>& arguments, const std::string& input) {
  const std::string in = scratch_file(".in"), out = scratch_file(".out");
  std::ofstream(in, std::ios::binary) << input;
  ProgramResult result = run_program_into(
      [&] {
        const int in_file = open(in.c_str(), O_RDONLY);
        return in_file >= 0 && dup2(in_file, 0) >= 0 ? open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600) : -1;
      },
      arguments);
  std::filesystem::remove(in);
  result.out = read_and_remove(out);
  return result;
}

ProgramResult run_program_into_full_device(const std::vector<std::string>& arguments) {
  return run_program_into([] { return open("/dev/full", O_WRONLY); }, arguments);
}

ProgramResult run_program_into_broken_pipe(const std::vector<std::string>& arguments) {
  return run_program_into(
      [] {
        int ends[2];
        return pipe(ends) == 0 && close(ends[0]) == 0 ? ends[1] : -1;
      },
      arguments);
}

int run_program_without_streams(const std::vector<std::string>& arguments) {
  return exit_code_of(arguments, [] { return close(0) == 0 && close(1) == 0 && close(2) == 0; });
}

}  // namespace sb::test
