#include "model/stage/stage.h"

#include <algorithm>
#include <cstring>

#include "device/cuda.h"
#include "device/event.h"
#include "device/memory.h"
#include "model/initialization.h"
#include "model/stage/ends.h"
#include "model/stage/slot.h"
#include "model/stage/stage_memory.h"
#include "model/stage/stage_model.h"
#include "model/tensor_parallel/shared_rows.h"
#include "model/waiting/layer_inputs.h"
#include "model/waiting/piece_store.h"
#include "ops/embedding.h"
#include "ops/linear.h"
#include "ops/rmsnorm.h"
#include "ops/rope.h"

namespace sb {

namespace {

PiecePlace place_of(const MicroBatch& piece) {
  return {piece.piece_begin, piece.whole_size(), piece.piece_length, piece.size()};
}

// What the layers keep of a micro-batch between forward and backward.
struct KeptLayers {
  LayerInputs inputs;
  std::vector<LayerSaved> saved;
  std::unique_ptr<Arena> memory;  // of its own; null: the slot's
};

}  // namespace

struct Stage::Implementation {
  ModelConfig config;
  StageOptions options;
  Attention& attention;
  bool first, last;
  SharedRows shared;
  StageModel model;
  StageBytes bytes;
  std::vector<std::unique_ptr<AttentionState>> states;
  std::shared_ptr<void> copies;  // the stream of offloaded layer inputs
  Arena kept_codes;
  int64_t codes_version = -1;  // of the parameters that these codes are of
  Arena activations;
  std::vector<Slot> slots;
  // Of every slot, or (Recompute::chunk) of the slot that ran forward last.
  std::vector<KeptLayers> kept;
  int at_hand = -1;  // that slot
  PieceStore pieces;
  int divided = 0;               // slots that have memory
  int64_t slot_tokens = 0;       // of each, at most
  int64_t activations_used = 0;  // before it was divided anew
  WaitingGradients waiting;
  Arena rope_arena, workspace, scratch;
  TensorView cos, sin;
  StageEnds ends;

  Implementation(const ModelConfig& model_config, const StageOptions& stage_options, Attention& stage_attention,
                 int threads, TensorGroup* group)
      : config(model_config),
        options(stage_options),
        attention(stage_attention),
        first(options.first_layer == 0),
        last(options.last_layer == config.layers),
        shared(group, options.layer_chunk),
        model(config, options),
        bytes(config, options, model.parameters, model.frozen, attention, threads),
        kept_codes(make_arena("fp8 weights", bytes.kept_codes, options.device)),
        activations(make_arena("activations", bytes.activations, options.device)),
        pieces(bytes.pieces, options.device),
        waiting(bytes.waiting_gradients, options.device),
        rope_arena(make_arena("rope table", bytes.rope_table, options.device)),
        workspace(make_arena("workspace", bytes.workspace, options.device)),
        scratch(make_arena("scratch", bytes.scratch, options.device)),
        ends(config, options, model, shared, workspace, bytes.loss_pieces) {
    model.parameters.allocate(options.training, options.device, options.dtype, options.with_values);
    if (options.lora.enabled())
      model.frozen.allocate(/*with_gradients=*/false, options.device, options.dtype, options.dtype == DType::f32);
    int left = options.layers_with_kept_codes();
    for (DecoderLayer& layer : model.layers)
      if (layer.uses_fp8() && left-- > 0) layer.keep_codes(kept_codes);
    make_states();
    const AttentionShape shape{model.rank.heads, model.rank.kv_heads, config.head_dim, 1.0f};
    attention.reserve(shape, options.max_micro_batch_tokens, options.dtype, states);
    if (options.max_cut_sequence > 0)
      attention.reserve_pieces(shape, piece_limits(config, options, options.max_micro_batch_tokens), states);
    if (options.offload > 0 && options.device == DeviceKind::cuda) copies = cuda::make_stream();
    for (int i = 0; i < options.slots; ++i) slots.emplace_back(options, bytes, last);
    for (int i = 0; i < (runs_again() ? 1 : options.slots); ++i)
      kept.push_back({LayerInputs(bytes.layer_inputs, options.device, copies), {}, nullptr});
    if (options.kept_tokens == 0)
      divide(options.slots, options.max_micro_batch_tokens);
    else
      divide(1, std::min(options.max_micro_batch_tokens, options.kept_tokens));
    const Shape table{options.max_sequence_length, config.head_dim / 2};
    cos = rope_arena.allocate(DType::f32, table);
    sin = rope_arena.allocate(DType::f32, table);
    const HostCopy host_cos(cos), host_sin(sin);
    rope_fill_table(rope_frequencies(config.rope, config.head_dim), options.max_sequence_length, host_cos.view(),
                    host_sin.view());
    host_cos.store();
    host_sin.store();
  }

