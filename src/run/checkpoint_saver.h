#pragma once

#include <condition_variable>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/communicator.h"
#include "model/model_config.h"
#include "model/tensors/safetensors.h"
#include "run/checkpoint/checkpoint_files.h"
#include "run/config/run_config.h"

namespace sb {

// What this rank writes of a checkpoint, and what it gives to others who do.
struct OwnTensors {
  RankTensors tensors;  // names and shapes alone
  // Brings the values of the next of them, weights before moments: into `into` where that is given, and valid until the
  // next call. Collective: every rank calls it `rounds` times, whether it has so many tensors (nullptr where not).
  std::function<const float*(float* into)> next;
  size_t rounds = 0;
};

// Saves a run's checkpoints: every rank writes its own tensors, and the first one makes room before and gives the
// checkpoint its name when all have. In the background that happens on a thread of every rank, from a copy in host
// memory, while all go on training. One at a time.
class CheckpointSaver {
 public:
  // `copy_bytes`: for the copy of this rank's tensors; 0: training waits for the write. On all ranks or on none.
  CheckpointSaver(RunConfig config, ModelConfig model, Communicator& world, int64_t copy_bytes);
  // Waits for what this rank writes. An error that nothing has thrown is logged.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // Collective, all three. A UserError of begin_checkpoint() and of what follows it is thrown on the rank that had it,
  // in the background by a later call.

  // Waits for the one before. `state` and `coverage` (the content of coverage.json; empty: none) are the first rank's.
  void save(const OwnTensors& own, const TrainState& state, const std::string& coverage);
  // To be called between steps: completes what all ranks have written. Waits for nothing.
  void advance();
  // Until what was saved is on the disk.
  void wait();

 private:
  // A checkpoint on its way.
  struct Saving {
    CheckpointPlace place;
    TrainState state;
    std::string coverage;
    std::filesystem::path temporary;
    std::vector<TensorFile> files;  // of this rank, when it has written them
    bool finishing = false;         // all ranks have
  };

  bool alone() const { return world_.size() == 1; }
  CheckpointContents contents(const Saving& saving) const;
  void begin(const OwnTensors& own);
  RankTensors copied(const OwnTensors& own);
  void write(Saving& saving, const RankTensors& tensors) const;
  void finish();
  void complete(const Saving& saving, const std::vector<TensorFile>& files) const;

  // On the thread; where there is none, when somebody waits for it.
  void start(std::function<void()> task);
  void work();
  bool idle();
  void wait_for_task();
  void check();
  void rethrow_failure();  // under the lock

  const RunConfig config_;
  const ModelConfig model_;
  const std::string run_config_;
  Communicator& world_;
  std::vector<float> copy_;
  std::optional<Saving> saving_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;  // under way, or about to be
  std::exception_ptr failure_;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace sb
