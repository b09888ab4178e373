#pragma once

#include <memory>
#include <string>

#include "core/tensor.h"
#include "model/lora/lora_config.h"
#include "plan/latency/profile_measure.h"

namespace sb {

struct ProfileEngineOptions {
  DeviceKind device = DeviceKind::cpu;
  AttentionSpec spec;
  std::string recompute = "attention";
  LoraConfig lora;  // with a rank: adapters are trained, and the model itself is frozen
  int layers = 3;   // built; three or more, to tell them from embedding and loss
  int64_t max_tokens = 1024;
  int threads = 0;  // 0: all cores
};

// A few layers of a model, with and without its ends, to be timed. On CUDA in bf16, by the device's own clock.
class ProfileEngine {
 public:
  static constexpr DType kCudaDType = DType::bf16;

  ProfileEngine(const ModelShape& shape, const ProfileEngineOptions& options);
  ~ProfileEngine();

  // One run each, microseconds. Without `head` embedding and loss are left out (0).
  MeasuredTimes parts(const MeasuredShape& shape, bool head);
  double whole(const MeasuredShape& shape);
  // Between ranks of one process: a copy, and a sum of two buffers.
  double transfer(int64_t bytes) const;
  double reduction(int64_t bytes);

  int threads() const;
  // What was measured, in words.
  std::string machine() const;

 private:
  struct Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace sb
