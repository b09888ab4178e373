#include "model/stage/stage_model.h"

#include <algorithm>

#include "core/errors.h"

namespace sb {

StageModel::StageModel(const ModelConfig& config, const StageOptions& options)
    : rank(rank_config(config, options.tensor)) {
  using Kind = StageParameters::Kind;
  const TensorShare& share = options.tensor;
  StageParameters all(parameters, frozen, options.lora, share);
  // A group that is not trained would be empty.
  const auto end_group = [&](const ParameterPlace& of, int64_t at_least = 0) {
    if (of.set == &parameters) parameters.end_group(options.shards, at_least);
  };
  const bool first = options.first_layer == 0, last = options.last_layer == config.layers;
  const int64_t tokens = share.size(config.vocab_size);
  const Shape table{tokens, config.hidden_size};
  const int64_t largest_table = TensorShare{share.ranks, 0}.size(config.vocab_size) * config.hidden_size;
  const auto declare_embedding = [&] {
    return all.declare(Kind::embedding, "embed_tokens.weight", table,
                       {{"model.embed_tokens.weight", 0, tokens, share.rows(config.vocab_size)}});
  };
  if (first) {
    embedding = declare_embedding();
    end_group(embedding, largest_table);
  }
  first_layer_group = static_cast<int>(parameters.groups().size());
  layers.reserve(static_cast<size_t>(options.last_layer - options.first_layer));
  for (int layer = options.first_layer; layer < options.last_layer; ++layer) {
    layers.emplace_back(rank, config, layer, all, options.dtype);
    if (options.uses_fp8(layer)) layers.back().use_fp8();
    parameters.end_group(options.shards);
  }
  if (!last) return;
  final_norm = all.declare(Kind::norm, "norm.weight", {config.hidden_size},
                           {{"model.norm.weight", 0, config.hidden_size, share.whole()}});
  end_group(final_norm);
  if (!config.tie_word_embeddings) {
    head = all.declare(Kind::head, "lm_head.weight", table,
                       {{"lm_head.weight", 0, tokens, share.rows(config.vocab_size)}});
  } else {
    // Tied: one parameter. A last stage without the first layer has its own copy, under the same name.
    head = first ? embedding : declare_embedding();
  }
  if (!first || !config.tie_word_embeddings) end_group(head, largest_table);
}

void check_stage_options(const ModelConfig& config, const StageOptions& options) {
  SB_CHECK(0 <= options.first_layer && options.first_layer < options.last_layer && options.last_layer <= config.layers,
           "layers {} to {} of {}", options.first_layer, options.last_layer, config.layers);
  SB_CHECK(options.max_micro_batch_tokens > 0 && options.max_sequence_length > 0 && options.slots > 0 &&
               options.loss_chunk > 0 && options.layer_chunk > 0,
           "max_micro_batch_tokens {}, max_sequence_length {}, slots {}, loss_chunk {}, layer_chunk {}",
           options.max_micro_batch_tokens, options.max_sequence_length, options.slots, options.loss_chunk,
           options.layer_chunk);
  SB_CHECK(0 <= options.offload && options.offload <= Stage::most_offload(options), "{} layer inputs in host memory",
           options.offload);
  SB_CHECK(options.shards > 0, "{} shards", options.shards);
  SB_CHECK(0 <= options.max_cut_sequence && options.max_cut_sequence <= options.max_sequence_length,
           "sequences of {} tokens in pieces, of {} at all", options.max_cut_sequence, options.max_sequence_length);
  SB_CHECK(options.dtype == DType::f32 || (options.dtype == DType::bf16 && options.device == DeviceKind::cuda),
           "activations in {} on this device", dtype_name(options.dtype));
  SB_CHECK(options.recompute != Recompute::chunk ||
               (options.first_layer == 0 && options.last_layer == config.layers && options.kept_tokens == 0),
           "forwards run again in a stage that holds the whole model, with slots of one size");
  SB_CHECK(options.split_backward_tokens == 0 ||
               (options.training && options.first_layer > 0 && !options.lora.enabled() && options.tensor.alone() &&
                options.split_backward_tokens <= options.max_micro_batch_tokens),
           "backward in two halves of {} tokens: of at most {}, of a stage that trains all of its layers by itself and "
           "is not the first",
           options.split_backward_tokens, options.max_micro_batch_tokens);
  // The codes follow the version of what is trained.
  SB_CHECK(!options.fp8 || !options.lora.enabled(), "fp8 products with adapters");
  SB_CHECK(options.kept_codes <= options.fp8_layers(), "weights of {} layers in fp8 kept, of {}", options.kept_codes,
           options.fp8_layers());
  SB_CHECK(!options.lora.head || !config.tie_word_embeddings, "the head is the embedding and is trained with it");
}

}  // namespace sb