  void divide(int count, int64_t tokens) {
    SB_CHECK(0 < count && count <= options.slots && 0 < tokens && tokens <= options.max_micro_batch_tokens,
             "{} slots of {} tokens, planned for {} of {}", count, tokens, options.slots,
             options.max_micro_batch_tokens);
    SB_CHECK(options.kept_tokens == 0 || count * tokens <= options.kept_tokens,
             "{} slots of {} tokens, planned for {} in all", count, tokens, options.kept_tokens);
    if (count == divided && tokens == slot_tokens) return;
    if (divided > 0) make_states();  // theirs would keep the memory of the largest micro-batches they ever saw
    activations_used = high_water();
    activations.release(0);
    const int64_t each = slot_bytes(config, options, tokens);
    for (int i = 0; i < count; ++i) {
      Slot& slot = slots[static_cast<size_t>(i)];
      SB_CHECK(slot.holds != Slot::Holds::forward, "slot {} still waits for its backward", i);
      slot.holds = Slot::Holds::nothing;
      slot.arena = std::make_unique<Arena>("activations", activations.allocate_bytes(each), each, options.device);
    }
    if (runs_again()) {
      const int64_t own = kept_bytes(config, options, tokens);
      kept[0].memory = std::make_unique<Arena>("activations", activations.allocate_bytes(own), own, options.device);
      at_hand = -1;
    }
    pieces.divide(count, tokens);
    divided = count;
    slot_tokens = tokens;
  }

  void round_weights(const Exec& exec) {
    if (codes_version == model.parameters.version()) return;
    for (const DecoderLayer& layer : model.layers) layer.round_weights(exec);
    codes_version = model.parameters.version();
  }

  void make_states() {
    states.clear();
    for (int64_t i = 0; i < attention_states(options); ++i) states.push_back(attention.make_state());
  }

  int64_t high_water() const {
    int64_t most = 0;
    for (int i = 0; i < divided; ++i) most = std::max(most, slots[static_cast<size_t>(i)].arena->high_water());
    const Arena* own = runs_again() ? kept[0].memory.get() : nullptr;
    return std::max(activations_used, divided * most + (own ? own->high_water() : 0));
  }

  bool runs_again() const { return options.recompute == Recompute::chunk; }
  KeptLayers& kept_of(int slot_index) { return kept[runs_again() ? 0 : static_cast<size_t>(slot_index)]; }

  Exec with_scratch(const Exec& exec) {
    SB_CHECK(exec.device == options.device, "the stage lies on another device");
    Exec own = exec;
    own.scratch = &scratch;
    return own;
  }

  Slot& slot(int index) {
    SB_CHECK(waiting.empty(), "the second half of a backward is still to come");
    SB_CHECK(0 <= index && index < divided, "slot {} of {}", index, divided);
    return slots[static_cast<size_t>(index)];
  }

  AttentionState* state(int slot_index, size_t layer) {
    if (!options.training) return states[0].get();
    return states[(runs_again() ? 0 : static_cast<size_t>(slot_index) * model.layers.size()) + layer].get();
  }

  // Of a piece: its keys and values lie where those after it find them.
  void keep_keys(const MicroBatch& batch, int slot_index, size_t layer, LayerSaved& saved) const {
    if (!batch.is_piece()) return;
    saved.pieces = &pieces.layer(layer);
    saved.k = pieces.own(saved.pieces->k, slot_index);
    saved.v = pieces.own(saved.pieces->v, slot_index);
  }

