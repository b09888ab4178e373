#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "attention/select/learned_selection.h"
#include "core/tensor.h"
#include "model/parameters.h"
#include "parallel/shard_layout.h"
#include "run/checkpoint/manifest.h"

namespace sb {

// Everything besides weights and moments that the next step depends on.
struct TrainState {
  int64_t step = 0;            // steps done, skipped ones included: what the learning rate follows
  int64_t updates = 0;         // steps whose update was applied: what AdamW's bias correction follows
  uint64_t position = 0;       // of the next sequence in the source
  std::string source_state;    // what the source has learned (length curriculum)
  int64_t tokens = 0;          // seen so far
  int64_t skipped = 0;         // steps skipped because of a non-finite gradient
  int64_t skipped_in_row = 0;  // of these, how many just now, over all processes of the run
  LearnedSelection selection;  // in a file of its own: read_selection_of()
  std::string planner_state;   // what the planner has learned
  std::string source;          // the source's identity(): `position` counts in its order
  std::string base = {};       // with adapters: the fingerprint of the model they were trained for
  bool operator==(const TrainState&) const = default;
};

// A checkpoint is a directory `checkpoint-<step>`:
//   config.json, model*.safetensors, …  the fp32 master weights, as `transformers` loads them; with adapters instead
//   adapter_config.json, adapter_model.safetensors  these, as PEFT loads them
//   optimizer*.safetensors              AdamW's moments
//   selection.safetensors               what selection has learned, if anything (selection_file.h)
//   state.json, run.yaml                the rest of TrainState, and the configuration
//   manifest.json                       size and CRC-32C of all of these; written last
// Weights and moments are whole tensors by name, which any number of ranks can read: of one rank in one file each, of
// several in a file of every rank, with an index (model/tensors/tensor_files.h). It is written under another name,
// synced and then renamed (checkpoint_files.h): what has this name is complete, unless the disk damaged it.
// Deletes the oldest ones beyond the newest `keep` that are complete, counted from that of step `newest`, which was
// just saved (0: deletes nothing). The newest one of a step up to `last_good` stays besides: the last before a row of
// steps whose gradient was not finite. Damaged ones are left alone and not counted; those of later steps are, whatever
// their sizes say, since the run went on from an earlier one.
void remove_old_checkpoints(const std::filesystem::path& output_dir, int64_t newest, int64_t keep, int64_t last_good);

// What is wrong with a checkpoint; nothing when every file has the size and checksum that the manifest says.
// UnreadableFile when that cannot be told. Several can look for it together, each in its share of the files.
std::optional<std::string> find_damage(const std::filesystem::path& checkpoint, FileShare share = {});
using FindDamage = std::function<std::optional<std::string>(const std::filesystem::path& checkpoint)>;
inline const FindDamage kFindAllDamage = [](const std::filesystem::path& checkpoint) {
  return find_damage(checkpoint);
};

// The newest intact checkpoint; a damaged one is named in a warning and skipped. Nothing when there is none at all;
// UserError when there are some and all of them are damaged, and when one cannot be read: it may be intact, and a run
// that went on from an older one would write over it.
std::optional<std::filesystem::path> newest_intact_checkpoint(const std::filesystem::path& output_dir,
                                                              const FindDamage& find = kFindAllDamage);

// Steps of all checkpoints of a run, ascending.
std::vector<int64_t> checkpoint_steps(const std::filesystem::path& output_dir);
std::filesystem::path checkpoint_path(const std::filesystem::path& output_dir, int64_t step);
// Which one a run whose newest cannot be saved goes on from, in words.
std::string previous_checkpoint_note(const std::filesystem::path& output_dir);

// Loads a stage's weights and its share of the moments; returns the rest. UserError when the checkpoint is of another
// model.
TrainState load_checkpoint(const std::filesystem::path& checkpoint, ParameterSet& parameters, const ShardLayout& layout,
                           int shard, TensorView first_moment, TensorView second_moment);

// The same without the weights.
TrainState load_moments(const std::filesystem::path& checkpoint, const ParameterSet& parameters,
                        const ShardLayout& layout, int shard, TensorView first_moment, TensorView second_moment);

// The rest alone. None of them reads what selection has learned.
TrainState read_train_state(const std::filesystem::path& checkpoint);

}  // namespace sb
