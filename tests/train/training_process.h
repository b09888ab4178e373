#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <functional>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/run/scratch_directory.h"

namespace sb {

// What the tests of the real program train.
inline constexpr const char* kRun = R"(
model:
  init: {model_type: qwen2, vocab_size: 16, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2,
         num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16}
data:
  synthetic: {task: chunk_recall, vocab_size: 16, length: 48, chunk: 4,
              curriculum: {start_length: 12, threshold: 0.05, min_observations: 9}}
batch: {global_batch_size: 4, micro_batch_sequences: 2}
optimizer: {learning_rate: 5.0e-3, schedule: cosine, warmup_steps: 2}
train: {max_steps: 40, save_steps: 1, save_total_limit: 2, threads: 2, validation_sequences: 2, validation_steps: 10}
)";

// `sparsebalance train` in a process of its own, output to a file.
class Training {
 public:
  Training(const std::filesystem::path& directory, const std::vector<std::string>& arguments,
           rlim_t file_size_limit = RLIM_INFINITY, const std::vector<std::string>& before_command = {})
      : output_(directory / "output.txt") {
    std::vector<std::string> words = {SB_PROGRAM};
    words.insert(words.end(), before_command.begin(), before_command.end());
    words.insert(words.end(), {"train", (directory / "run.yaml").string(), "--set",
                               "train.output_dir=" + (directory / "run").string()});
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    write_bytes(directory / "run.yaml", kRun);
    process_ = fork();
    if (process_ == 0) {
      const int out = open(output_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
      dup2(out, STDOUT_FILENO);
      dup2(out, STDERR_FILENO);
      const rlimit limit = {file_size_limit, RLIM_INFINITY};
      if (file_size_limit != RLIM_INFINITY) setrlimit(RLIMIT_FSIZE, &limit);
      execv(pointers[0], pointers.data());
      _exit(127);
    }
  }
  ~Training() {
    if (!reaped_) {
      signal(SIGKILL);
      wait();
    }
  }

  pid_t process() const { return process_; }
  void signal(int number) const { kill(process_, number); }
  bool running() {
    if (!reaped_ && waitpid(process_, &status_, WNOHANG) == process_) reaped_ = true;
    return !reaped_;
  }
  // The exit code; minus the signal that ended it.
  int wait() {
    if (!reaped_) waitpid(process_, &status_, 0);
    reaped_ = true;
    return WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_);
  }
  // False when it still runs after that long.
  bool ends_within(std::chrono::seconds limit) {
    const auto deadline = std::chrono::steady_clock::now() + limit;
    while (running() && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return !running();
  }
  std::string output() const { return read_bytes(output_); }

 private:
  std::filesystem::path output_;
  pid_t process_ = -1;
  int status_ = 0;
  bool reaped_ = false;
};

inline int train(const std::filesystem::path& directory, const std::vector<std::string>& arguments = {}) {
  Training training(directory, arguments);
  const int code = training.wait();
  if (code != 0) ADD_FAILURE() << training.output();
  return code;
}

inline std::string final_weights(const std::filesystem::path& directory) {
  return read_bytes(directory / "run" / "final" / "model.safetensors");
}

inline bool contains(const std::string& text, const std::string& word) {
  return text.find(word) != std::string::npos;
}

// Waits for the condition while the process runs; false when the process ended first.
inline bool wait_for(Training& training, const std::function<bool()>& condition) {
  while (training.running()) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return false;
}

inline size_t metric_lines(const std::filesystem::path& directory) {
  const std::filesystem::path file = directory / "run" / "metrics.jsonl";
  if (!std::filesystem::exists(file)) return 0;
  const std::string text = read_bytes(file);
  return static_cast<size_t>(std::count(text.begin(), text.end(), '\n'));
}

// Step and loss of every step in the record.
inline std::vector<std::pair<int64_t, double>> losses(const std::filesystem::path& directory) {
  std::istringstream in(read_bytes(directory / "run" / "metrics.jsonl"));
  std::vector<std::pair<int64_t, double>> result;
  std::string line;
  while (std::getline(in, line)) {
    const auto object = nlohmann::json::parse(line);
    if (object.contains("loss")) result.emplace_back(object["step"], object["loss"]);
  }
  return result;
}

}  // namespace sb
