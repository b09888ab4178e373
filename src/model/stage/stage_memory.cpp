#include "model/stage/stage_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "model/decoder_layer.h"
#include "ops/cross_entropy.h"
#include "ops/embedding.h"

namespace sb {
namespace {

// The residual stream of so many tokens.
int64_t stream_bytes(const ModelConfig& config, const StageOptions& options, int64_t tokens) {
  return array_bytes(options.token_shares().most(tokens) * config.hidden_size, options.dtype);
}

}  // namespace

int64_t attention_states(const StageOptions& options) {
  if (!options.training) return 1;
  return (options.recompute == Recompute::chunk ? 1 : int64_t{options.slots}) *
         (options.last_layer - options.first_layer);
}

Attention::PieceLimits piece_limits(const ModelConfig& config, const StageOptions& options, int64_t tokens) {
  return {tokens,
          options.max_cut_sequence,
          options.dtype,
          attention_states(options),
          options.first_layer,
          options.last_layer,
          options.first_layer == 0 && options.last_layer == config.layers && options.kept_tokens == 0};
}

int64_t kept_bytes(const ModelConfig& config, const StageOptions& options, int64_t tokens) {
  const int layers = options.last_layer - options.first_layer;
  return LayerInputsPlan{layers, options.offload, stream_bytes(config, options, tokens)}.device_bytes() +
         layers * DecoderLayer::saved_bytes(rank_config(config, options.tensor), options.dtype, tokens,
                                            options.token_shares().most(tokens), kept_at_hand(options.recompute));
}

int64_t slot_bytes(const ModelConfig& config, const StageOptions& options, int64_t tokens) {
  const bool last = options.last_layer == config.layers;
  const int64_t stream = stream_bytes(config, options, tokens);
  int64_t bytes = 0;
  if (options.training && options.recompute != Recompute::chunk) bytes += kept_bytes(config, options, tokens);
  if (options.training || last) bytes += stream;  // the stage's output, or the loss's gradient, or the final hidden
  if (last) bytes += array_bytes(tokens, DType::f32);  // token losses
  return bytes;
}

namespace {

// What the sums below have in common.
struct RankStage {
  const ModelConfig& model;
  const StageOptions& options;
  const Attention& attention;
  int threads;
  ModelConfig config = rank_config(model, options.tensor);  // this rank's share of the model
  AttentionShape shape{config.heads, config.kv_heads, config.head_dim, 1.0f};
  TokenShares shares = options.token_shares();
  int64_t tokens = options.max_micro_batch_tokens;
  int64_t stream = stream_bytes(model, options, tokens);
  int layers = options.last_layer - options.first_layer;
  bool first = options.first_layer == 0, last = options.last_layer == model.layers;
};

int64_t activation_bytes(const RankStage& stage) {
  const StageOptions& options = stage.options;
  // Rounding adds less to a slot than a token takes.
  const int64_t slots = options.kept_tokens == 0 ? options.slots * slot_bytes(stage.model, options, stage.tokens)
                                                 : slot_bytes(stage.model, options, options.kept_tokens) +
                                                       options.slots * slot_bytes(stage.model, options, 1);
  return slots + (options.recompute == Recompute::chunk ? kept_bytes(stage.model, options, stage.tokens) : 0);
}

// The loss has the hidden rows; where ranks share them, those of a piece and their gradient.
int64_t loss_bytes(const RankStage& stage) {
  const StageOptions& options = stage.options;
  if (options.tensor.alone()) return stage.stream + array_bytes(stage.tokens, DType::f32);
  const int64_t rows = stage.shares.padded_piece(stage.tokens);
  return 2 * array_bytes(rows * stage.config.hidden_size, options.dtype) +
         array_bytes(rows / options.tensor.ranks, DType::f32);
}

int64_t workspace_bytes(const RankStage& stage) {
  const StageOptions& options = stage.options;
  const ModelConfig& config = stage.config;
  const int64_t tokens = stage.tokens;
  // Beside what a layer takes in any case.
  int64_t beside_backward =
      DecoderLayer::adapter_bytes(config, options.lora, options.dtype, tokens, options.layer_chunk);
  int64_t beside_forward = beside_backward;
  if (options.fp8_layers() > 0) {
    const bool with_weights = options.layers_with_kept_codes() < options.fp8_layers();
    beside_forward += DecoderLayer::fp8_forward_bytes(config, tokens, options.layer_chunk, with_weights);
    beside_backward += DecoderLayer::fp8_backward_bytes(config, tokens, options.layer_chunk, with_weights);
  }
  const int64_t layer = DecoderLayer::forward_workspace_bytes(config, options.dtype, tokens, stage.shares);
  const int64_t forward = stage.stream + std::max(beside_forward + layer, loss_bytes(stage));
  if (!options.training) return forward;
  // The last stage's gradient lies in its slot.
  return std::max(forward, (stage.last ? 0 : stage.stream) + beside_backward +
                               DecoderLayer::backward_workspace_bytes(config, options.dtype, tokens, stage.shares,
                                                                      kept_at_hand(options.recompute),
                                                                      /*split=*/options.split_backward_tokens > 0));
}

int64_t waiting_bytes(const RankStage& stage) {
  const StageOptions& options = stage.options;
  if (!options.training || options.split_backward_tokens <= 0) return 0;
  return stage.layers * DecoderLayer::waiting_bytes(stage.config, options.dtype, options.split_backward_tokens,
                                                    stage.shares, kept_at_hand(options.recompute), options.fp8);
}

// One operation at a time uses it.
int64_t scratch_bytes(const RankStage& stage) {
  const StageOptions& options = stage.options;
  int64_t bytes = std::max(stage.attention.scratch_bytes(stage.shape, stage.tokens, stage.threads),
                           DecoderLayer::scratch_bytes(stage.config, options.device));
  if (stage.first && options.training) bytes = std::max(bytes, embedding_scratch_bytes(options.device, stage.tokens));
  if (stage.last) {
    const TensorShare largest{options.tensor.ranks, 0};
    bytes = std::max(bytes, loss_scratch_bytes(options.device, options.dtype, largest.size(stage.config.vocab_size),
                                               options.loss_chunk, largest.ranks));
  }
  return bytes;
}

PieceStorePlan piece_store(const RankStage& stage, int64_t packed) {
  const StageOptions& options = stage.options;
  return {.layers = stage.layers,
          .kv_heads = stage.config.kv_heads,
          .head_dim = stage.config.head_dim,
          .tokens = options.kept_tokens == 0 ? options.slots * stage.tokens : options.kept_tokens,
          .longest = options.max_cut_sequence,
          .summed = options.max_cut_tokens > 0 ? options.max_cut_tokens : options.max_cut_sequence,
          .gradients = options.training,
          .dtype = options.dtype,
          .packed = packed};
}

// What sequences in pieces need beyond whole ones.
void add_pieces(const RankStage& stage, StageBytes& bytes) {
  const StageOptions& options = stage.options;
  const PieceBytes more =
      stage.attention.piece_bytes(stage.shape, piece_limits(stage.model, options, stage.tokens), stage.threads);
  bytes.pieces = piece_store(stage, more.page);
  bytes.piece_layer = more.layer;
  bytes.plans += more.reserved;
  bytes.states = std::max(bytes.states, attention_states(options) * more.state);
  bytes.call = std::max(bytes.call, more.call);
  bytes.scratch = std::max(bytes.scratch, more.scratch);
}

// Attention states of slots that share room for options.kept_tokens: lists follow the tokens, but for what every state
// has of a sequence in pieces.
int64_t shared_state_bytes(const RankStage& stage) {
  const StageOptions& options = stage.options;
  const PieceBytes each =
      stage.attention.piece_bytes(stage.shape, piece_limits(stage.model, options, 1), stage.threads);
  return stage.layers * (stage.attention.state_bytes(stage.shape, options.kept_tokens) + options.slots * each.state);
}

}  // namespace

StageBytes::StageBytes(const ModelConfig& model, const StageOptions& options, const ParameterSet& parameters,
                       const ParameterSet& frozen_parameters, const Attention& attention, int threads) {
  const RankStage stage{model, options, attention, threads};
  const int64_t tokens = stage.tokens, attentions = attention_states(options);
  weights = options.with_values ? Arena::rounded(parameters.flat_bytes()) : 0;
  gradients = options.training ? Arena::rounded(parameters.flat_bytes()) : 0;
  rounded_weights = options.dtype == DType::f32 ? 0 : array_bytes(parameters.flat_elements(), options.dtype);
  frozen = array_bytes(frozen_parameters.flat_elements(), options.dtype);
  kept_codes = options.layers_with_kept_codes() * DecoderLayer::kept_codes_bytes(stage.config);
  if (options.training) layer_inputs = {stage.layers, options.offload, stage.stream};
  activations = activation_bytes(stage);
  const int64_t ids = options.lora.dropout > 0 ? 5 : 4;
  inputs = options.device == DeviceKind::cuda ? ids * array_bytes(tokens, DType::i32) : 0;
  states = attentions * attention.state_bytes(stage.shape, tokens);
  plans = attention.reserved_bytes(stage.shape, tokens, options.dtype, attentions);
  call = attention.call_bytes(stage.shape, tokens, threads);
  rope_table = 2 * array_bytes(options.max_sequence_length * (stage.config.head_dim / 2), DType::f32);
  loss_pieces = options.tensor.alone() ? 1 : stage.shares.pieces(tokens);
  workspace = workspace_bytes(stage);
  waiting_gradients = waiting_bytes(stage);
  scratch = scratch_bytes(stage);
  piece_layer = 0;
  if (options.max_cut_sequence > 0) add_pieces(stage, *this);
  if (options.kept_tokens > 0) states = shared_state_bytes(stage);
}

MemoryPlan stage_memory_plan(const StageOptions& options, const StageBytes& bytes) {
  MemoryPlan plan;
  if (bytes.weights > 0) plan.add("weights", bytes.weights);
  if (options.training) plan.add("gradients", bytes.gradients);
  if (bytes.rounded_weights > 0) plan.add("rounded weights", bytes.rounded_weights);
  if (bytes.frozen > 0) plan.add("frozen weights", bytes.frozen);
  if (const int all = options.fp8_layers(), kept = options.layers_with_kept_codes(); all > 0)
    plan.add(kept == all ? "fp8 weights" : fmt::format("fp8 weights, {} of {} layers", kept, all), bytes.kept_codes);
  plan.add("activations", bytes.activations);
  if (bytes.inputs > 0) plan.add("micro-batch ids", options.slots * bytes.inputs);
  const int64_t layers = options.last_layer - options.first_layer;
  plan.add("attention state", bytes.states + bytes.call + layers * bytes.piece_layer);
  if (options.max_cut_sequence > 0) {
    plan.add("keys and values of pieces", layers * bytes.pieces.key_bytes());
    if (bytes.pieces.packed > 0) plan.add("packed keys and values of pieces", layers * bytes.pieces.packed_bytes());
    plan.add("gradient sums of pieces", layers * bytes.pieces.sum_bytes());
  }
  if (bytes.plans > 0) plan.add("attention plans", bytes.plans);
  plan.add("rope table", bytes.rope_table);
  if (bytes.waiting_gradients > 0) plan.add("waiting gradients", bytes.waiting_gradients);
  plan.add("workspace", bytes.workspace);
  plan.add("scratch", bytes.scratch);
  const int64_t on_host = options.slots * bytes.layer_inputs.host_bytes();
  if (options.device == DeviceKind::cuda)
    plan.add_on_host("layer inputs, offloaded", on_host);
  else if (on_host > 0)
    plan.add("layer inputs, offloaded", on_host);
  return plan;
}

}  // namespace sb
