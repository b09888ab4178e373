#pragma once

#include <filesystem>
#include <string>

#include "attention/select/learned_selection.h"
#include "model/model_config.h"

namespace sb {

// What selection has learned lies in selection.safetensors: of a checkpoint beside the weights, of an exported model in
// the folder `sparsebalance`, where `transformers` does not look. The tensors, all F32:
//   planes.tokens [layers]; planes.query_squares, planes.key_sums, planes.key_squares [layers, kv_heads, head_dim]
//   mass.keys [n, 3]: layer, length class, budget class; mass.values [n, 3]: correction, gain, last
inline constexpr const char* kSelectionFile = "selection.safetensors";
inline constexpr const char* kSelectionFolder = "sparsebalance";

// Writes nothing where nothing was learned.
void write_selection_file(const std::filesystem::path& file, const LearnedSelection& learned, const ModelConfig& model);

// What a checkpoint or an exported model has of it. Where it cannot be used, `problem` says why and nothing is taken.
struct FoundSelection {
  LearnedSelection learned;
  std::string problem;
};
FoundSelection read_selection_of(const std::filesystem::path& folder, const ModelConfig& model);

}  // namespace sb
