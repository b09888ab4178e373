#include "model/stage/stage_memory.h"

#include <fmt/format.h>

#include <algorithm>

#include "model/decoder_layer.h"
#include "ops/cross_entropy.h"
#include "ops/embedding.h"

namespace sb {
namespace {

int64_t array_bytes(int64_t elements, DType dtype) {
  return Arena::rounded(elements * dtype_bytes(dtype));
}

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

StageBytes::StageBytes(const ModelConfig& model, const StageOptions& options, const ParameterSet& parameters,
                       const ParameterSet& frozen_parameters, const Attention& attention, int threads) {
  const int64_t tokens = options.max_micro_batch_tokens;
  const int layers = options.last_layer - options.first_layer;
  const bool first = options.first_layer == 0, last = options.last_layer == model.layers;
  const ModelConfig config = rank_config(model, options.tensor);
  const TokenShares shares = options.token_shares();
  const int64_t stream = stream_bytes(model, options, tokens);
  const AttentionShape shape{config.heads, config.kv_heads, config.head_dim, 1.0f};

  weights = options.with_values ? Arena::rounded(parameters.flat_bytes()) : 0;
  gradients = options.training ? Arena::rounded(parameters.flat_bytes()) : 0;
  rounded_weights = options.dtype == DType::f32 ? 0 : array_bytes(parameters.flat_elements(), options.dtype);
  frozen = array_bytes(frozen_parameters.flat_elements(), options.dtype);
  const int kept = options.layers_with_kept_codes(), fp8_layers = options.fp8_layers();
  kept_codes = kept * DecoderLayer::kept_codes_bytes(config);
  if (options.training) layer_inputs = {layers, options.offload, stream};
  // Rounding adds less to a slot than a token takes.
  activations = options.kept_tokens == 0
                    ? options.slots * slot_bytes(model, options, tokens)
                    : slot_bytes(model, options, options.kept_tokens) + options.slots * slot_bytes(model, options, 1);
  if (options.recompute == Recompute::chunk) activations += kept_bytes(model, options, tokens);
  const int64_t ids = options.lora.dropout > 0 ? 5 : 4;
  inputs = options.device == DeviceKind::cuda ? ids * array_bytes(tokens, DType::i32) : 0;
  states = attention_states(options) * attention.state_bytes(shape, tokens);
  plans = attention.reserved_bytes(shape, tokens, options.dtype, attention_states(options));
  call = attention.call_bytes(shape, tokens, threads);
  rope_table = 2 * array_bytes(options.max_sequence_length * (config.head_dim / 2), DType::f32);
  int64_t besides = DecoderLayer::adapter_bytes(config, options.lora, options.dtype, tokens, options.layer_chunk);
  int64_t beside_forward = besides;
  if (fp8_layers > 0) {
    const bool with_weights = kept < fp8_layers;
    beside_forward += DecoderLayer::fp8_forward_bytes(config, tokens, options.layer_chunk, with_weights);
    besides += DecoderLayer::fp8_backward_bytes(config, tokens, options.layer_chunk, with_weights);
  }
  // The loss has the hidden rows; where ranks share them, those of a piece and their gradient.
  const bool shared = !options.tensor.alone();
  const int64_t gathered = array_bytes(shares.padded_piece(tokens) * config.hidden_size, options.dtype);
  const int64_t loss = shared
                           ? 2 * gathered + array_bytes(shares.padded_piece(tokens) / options.tensor.ranks, DType::f32)
                           : stream + array_bytes(tokens, DType::f32);
  loss_pieces = shared ? shares.pieces(tokens) : 1;
  workspace =
      stream +
      std::max(beside_forward + DecoderLayer::forward_workspace_bytes(config, options.dtype, tokens, shares), loss);
  if (options.training) {
    // The last stage's gradient lies in its slot.
    const Recompute recompute = kept_at_hand(options.recompute);
    const int64_t split = options.split_backward_tokens;
    workspace = std::max(workspace, (last ? 0 : stream) + besides +
                                        DecoderLayer::backward_workspace_bytes(config, options.dtype, tokens, shares,
                                                                               recompute, /*split=*/split > 0));
    if (split > 0)
      waiting_gradients =
          layers * DecoderLayer::waiting_bytes(config, options.dtype, split, shares, recompute, options.fp8);
  }
  scratch =
      std::max(attention.scratch_bytes(shape, tokens, threads), DecoderLayer::scratch_bytes(config, options.device));
  piece_layer = 0;
  if (options.max_cut_sequence > 0) {
    pieces = {.layers = layers,
              .kv_heads = config.kv_heads,
              .head_dim = config.head_dim,
              .tokens = options.kept_tokens == 0 ? options.slots * tokens : options.kept_tokens,
              .longest = options.max_cut_sequence,
              .summed = options.max_cut_tokens > 0 ? options.max_cut_tokens : options.max_cut_sequence,
              .gradients = options.training,
              .dtype = options.dtype};
    const PieceBytes more = attention.piece_bytes(shape, piece_limits(model, options, tokens), threads);
    piece_layer = more.layer;
    pieces.packed = more.page;
    plans += more.reserved;
    states = std::max(states, attention_states(options) * more.state);
    call = std::max(call, more.call);
    scratch = std::max(scratch, more.scratch);
  }
  if (options.kept_tokens > 0) {
    // Lists follow the tokens, but for what every state has of a sequence in pieces.
    const PieceBytes each = attention.piece_bytes(shape, piece_limits(model, options, 1), threads);
    states = layers * (attention.state_bytes(shape, options.kept_tokens) + options.slots * each.state);
  }
  if (first && options.training) scratch = std::max(scratch, embedding_scratch_bytes(options.device, tokens));
  if (last) {
    const TensorShare largest{options.tensor.ranks, 0};
    scratch = std::max(scratch, loss_scratch_bytes(options.device, options.dtype, largest.size(config.vocab_size),
                                                   options.loss_chunk, largest.ranks));
  }
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
