#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tests/run/scratch_directory.h"

namespace sb {

// What a run of the program under a fault came to.
struct FaultyResult {
  int code = -1;  // minus the signal that ended it
  bool hung = false;
  std::string output;  // standard output and error

  bool says(const std::string& words) const { return output.find(words) != std::string::npos; }
};

// A fault as tests/faults/fault_library.cpp takes it: every call of an operation on files with this in their path.
inline std::map<std::string, std::string> always(const std::string& operation, int error, const std::string& path) {
  return {{"LD_PRELOAD", SB_FAULT_LIBRARY},
          {"SB_FAULT", operation + ":1+:" + std::to_string(error)},
          {"SB_FAULT_PATH", path},
          {"OPENBLAS_NUM_THREADS", "1"},
          {"ASAN_OPTIONS", "verify_asan_link_order=0:detect_leaks=0"}};
}

// Runs the program; `limit` is called in the new process before it starts.
inline FaultyResult run_faulty(const std::vector<std::string>& arguments,
                               const std::map<std::string, std::string>& environment = {},
                               const std::function<void()>& limit = {},
                               std::chrono::seconds patience = std::chrono::seconds(60)) {
  const ScratchDirectory scratch;
  const std::string output = scratch / "output.txt";
  std::vector<std::string> words = {SB_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  pointers.push_back(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const int file = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    if (limit) limit();
    execv(pointers[0], pointers.data());
    _exit(127);
  }
  FaultyResult result;
  int status = 0;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  while (waitpid(child, &status, WNOHANG) != child) {
    if (std::chrono::steady_clock::now() > deadline) {
      result.hung = true;
      kill(child, SIGKILL);
      waitpid(child, &status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  result.output = read_bytes(output);
  return result;
}

inline void set_limit(int which, rlim_t most) {
  const rlimit limit = {most, most};
  setrlimit(which, &limit);
}

}  // namespace sb
