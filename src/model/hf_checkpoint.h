#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "model/parameters.h"
#include "model/tensors/safetensors.h"
#include "model/tensors/tensor_files.h"

namespace sb {

// Reads the stage's parameters from a Hugging Face directory: model.safetensors, or shards with
// model.safetensors.index.json; fp32, bf16 or fp16. A missing tensor, a wrong shape or a damaged file is a UserError
// that names it.
// `then` sees every tensor as it was read, by its name in the files, and may change its values.
using TensorRead = std::function<void(const FlatTensor& tensor, float* values)>;
void read_hf_weights(const std::filesystem::path& directory, ParameterSet& parameters, const TensorRead& then = {});
// The same of a model with adapters: all of `frozen`, and into `values` (of the trained parameters' flat layout, on the
// host) those of the trained ones that are the model's own.
void read_hf_base(const std::filesystem::path& directory, ParameterSet& frozen, const ParameterSet& trained,
                  const TensorView& values, const TensorRead& then);

// Single tensors of such a directory, in any order.
class HfTensors {
 public:
  // UserError when one of `wanted` is missing, or when a layer has a tensor that is not among them.
  HfTensors(const std::filesystem::path& directory, const std::vector<FlatTensor>& wanted);
  void read(const FlatTensor& tensor, float* values);
  // What a rank has of it, and nothing else is read.
  void read_part(const FlatTensor& tensor, float* values);
  bool is_bf16(const FlatTensor& tensor);

 private:
  const SafetensorsEntry& entry(const FlatTensor& tensor);

  TensorFiles files_;
};

struct HfWriteOptions {
  DType dtype = DType::f32;  // f32 or bf16
  int64_t max_shard_bytes = 5'000'000'000;
  // Tokenizer, generation and chat-template files are copied from here when set.
  std::filesystem::path copy_from = {};
};

// Writes a directory `transformers` loads unchanged: weights, config.json, copied companion files. `directory` must
// exist; files are written under temporary names, synced and renamed, so that a failure leaves an older model there as
// it was. Weights of an older model under other names are removed at the end.
void write_hf_model(const std::filesystem::path& directory, const ModelConfig& config, const ParameterSet& parameters,
                    const HfWriteOptions& options);
// The same from tensors that may come from elsewhere; each is fetched once, in order.
void write_hf_model(const std::filesystem::path& directory, const ModelConfig& config,
                    std::span<const SafetensorsTensor> tensors, const HfWriteOptions& options);
// What belongs beside weights that are written otherwise: config.json and the companion files.
void write_hf_companions(const std::filesystem::path& directory, const ModelConfig& config,
                         const HfWriteOptions& options);

}  // namespace sb
