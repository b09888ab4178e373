#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "model/lora/lora_config.h"
#include "model/model_config.h"
#include "model/tensors/safetensors.h"
#include "run/checkpoint/checkpoint.h"
#include "run/checkpoint/manifest.h"

namespace sb {

// A checkpoint is written in three parts: one rank begins it, every rank writes the tensors that are its own, and when
// all have, the first one writes the rest and gives it its name. On failure every part removes what there is of it and
// throws a UserError that says which checkpoint is intact.

struct CheckpointPlace {
  std::filesystem::path output_dir;
  int64_t step = 0;
  int64_t bytes = 0;  // that it will take, for messages
};

// Of a file of tensors, what the index and the manifest say of it.
struct TensorFile {
  std::string name;
  std::string stem;  // "model" or "optimizer"
  std::vector<std::string> tensors;
  int64_t tensor_bytes = 0;
  WrittenFile written;
};
// For the way to the first rank.
std::string pack_files(const std::vector<TensorFile>& files);
std::vector<TensorFile> unpack_files(const std::string& text);

struct CheckpointContents {
  const ModelConfig& model;
  const TrainState& state;
  const std::string& run_config;
  std::filesystem::path copy_from;  // tokenizer and the like; empty: nothing
  LoraConfig lora = {};             // with a rank: the weights are adapters of the model at `copy_from`
};

// Returns its temporary directory.
std::filesystem::path begin_checkpoint(const CheckpointPlace& place);

// Which of several files a rank's weights or moments are, counted from 1.
struct FileNumber {
  int number = 1, count = 1;
};
// What one rank writes.
struct RankTensors {
  std::vector<SafetensorsTensor> weights, moments;  // fetched once each, weights before moments
  FileNumber weights_file, moments_file;
};
// Of adapters, which are all of one rank, the manifest takes the checksum from the disk: they are not among the files
// returned.
std::vector<TensorFile> write_tensors(const std::filesystem::path& temporary, const CheckpointPlace& place,
                                      const RankTensors& tensors, const CheckpointContents& contents);

// `files`: of all ranks. Returns the checkpoint's directory.
std::filesystem::path finish_checkpoint(const std::filesystem::path& temporary, const CheckpointPlace& place,
                                        const std::vector<TensorFile>& files, const CheckpointContents& contents);

}  // namespace sb
