#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/stage/stage.h"
#include "parallel/shard_layout.h"

namespace sb {

// Where every parameter of the whole model that is trained lies on the grid. A pure function of its arguments: the same
// on all ranks.
class ModelLayout {
 public:
  // Elements of a bucket, at least: large enough that a reduction is not all latency.
  static constexpr int64_t kBucketElements = 4 << 20;

  // `first_layers`: the first layer of every stage and, last, the number of layers. `tp`: ranks that share the tensors
  // of every stage.
  ModelLayout(const ModelConfig& config, std::vector<int> first_layers, int shards,
              int64_t bucket_elements = kBucketElements, const LoraConfig& lora = {}, int tp = 1);

  int stages() const { return static_cast<int>(first_layers_.size()) - 1; }
  int first_layer(int stage) const { return first_layers_[static_cast<size_t>(stage)]; }
  int last_layer(int stage) const { return first_layers_[static_cast<size_t>(stage) + 1]; }
  const ShardLayout& shards(int stage, int tp_rank = 0) const { return place(stage, tp_rank).shards; }
  // The bucket of the tied embedding where first and last stage are two and it is trained; -1 elsewhere.
  int tied_bucket(int stage, int tp_rank = 0) const { return place(stage, tp_rank).tied_bucket; }

  struct Tensor {
    std::string name;
    std::vector<int64_t> shape;
    int stage;
    // Together they are the tensor: each where one rank of those that share the stage has it, in its buffers.
    struct Part {
      int tp_rank;
      FlatTensor flat;
    };
    std::vector<Part> parts;
  };
  // All Hugging Face tensors, each once: of a tied embedding the first stage's copy.
  const std::vector<Tensor>& tensors() const { return tensors_; }

 private:
  // A rank's share of a stage.
  struct Place {
    ShardLayout shards;
    int tied_bucket;
  };
  const Place& place(int stage, int tp_rank) const { return places_[static_cast<size_t>(stage * tp_ + tp_rank)]; }

  std::vector<int> first_layers_;
  int tp_;
  std::vector<Place> places_;
  std::vector<Tensor> tensors_;
};

}  // namespace sb
