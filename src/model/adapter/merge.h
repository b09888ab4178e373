#pragma once

#include <filesystem>
#include <optional>

#include "core/dtype.h"
#include "core/thread_pool.h"
#include "model/model_config.h"

namespace sb {

struct MergeOptions {
  std::filesystem::path base, adapter;  // a Hugging Face directory; a PEFT directory
  ModelConfig config;                   // of the model that comes of it: config.json is written from this
  std::optional<DType> dtype;           // none: bf16 where all of the base is, else f32
};

// Writes the model with the adapter put into its weights to `directory`, which exists: W + scale · B·A in fp32, then
// rounded once. Tensor by tensor: it never holds the whole model.
void merge_adapter(ThreadPool& pool, const MergeOptions& options, const std::filesystem::path& directory);

}  // namespace sb
