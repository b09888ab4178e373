#pragma once

#include <map>
#include <string>
#include <vector>

#include "model/micro_batch.h"
#include "model/model_config.h"
#include "model/parameters.h"

namespace sb::test {

// The model written straight from its definition, in fp64, one sequence at a time, with Hugging Face's tensors under
// their names: what the engine is compared with where no fixture from outside exists.
class ReferenceModel {
 public:
  ReferenceModel(const ModelConfig& config, const ParameterSet& parameters);

  std::map<std::string, std::vector<double>>& tensors() { return tensors_; }
  // Σ weight · token loss.
  double loss(const MicroBatch& batch) const;
  // [T, V]
  std::vector<double> logits(const MicroBatch& batch) const;

 private:
  using Rows = std::vector<std::vector<double>>;
  const std::vector<double>& tensor(const std::string& name) const { return tensors_.at(name); }
  Rows linear(const Rows& x, const std::string& name) const;  // with the bias if there is one
  void norm(std::vector<double>& row, const std::string& weight) const;
  void rotate(std::vector<double>& head, int64_t position) const;
  Rows attention(const Rows& x, const std::string& layer) const;
  Rows mlp(const Rows& x, const std::string& layer) const;
  Rows sequence_logits(const std::vector<int32_t>& tokens) const;

  ModelConfig config_;
  RopeFrequencies frequencies_;
  std::map<std::string, std::vector<double>> tensors_;
};

}  // namespace sb::test
