#include "parallel/model_layout.h"

#include <utility>

namespace sb {

ModelLayout::ModelLayout(const ModelConfig& config, std::vector<int> first_layers, int shards, int64_t bucket_elements,
                         const LoraConfig& lora, int tp)
    : first_layers_(std::move(first_layers)), tp_(tp) {
  SB_CHECK(stages() > 0 && first_layers_.front() == 0 && first_layers_.back() == config.layers, "{} stages", stages());
  const bool two_copies = stages() > 1 && config.tie_word_embeddings && (!lora.enabled() || lora.embedding);
  for (int stage = 0; stage < stages(); ++stage) {
    const size_t first_tensor = tensors_.size();
    for (int tp_rank = 0; tp_rank < tp; ++tp_rank) {
      StageOptions options;
      options.first_layer = first_layer(stage);
      options.last_layer = last_layer(stage);
      options.shards = shards;
      options.lora = lora;
      options.tensor = {tp, tp_rank};
      const ParameterSet parameters = Stage::declare_parameters(config, options);
      const bool first_copy = two_copies && stage == 0, second_copy = two_copies && stage == stages() - 1;
      const auto groups = static_cast<int>(parameters.groups().size());
      const int tied_group = first_copy ? 0 : second_copy ? groups - 1 : -1;
      const ShardLayout layout(parameters, shards, bucket_elements, tied_group);
      // What they have alike is added piece by piece (GradientReducer).
      SB_CHECK(tp_rank == 0 || layout == place(stage, 0).shards, "stage {} is cut otherwise on tensor-parallel rank {}",
               stage, tp_rank);
      places_.push_back({layout, tied_group < 0 ? -1 : layout.bucket_of_group(tied_group)});
      size_t next = first_tensor;
      for (FlatTensor& tensor : parameters.flat_tensors()) {
        if (second_copy && tensor.begin >= parameters.groups().back().begin) continue;  // counted before
        if (tp_rank == 0) tensors_.push_back({tensor.name, tensor.shape, stage, {}});
        Tensor& whole = tensors_[next++];
        if (tensor.cut.copy == 0) whole.parts.push_back({tp_rank, std::move(tensor)});
      }
    }
  }
}

}  // namespace sb
