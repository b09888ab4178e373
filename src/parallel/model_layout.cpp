#include "parallel/model_layout.h"

#include <utility>

namespace sb {

ModelLayout::ModelLayout(const ModelConfig& config, std::vector<int> first_layers, int shards, int64_t bucket_elements,
                         const LoraConfig& lora)
    : first_layers_(std::move(first_layers)) {
  SB_CHECK(stages() > 0 && first_layers_.front() == 0 && first_layers_.back() == config.layers, "{} stages", stages());
  for (int stage = 0; stage < stages(); ++stage) {
    StageOptions options;
    options.first_layer = first_layer(stage);
    options.last_layer = last_layer(stage);
    options.shards = shards;
    options.lora = lora;
    const ParameterSet parameters = Stage::declare_parameters(config, options);
    const bool two_copies = stages() > 1 && config.tie_word_embeddings && (!lora.enabled() || lora.embedding);
    const bool first_copy = two_copies && stage == 0, second_copy = two_copies && stage == stages() - 1;
    const auto groups = static_cast<int>(parameters.groups().size());
    const int tied_group = first_copy ? 0 : second_copy ? groups - 1 : -1;
    shards_.emplace_back(parameters, shards, bucket_elements, tied_group);
    tied_buckets_.push_back(tied_group < 0 ? -1 : shards_.back().bucket_of_group(tied_group));
    for (FlatTensor& tensor : parameters.flat_tensors()) {
      const bool counted_before = second_copy && tensor.begin >= parameters.groups().back().begin;
      if (!counted_before) tensors_.push_back({std::move(tensor), stage});
    }
  }
}

}  // namespace sb
