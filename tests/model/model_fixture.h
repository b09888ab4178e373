#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "device/context.h"
#include "model/micro_batch.h"
#include "model/stage/stage.h"
#include "model/tensors/safetensors.h"
#include "ops/adamw.h"
#include "tests/model/naive_attention.h"

namespace sb::test {

using Tensors = std::map<std::string, std::vector<float>>;

// What Hugging Face's own implementation gave for a checkpoint: tests/data/hf/<name>.
struct HfFixture {
  explicit HfFixture(const std::string& name);

  std::filesystem::path directory;
  std::vector<std::vector<int32_t>> sequences;
  Tensors expected;  // "logits", "token_loss", "grad.<name>"
  double loss = 0;
  std::vector<double> losses, grad_norms;  // of ten AdamW steps
  double learning_rate = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0, clip = 0;
};

// Packs sequences back to back for next-token prediction; every target weighs 1 / `targets`.
MicroBatch pack(const std::vector<std::vector<int32_t>>& sequences, int64_t targets);
// The number of next-token targets.
int64_t count_targets(const std::vector<std::vector<int32_t>>& sequences);
// Random tokens in sequences of these lengths, with the same labels as pack().
std::vector<std::vector<int32_t>> random_sequences(const std::vector<int64_t>& lengths, int64_t vocabulary,
                                                   uint64_t seed);

// A pool, a device and the Exec over them.
struct TestExec {
  explicit TestExec(int threads = 2, DeviceKind device = DeviceKind::cpu)
      : pool(threads), context(device, pool, norm_scratch_bytes(device)), exec(context.exec()) {}
  ThreadPool pool;
  DeviceContext context;
  Exec exec;
};

// Options of a stage that holds the whole model.
StageOptions whole_model(const ModelConfig& config, int64_t tokens, Recompute recompute = Recompute::none);

// Gradients under Hugging Face's names.
Tensors hf_gradients(ParameterSet& parameters);
Tensors hf_values(ParameterSet& parameters);
// A tensor's elements as fp32, wherever it lies and whatever its type.
std::vector<float> host_values(const TensorView& tensor);
// Logits of the whole micro-batch, from evaluate().
std::vector<float> all_logits(Stage& stage, const Exec& exec, const MicroBatch& batch);

double norm(const std::vector<float>& x);
// ‖a - b‖ / max(‖b‖, floor)
double relative_difference(const std::vector<float>& a, const std::vector<float>& b, double floor = 0);
// Largest relative difference over the tensors, with a floor (a share of the largest norm) for those that are tiny by
// cancellation; records a failure for missing or surplus tensors. A floor for k_proj.bias: its gradient is zero but for
// rounding.
double largest_relative_difference(const Tensors& got, const Tensors& expected, double floor = 1e-6,
                                   double key_bias_floor = 0);

// A tiny model for gradient checks.
ModelConfig tiny_config(ModelConfig::Family family);

// An empty directory, removed with its owner.
class TemporaryDirectory {
 public:
  TemporaryDirectory();
  ~TemporaryDirectory();
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

void write_file(const std::filesystem::path& path, const std::string& content);
std::string read_file(const std::filesystem::path& path);

// What the UserError thrown by `action` says; "" when none is thrown.
template <typename Action>
std::string user_error(const Action& action) {
  try {
    action();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

}  // namespace sb::test

#define EXPECT_SAYS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << (text)
