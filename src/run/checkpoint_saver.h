#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "model/model_config.h"
#include "model/tensors/safetensors.h"
#include "run/checkpoint/checkpoint.h"
#include "run/config/run_config.h"

namespace sb {

// Saves a run's checkpoints: makes room for one, writes it and removes those that are not kept. In the background that
// happens on a thread of its own, from a copy in host memory, while the ranks go on training. One at a time.
class CheckpointSaver {
 public:
  enum class Mode { now, in_background };
  CheckpointSaver(RunConfig config, ModelConfig model, Mode mode);
  // Waits. An error that wait() and check() have not thrown is logged.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // Tensors are fetched once each, weights before moments, before it returns; wait() comes first. `coverage`: the
  // content of coverage.json, empty: none. UserError as of save_checkpoint(), in the background from a later call.
  void save(std::span<const SafetensorsTensor> weights, std::span<const SafetensorsTensor> moments,
            const TrainState& state, const std::string& coverage);
  // Until what was saved is on the disk.
  void wait();
  // Throws when that has failed, and waits for nothing.
  void check();

 private:
  void write(std::span<const SafetensorsTensor> weights, std::span<const SafetensorsTensor> moments,
             const TrainState& state, const std::string& coverage) const;
  void work();
  void rethrow_failure();  // under the lock

  const RunConfig config_;
  const ModelConfig model_;
  std::vector<float> copy_;  // in the background: checkpoint_bytes()

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;  // being written, or about to be
  std::exception_ptr failure_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace sb