  LayerRun layer_run(const Exec& exec, const MicroBatch& batch, int slot_index, const DecoderLayer& layer) {
    const Slot& slot = slots[static_cast<size_t>(slot_index)];
    PackedSequences sequences{batch.cu_seqlens, {}, batch.whole_cu_seqlens};
    if (batch.is_piece()) sequences.piece = pieces.seen(slot_index);
    if (!batch.budgets.empty()) {
      const auto count = static_cast<size_t>(batch.sequences());
      sequences.budgets = std::span(batch.budgets).subspan(static_cast<size_t>(layer.index()) * count, count);
    }
    return {exec, workspace, attention, sequences, slot.ids.positions, cos, sin, shared, options.layer_chunk};
  }

  // The same in training, where adapters drop elements of their input.
  LayerRun training_run(const Exec& exec, const MicroBatch& batch, int slot_index, const DecoderLayer& layer) {
    LayerRun run = layer_run(exec, batch, slot_index, layer);
    const Slot& slot = slots[static_cast<size_t>(slot_index)];
    if (options.lora.dropout > 0)
      run.dropout = {options.lora.dropout, batch.dropout_key, 0, slot.ids.sequences, slot.ids.positions};
    return run;
  }

  // Everything the operations rely on without looking.
  void check_batch(const MicroBatch& batch, const TensorView& input) const {
    const int64_t tokens = batch.size();
    // A rank that shares short sequences with others may have none of their tokens.
    SB_CHECK((0 < tokens || !batch.whole_cu_seqlens.empty()) && tokens <= slot_tokens,
             "a micro-batch of {} tokens, planned for {}", tokens, slot_tokens);
    SB_CHECK(std::ssize(batch.positions) == tokens, "{} positions for {} tokens", batch.positions.size(), tokens);
    SB_CHECK(batch.sequences() >= 1 && batch.cu_seqlens.front() == 0 && batch.cu_seqlens.back() == tokens &&
                 std::is_sorted(batch.cu_seqlens.begin(), batch.cu_seqlens.end()),
             "cu_seqlens do not cover the {} tokens", tokens);
    for (const int32_t position : batch.positions) {
      SB_CHECK(0 <= position && position < options.max_sequence_length, "position {}, planned for {}", position,
               options.max_sequence_length);
    }
    SB_CHECK(!batch.is_piece() || (options.max_cut_sequence > 0 && batch.sequences() == 1 &&
                                   (!batch.whole_cu_seqlens.empty() || batch.positions.front() == batch.piece_begin)),
             "a piece from token {} of {} on, in a stage for sequences of {} in pieces", batch.piece_begin,
             batch.piece_length, options.max_cut_sequence);
    SB_CHECK(batch.budgets.empty() || std::ssize(batch.budgets) == int64_t{config.layers} * batch.sequences(),
             "{} budgets for {} layers and {} sequences", batch.budgets.size(), config.layers, batch.sequences());
    if (first) {
      for (const int32_t token : batch.tokens) {
        SB_CHECK(0 <= token && token < config.vocab_size, "token {} in a vocabulary of {}", token, config.vocab_size);
      }
    } else {
      const Shape expected{options.token_shares().own(tokens), config.hidden_size};
      SB_CHECK(input.shape() == expected, "stage input {}, expected {}", input.shape().to_string(),
               expected.to_string());
    }
    if (last) {
      SB_CHECK(std::ssize(batch.labels) == tokens && std::ssize(batch.weights) == tokens,
               "{} labels and {} weights for {} tokens", batch.labels.size(), batch.weights.size(), tokens);
      for (const int32_t label : batch.labels) {
        SB_CHECK(label == kIgnoredLabel || (0 <= label && label < config.vocab_size), "label {} in a vocabulary of {}",
                 label, config.vocab_size);
      }
    }
  }

  void start_of_stream(const Exec& exec, const Slot& slot, TensorView input, TensorView x) {
    if (first)
      ends.embed(exec, slot, x);
    else
      copy_tensor(exec, input, x);
  }

