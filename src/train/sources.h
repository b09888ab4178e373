#pragma once

#include <memory>

#include "data/sequence_source.h"
#include "run/config/run_config.h"
#include "train/trainer.h"

namespace sb {

// Where a run's sequences come from, as data.* says: token files or a built-in task.
struct Sources {
  std::unique_ptr<SequenceSource> train;
  std::unique_ptr<SequenceSource> validation;  // empty: none
  ValidationSet validation_set;
};

// `vocab_size` is the model's. UserError names the file or option at fault. The rank that `leads` says what it found
// and looks whether token files fit the vocabulary: once is enough for all.
Sources make_sources(const RunConfig& config, int64_t vocab_size, bool leads = true);

}  // namespace sb
