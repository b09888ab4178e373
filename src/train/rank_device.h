#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "comm/communicator.h"
#include "core/thread_pool.h"
#include "device/context.h"
#include "run/config/run_config.h"

namespace sb {

// One of several ranks on GPUs: which GPU it has, its stream there, and how data on GPUs gets from rank to rank.
class RankDevice {
 public:
  // Collective. `local_rank`: number of this rank among those of its machine. UserError when parallel.backend cannot
  // do it.
  RankDevice(const RunConfig& config, Communicator& world, int local_rank, int threads);

  const Exec& exec() const { return context_->exec(); }
  // All ranks, for device memory.
  Communicator& data() const { return *data_; }
  // How many ranks use this rank's GPU, this one included.
  int sharing() const { return sharing_; }
  bool over_nccl() const { return nccl_; }
  // "2 ranks on 1 GPU (NVIDIA H200), data through host memory"
  std::string text() const;

 private:
  ThreadPool pool_;
  std::unique_ptr<DeviceContext> context_;
  std::unique_ptr<Communicator> data_;
  int ranks_, sharing_ = 1, gpus_ = 1;
  bool nccl_ = false;
  std::string gpu_name_;
};

}  // namespace sb