  // All layers of a micro-batch forward, with what backward needs; `stream` gets the last one's output. `again`: it ran
  // before, and something else has run since.
  void run_layers(const Exec& exec, const MicroBatch& batch, int slot_index, TensorView input, TensorView stream,
                  bool again) {
    Slot& own = slot(slot_index);
    KeptLayers& to = kept_of(slot_index);
    Arena& memory = to.memory ? *to.memory : *own.arena;
    if (to.memory) memory.release(0);
    to.saved.clear();
    to.inputs.begin(memory, options.dtype, {own.rows, config.hidden_size});
    const size_t layers = model.layers.size();
    for (size_t i = 0; i < layers; ++i) {
      to.saved.push_back(model.layers[i].allocate_saved(memory, own.tokens, own.rows, kept_at_hand(options.recompute)));
      to.saved[i].x = to.inputs.input(static_cast<int>(i));
      to.saved[i].state = state(slot_index, i);
      keep_keys(batch, slot_index, i, to.saved[i]);
    }
    to.inputs.before_write(exec, 0);
    start_of_stream(exec, own, input, to.saved[0].x);
    for (size_t i = 0; i < layers; ++i) {
      const int layer = static_cast<int>(i);
      to.inputs.written(exec, layer);
      if (i + 1 < layers) to.inputs.before_write(exec, layer + 1);
      LayerRun run = training_run(exec, batch, slot_index, model.layers[i]);
      run.sequences.again = again;
      model.layers[i].forward(run, to.saved[i], i + 1 < layers ? to.saved[i + 1].x : stream);
    }
    at_hand = slot_index;
  }

  // Tells that nothing changes the gradients of groups `end` - 1 down to `begin` in this backward any more.
  void finish_groups(const Exec& exec, int begin, int end, const GradientsFinal& gradients_final) {
    while (end > begin) {
      model.parameters.complete_gradients(exec, --end);
      if (gradients_final) gradients_final(end);
    }
  }

  // Backward without the weights' gradients of the layers' products where these wait.
  TensorView backward(const Exec& exec, const MicroBatch& batch, int slot_index, TensorView output_gradient,
                      const GradientsFinal& gradients_final, WaitingGradients* later);

