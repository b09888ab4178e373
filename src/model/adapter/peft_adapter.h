#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "core/thread_pool.h"
#include "model/adapter/peft_config.h"
#include "model/parameters.h"
#include "model/tensors/safetensors.h"

namespace sb {

// The tensors that training with these adapters changes, of the whole model, by PEFT's names.
std::vector<FlatTensor> adapter_tensors(const ModelConfig& model, const LoraConfig& lora);

// A PEFT directory for a model: adapter_config.json and adapter_model.safetensors. Every tensor of the file is known to
// have a place, and the right shape, in this model.
class PeftAdapter {
 public:
  // Reads the configuration; with `expected` it is known already, as of our own checkpoints.
  PeftAdapter(const std::filesystem::path& directory, const ModelConfig& model);
  PeftAdapter(const std::filesystem::path& directory, const ModelConfig& model, const LoraConfig& expected);

  const LoraConfig& config() const { return lora_; }
  // Fills a stage's trained parameters, as fp32 values of the flat layout on the host.
  void read(const ParameterSet& parameters, const TensorView& values) const;
  // Puts the adapter into a tensor of the model: W + scale · B·A where it has an adapter, what was trained in its place
  // where it was trained along, nothing otherwise. Computed in fp32.
  void merge(ThreadPool& pool, const std::string& name, const std::vector<int64_t>& shape, float* values) const;

 private:
  void check_tensors(const ModelConfig& model) const;
  const SafetensorsEntry& entry(const std::string& name) const;

  LoraConfig lora_;
  SafetensorsFile file_;
};

// Writes such a directory's two files. `tensors` are those of adapter_tensors(), which may be fetched.
void write_peft_adapter(const std::filesystem::path& directory, const LoraConfig& lora, const ModelConfig& model,
                        const std::string& base, std::span<const SafetensorsTensor> tensors);

}  // namespace sb
