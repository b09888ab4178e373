#pragma once

#include <filesystem>
#include <map>
#include <span>

#include "model/model_config.h"
#include "model/parameters.h"
#include "model/safetensors.h"

namespace sb {

// Reads the stage's parameters from a Hugging Face directory: model.safetensors, or shards with
// model.safetensors.index.json; fp32, bf16 or fp16. A missing tensor, a wrong shape or a damaged file is a UserError
// that names it.
void read_hf_weights(const std::filesystem::path& directory, ParameterSet& parameters);

struct HfWriteOptions {
  DType dtype = DType::f32;  // f32 or bf16
  int64_t max_shard_bytes = 5'000'000'000;
  // Tokenizer, generation and chat-template files are copied from here when set.
  std::filesystem::path copy_from = {};
  // Gets the CRC-32C of every file of weights by its name, where set.
  std::map<std::string, uint32_t>* checksums = nullptr;
};

// Writes a directory `transformers` loads unchanged: weights, config.json, copied companion files. `directory` must
// exist; files are written under temporary names, synced and renamed, so that a failure leaves an older model there as
// it was. Weights of an older model under other names are removed at the end.
void write_hf_model(const std::filesystem::path& directory, const ModelConfig& config, const ParameterSet& parameters,
                    const HfWriteOptions& options);
// The same from tensors that may come from elsewhere; each is fetched once, in order.
void write_hf_model(const std::filesystem::path& directory, const ModelConfig& config,
                    std::span<const SafetensorsTensor> tensors, const HfWriteOptions& options);

}  // namespace sb