  // Before backward: what its forward kept, where something else has taken the place of that.
  void bring_back(const Exec& exec, const MicroBatch& batch, int slot_index) {
    if (!runs_again() || at_hand == slot_index) return;
    ArenaScope scope(workspace);
    run_layers(exec, batch, slot_index, {},
               workspace.allocate(options.dtype, {shared.shares().own(batch.size()), config.hidden_size}),
               /*again=*/true);
  }
};

Stage::Stage(const ModelConfig& config, const StageOptions& options, Attention& attention, int threads,
             TensorGroup* group) {
  check_stage_options(config, options);
  const TensorShare share = group ? group->share() : TensorShare();
  SB_CHECK(share.ranks == options.tensor.ranks && share.rank == options.tensor.rank,
           "rank {} of {} that share products, planned for {} of {}", share.rank, share.ranks, options.tensor.rank,
           options.tensor.ranks);
  implementation_ = std::make_unique<Implementation>(config, options, attention, threads, group);
}

Stage::~Stage() = default;

ParameterSet Stage::declare_parameters(const ModelConfig& config, const StageOptions& options) {
  return std::move(StageModel(config, options).parameters);
}

MemoryPlan Stage::memory_plan(const ModelConfig& config, const StageOptions& options, const Attention& attention,
                              int threads) {
  check_stage_options(config, options);
  const StageModel model(config, options);
  return stage_memory_plan(options, StageBytes(config, options, model.parameters, model.frozen, attention, threads));
}

int Stage::most_offload(const StageOptions& options) {
  // Where forwards run again, the inputs are there of one micro-batch only.
  if (!options.training || options.recompute == Recompute::chunk) return 0;
  return LayerInputsPlan::most_on_host(options.last_layer - options.first_layer);
}

int Stage::least_offload(const StageOptions& options, int64_t limit,
                         const std::function<MemoryPlan(int offload)>& plan) {
  int offload = 0;
  while (limit > 0 && offload < most_offload(options) && plan(offload).total() > limit) ++offload;
  return offload;
}

int Stage::most_kept_codes(const StageOptions& options, int64_t limit,
                           const std::function<MemoryPlan(int kept_codes)>& plan) {
  int kept = options.fp8_layers();
  while (limit > 0 && kept > 0 && plan(kept).total() > limit) --kept;
  return kept;
}

MemoryPlan Stage::memory_used() const {
  const Implementation& s = *implementation_;
  StageBytes used = s.bytes;
  used.kept_codes = s.kept_codes.high_water();
  used.activations = s.high_water();
  used.rope_table = s.rope_arena.high_water();
  used.waiting_gradients = s.waiting.memory().high_water();
  used.workspace = s.workspace.high_water();
  used.scratch = s.scratch.high_water();
  return stage_memory_plan(s.options, used);
}

bool Stage::first() const {
  return implementation_->first;
}

bool Stage::last() const {
  return implementation_->last;
}

ParameterSet& Stage::parameters() {
  return implementation_->model.parameters;
}

ParameterSet& Stage::frozen_parameters() {
  return implementation_->model.frozen;
}

const ModelConfig& Stage::config() const {
  return implementation_->config;
}

const StageOptions& Stage::options() const {
  return implementation_->options;
}

void Stage::divide(int slots, int64_t tokens) {
  implementation_->divide(slots, tokens);
}

void Stage::initialize(uint64_t seed) {
  Implementation& s = *implementation_;
  initialize_parameters(s.model.parameters, s.config.initializer_range, seed);
  if (s.options.lora.enabled()) initialize_parameters(s.model.frozen, s.config.initializer_range, seed);
}

void Stage::round_weights(const Exec& exec) {
  implementation_->round_weights(exec);
}

TensorView Stage::forward(const Exec& caller, const MicroBatch& batch, int slot_index, TensorView input) {
  Implementation& s = *implementation_;
  if (!s.options.training) return evaluate(caller, batch, slot_index, input);
  s.check_batch(batch, input);
  Slot& slot = s.slot(slot_index);
  SB_CHECK(slot.holds != Slot::Holds::forward, "slot {} still waits for its backward", slot_index);
  const Exec exec = s.with_scratch(caller);

  s.round_weights(exec);
  slot.begin(exec, s.options, batch, s.last, s.config.hidden_size);
  if (batch.is_piece()) s.pieces.begin_forward(place_of(batch), slot_index);
  ArenaScope scope(s.workspace);
  const TensorView stream =
      s.last ? s.workspace.allocate(s.options.dtype, {slot.rows, s.config.hidden_size}) : slot.end;
  s.run_layers(exec, batch, slot_index, input, stream, /*again=*/false);
  slot.holds = Slot::Holds::forward;
  if (!s.last) return slot.end;
  s.ends.loss_with_gradient(exec, batch, slot, stream);
  return {};
}

TensorView Stage::evaluate(const Exec& caller, const MicroBatch& batch, int slot_index, TensorView input) {
  Implementation& s = *implementation_;
  s.check_batch(batch, input);
  Slot& slot = s.slot(slot_index);
  SB_CHECK(slot.holds != Slot::Holds::forward, "slot {} still waits for its backward", slot_index);
  const Exec exec = s.with_scratch(caller);

  s.round_weights(exec);
  slot.begin(exec, s.options, batch, s.last, s.config.hidden_size);
  s.at_hand = -1;
  if (batch.is_piece()) s.pieces.begin_forward(place_of(batch), slot_index);
  ArenaScope scope(s.workspace);
  LayerSaved saved;
  saved.x = s.workspace.allocate(s.options.dtype, {slot.rows, s.config.hidden_size});
  s.start_of_stream(exec, slot, input, saved.x);
  for (size_t i = 0; i < s.model.layers.size(); ++i) {
    saved.state = s.state(slot_index, i);
    s.keep_keys(batch, slot_index, i, saved);
    s.model.layers[i].forward(s.layer_run(exec, batch, slot_index, s.model.layers[i]), saved, saved.x);
  }
  slot.holds = Slot::Holds::evaluation;
  if (!s.last) return saved.x;
  s.ends.loss_only(exec, batch, slot, saved.x);
  return {};
}

TensorView Stage::Implementation::backward(const Exec& exec, const MicroBatch& batch, int slot_index,
                                           TensorView output_gradient, const GradientsFinal& gradients_final,
                                           WaitingGradients* later) {
  Slot& own = slot(slot_index);
  SB_CHECK(own.holds == Slot::Holds::forward && own.tokens == batch.size(),
           "backward of slot {}, which holds no forward of this micro-batch", slot_index);
  SB_CHECK(codes_version == model.parameters.version(), "the weights changed between a forward and its backward");
  if (batch.is_piece()) pieces.begin_backward(exec, place_of(batch), slot_index);
  bring_back(exec, batch, slot_index);
  KeptLayers& from = kept_of(slot_index);

  ArenaScope scope(workspace);
  TensorView gradient = own.end;
  if (!last) {
    gradient = workspace.allocate(options.dtype, {own.rows, config.hidden_size});
    copy_tensor(exec, output_gradient, gradient);
  }
  // The gradients of norm and head come with the loss, in forward.
  const int first_group = model.first_layer_group;
  finish_groups(exec, first_group + static_cast<int>(model.layers.size()),
                static_cast<int>(model.parameters.groups().size()), gradients_final);
  for (int i = static_cast<int>(model.layers.size()) - 1; i >= 0; --i) {
    const auto at = static_cast<size_t>(i);
    from.inputs.before_read(exec, i);
    LayerRun run = training_run(exec, batch, slot_index, model.layers[at]);
    run.waiting = later;
    model.layers[at].backward(run, from.saved[at], gradient);
    from.inputs.done(exec, i);
    if (later)
      later->end_layer();
    else
      finish_groups(exec, first_group + i, first_group + i + 1, gradients_final);
  }
  own.holds = Slot::Holds::nothing;
  if (!first) return gradient;
  if (model.embedding.trained()) ends.embedding_gradients(exec, own, gradient);
  finish_groups(exec, 0, first_group, gradients_final);
  return {};
}

TensorView Stage::backward(const Exec& exec, const MicroBatch& batch, int slot, TensorView output_gradient,
                           const GradientsFinal& gradients_final) {
  Implementation& s = *implementation_;
  return s.backward(s.with_scratch(exec), batch, slot, output_gradient, gradients_final, nullptr);
}

TensorView Stage::backward_input(const Exec& exec, const MicroBatch& batch, int slot, TensorView output_gradient,
                                 const GradientsFinal& gradients_final) {
  Implementation& s = *implementation_;
  SB_CHECK(batch.size() <= s.options.split_backward_tokens, "backward in two halves of {} tokens, planned for {}",
           batch.size(), s.options.split_backward_tokens);
  return s.backward(s.with_scratch(exec), batch, slot, output_gradient, gradients_final, &s.waiting);
}

void Stage::backward_weights(const Exec& caller, const MicroBatch& batch, int slot,
                             const GradientsFinal& gradients_final) {
  Implementation& s = *implementation_;
  const Exec exec = s.with_scratch(caller);
  for (int i = static_cast<int>(s.model.layers.size()) - 1; i >= 0; --i) {
    s.waiting.compute_layer(s.training_run(exec, batch, slot, s.model.layers[static_cast<size_t>(i)]));
    s.finish_groups(exec, s.model.first_layer_group + i, s.model.first_layer_group + i + 1, gradients_final);
  }
}

LossSums Stage::loss(int slot) const {
  SB_CHECK(implementation_->last, "only the last stage has a loss");
  const Slot& own = implementation_->slot(slot);
  own.loss_ready.wait();
  LossSums sums;
  for (int64_t i = 0; i < implementation_->bytes.loss_pieces; ++i) sums += *own.loss(i);
  return sums;
}

TensorView Stage::token_loss(int slot) const {
  SB_CHECK(implementation_->last, "only the last stage has token losses");
  return implementation_->slot(slot).token_loss;
}

std::span<const float> Stage::host_token_loss(int slot) const {
  SB_CHECK(implementation_->last, "only the last stage has token losses");
  const Slot& own = implementation_->slot(slot);
  const float* losses = implementation_->options.device == DeviceKind::cpu
                            ? own.token_loss.f32()
                            : static_cast<const float*>(own.token_loss_memory.data());
  return {losses, static_cast<size_t>(own.tokens)};
}

void Stage::logits(const Exec& caller, int slot_index, int64_t row_begin, int64_t row_end, TensorView logits) const {
  Implementation& s = *implementation_;
  const Slot& slot = s.slot(slot_index);
  SB_CHECK(s.last && slot.holds == Slot::Holds::evaluation && !s.shared.shared(),
           "logits of slot {} without evaluate(), or of a part of the vocabulary", slot_index);
  linear_forward(s.with_scratch(caller), slot.end.rows(row_begin, row_end), s.model.head.weight(), {}, logits);
}

}  // namespace sb
