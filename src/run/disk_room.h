#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "run/config/run_config.h"

namespace sb {

// Of a checkpoint: the fp32 values and two moments.
int64_t checkpoint_bytes(const RunConfig& config, const ModelConfig& model);

// What a run has still to write to train.output_dir.
struct DiskNeed {
  int64_t checkpoints = 0;       // at a time, besides those that are there
  int64_t checkpoint_bytes = 0;  // of one
  int64_t model_bytes = 0;       // of final/

  int64_t total() const { return checkpoints * checkpoint_bytes + model_bytes; }
};
// `saved_steps`: the checkpoints that are there, the newest last.
DiskNeed disk_need(const RunConfig& config, const ModelConfig& model, const std::vector<int64_t>& saved_steps);

// What to say of a disk with so much room left; empty: it is enough. train.save_total_limit is named where it helps.
std::string advice_on_room(const RunConfig& config, const ModelConfig& model, const std::vector<int64_t>& saved_steps,
                           int64_t room);

// Warns before the first step of a disk that will be full before the last. Not an error: who looks after the disk may
// know better, and file systems with quotas do not tell.
void warn_of_little_room(const RunConfig& config, const ModelConfig& model);

// Before a checkpoint is saved where it does not fit: lets the oldest go that would go after it, while a complete one
// and the newest up to step `last_good` stay.
void make_room_for_checkpoint(const RunConfig& config, const ModelConfig& model, int64_t last_good);

}  // namespace sb
