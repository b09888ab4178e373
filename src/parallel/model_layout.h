#pragma once

#include <cstdint>
#include <vector>

#include "model/stage.h"
#include "parallel/shard_layout.h"

namespace sb {

// Where every parameter of the whole model that is trained lies on the grid. A pure function of its arguments: the same
// on all ranks.
class ModelLayout {
 public:
  // Elements of a bucket, at least: large enough that a reduction is not all latency.
  static constexpr int64_t kBucketElements = 4 << 20;

  // `first_layers`: the first layer of every stage and, last, the number of layers.
  ModelLayout(const ModelConfig& config, std::vector<int> first_layers, int shards,
              int64_t bucket_elements = kBucketElements, const LoraConfig& lora = {});

  int stages() const { return static_cast<int>(first_layers_.size()) - 1; }
  int first_layer(int stage) const { return first_layers_[static_cast<size_t>(stage)]; }
  int last_layer(int stage) const { return first_layers_[static_cast<size_t>(stage) + 1]; }
  const ShardLayout& shards(int stage) const { return shards_[static_cast<size_t>(stage)]; }
  // The bucket of the tied embedding where first and last stage are two and it is trained; -1 elsewhere.
  int tied_bucket(int stage) const { return tied_buckets_[static_cast<size_t>(stage)]; }
  int64_t flat_elements(int stage) const { return shards(stage).shard_elements() * shards(stage).shards(); }

  struct Tensor {
    FlatTensor flat;  // in the stage's buffers
    int stage;
  };
  // All Hugging Face tensors, each once: of a tied embedding the first stage's copy.
  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<int> first_layers_;
  std::vector<ShardLayout> shards_;
  std::vector<int> tied_buckets_;
  std::vector<Tensor> tensors_;
};

}  // namespace sb
