#pragma once

#include <fmt/format.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "run/config/run_config.h"
#include "tests/device/software_device.h"

namespace sb::test {

// How many steps a run has, and how many before it is stopped and resumed. A software device does fewer.
struct RunSteps {
  int64_t all = 30, part = 10;
};
inline RunSteps run_steps() {
  return sized(RunSteps{}, RunSteps{4, 2});
}

inline int longest_sequence() {
  return sized(700, 270);
}

// Pieces of them.
inline std::string in_pieces() {
  return sized("balance.chunk=256", "balance.chunk=128");
}

// A run that a GPU, or a CPU beside it, does in a second or two. `device` and what else differs come as overrides.
inline RunConfig small_run(const std::string& output, const std::vector<std::string>& overrides) {
  const std::string yaml = R"(
model:
  init: {model_type: qwen2, vocab_size: 64, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2,
         num_attention_heads: 4, num_key_value_heads: 2, head_dim: 64, initializer_range: 0.1, tie_word_embeddings: true}
data:
  synthetic: {task: chunk_recall, vocab_size: 64, min_length: 60, chunk: 4}
batch: {global_batch_size: 6, micro_batch_sequences: 2}
attention: {pattern: dense, coverage_rows: 0}
optimizer: {learning_rate: 2.0e-3, schedule: constant}
train: {threads: 2, validation_sequences: 2, tensorboard: false}
)";
  const RunSteps steps = run_steps();
  std::vector<std::string> all = {
      "train.output_dir=" + output, fmt::format("data.synthetic.length={}", longest_sequence()),
      fmt::format("train.max_steps={}", steps.all), fmt::format("train.save_steps={}", steps.part)};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return parse_run_config(yaml, "run.yaml", all);
}

inline std::map<int64_t, double> losses_by_step(const RunConfig& config) {
  std::map<int64_t, double> losses;
  std::ifstream in(config.train.output_dir / "metrics.jsonl");
  for (std::string line; std::getline(in, line);) {
    const auto json = nlohmann::json::parse(line);
    if (json.contains("loss")) losses[json["step"].get<int64_t>()] = json["loss"].get<double>();
  }
  return losses;
}

}  // namespace sb::test
