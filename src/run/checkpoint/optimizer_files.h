#pragma once

#include <filesystem>
#include <span>
#include <vector>

#include "core/tensor.h"
#include "model/parameters.h"
#include "model/tensors/safetensors.h"
#include "parallel/shard_layout.h"

namespace sb {

// AdamW's moments in safetensors files (optimizer.safetensors, or several with an index): "exp_avg.<name>" and
// "exp_avg_sq.<name>" for every Hugging Face tensor of the model, in fp32, which holds moments in bf16 exactly. Whole
// tensors by name, so that a run with another number of ranks finds its part.
inline constexpr const char* kOptimizerFiles = "optimizer";
std::string first_moment_name(const std::string& tensor);
std::string second_moment_name(const std::string& tensor);

// Fills one shard's moments, in bf16 with what is nearest; padding becomes zero. UserError when a tensor is missing or
// has another size.
void read_optimizer_files(const std::filesystem::path& checkpoint, const ParameterSet& parameters,
                          const ShardLayout& layout, int shard, TensorView first_moment, TensorView second_moment);

}  // namespace sb
