#include "train/rank_model.h"

#include <algorithm>
#include <cmath>

#include "run/checkpoint/optimizer_files.h"

namespace sb {

StageOptions RankModelOptions::stage(int index, int tp_rank) const {
  StageOptions options;
  options.device = device;
  options.dtype = dtype;
  options.first_layer = first_layers[static_cast<size_t>(index)];
  options.last_layer = first_layers[static_cast<size_t>(index) + 1];
  options.recompute = recompute;
  options.max_micro_batch_tokens = max_micro_batch_tokens;
  options.max_sequence_length = max_sequence_length;
  options.slots = Pipeline::slots(index, grid.pp, max_pieces);
  if (!kept_tokens.empty()) options.kept_tokens = kept_tokens[static_cast<size_t>(index)];
  if (max_pieces > 1) {
    options.max_cut_sequence = max_sequence_length;
    options.max_cut_tokens = max_cut_tokens;
    if (index > 0) options.split_backward_tokens = split_backward_tokens;
  }
  options.loss_chunk = loss_chunk;
  options.layer_chunk = layer_chunk;
  if (!offload.empty()) options.offload = offload[static_cast<size_t>(index)];
  options.shards = grid.dp * grid.cp;
  options.lora = lora;
  options.tensor = {grid.tp, tp_rank};
  options.fp8 = fp8;
  options.fp8_skip = fp8_skip;
  if (!kept_codes.empty()) options.kept_codes = kept_codes[static_cast<size_t>(index)];
  // The operations read rounded weights: each rank needs the values of its own shard alone.
  options.with_values = dtype == DType::f32 || (options.shards == 1 && !offload_optimizer);
  return options;
}

ModelLayout RankModelOptions::layout() const {
  return ModelLayout(model, first_layers, grid.dp * grid.cp, ModelLayout::kBucketElements, lora, grid.tp);
}

TensorWriters RankModelOptions::writers(const ModelLayout& layout) const {
  return TensorWriters(layout, grid, /*weights_on_first_rank=*/lora.enabled());
}

namespace {

// Most rows of a micro-batch that a rank has between products.
int64_t most_rows(const RankModelOptions& options) {
  return options.stage(0).token_shares().most(options.max_micro_batch_tokens);
}

// Where there are fewer key/value heads than ranks: those that have the same one; nobody otherwise.
std::unique_ptr<Communicator> key_group(const RankModelOptions& options, Communicator& tensor) {
  const int copies = options.grid.tp / options.model.kv_heads;
  return copies > 1 ? tensor.split(tensor.rank() / copies, tensor.rank() % copies, "tp keys") : nullptr;
}

}  // namespace

RankModel::RankModel(const RankModelOptions& options, Attention& attention, Communicator& world, Communicator* data)
    : grid_(world, options.grid, data),
      tensor_ranks_(grid_.tensor()),
      key_ranks_(key_group(options, grid_.tensor())),
      layout_(options.layout()),
      stage_(options.model, options.stage(grid_.stage(), grid_.tp_rank()), attention, options.threads,
             options.grid.tp > 1 ? &tensor_ranks_ : nullptr),
      pipeline_(stage_, grid_.pipeline(), most_rows(options)),
      shards_(layout_.shards(grid_.stage(), grid_.tp_rank())),
      tied_bucket_(layout_.tied_bucket(grid_.stage(), grid_.tp_rank())),
      reducer_(stage_.parameters(), shards_, grid_.replicas(), tied_bucket_ >= 0 ? grid_.ends() : nullptr, tied_bucket_,
               shared_gradients()),
      optimizer_(stage_.parameters(), shards_, grid_.replicas(), options.optimizer()),
      writers_(options.writers(layout_)),
      collector_(grid_, layout_) {
  if (data != nullptr) connect_groups(options.device);
}

// On every rank in the same order.
void RankModel::connect_groups(DeviceKind device) {
  connect_group(grid_.replicas(), device, {.collectives = true});
  connect_group(grid_.pipeline(), device, pipeline_.lines());
  connect_group(grid_.tensor(), device, {.collectives = true});
  if (key_ranks_) connect_group(*key_ranks_, device, {.collectives = true});
  if (tied_bucket_ >= 0 && grid_.ends() != nullptr) connect_group(*grid_.ends(), device, {.collectives = true});
}

std::vector<GradientReducer::Shared> RankModel::shared_gradients() {
  std::vector<GradientReducer::Shared> all;
  for (const SharedElements& shared : stage_.parameters().shared_elements()) {
    Communicator& ranks = shared.copies == grid_.shape().tp ? grid_.tensor() : *key_ranks_;
    all.push_back({{shared.begin, shared.end}, ranks});
    if (shared.copy > 0) counted_elsewhere_.push_back({shared.begin, shared.end});
  }
  return all;
}

MemoryPlan RankModel::memory_plan(const RankModelOptions& options, const Attention& attention, int stage) {
  const StageOptions own = options.stage(stage);
  MemoryPlan plan = Stage::memory_plan(options.model, own, attention, options.threads);
  const ParameterSet parameters = Stage::declare_parameters(options.model, own);
  const int64_t elements = parameters.flat_elements();
  plan.add("optimizer", ShardedAdamW::bytes(elements, own.shards, own.with_values, options.optimizer()));
  if (options.offload_optimizer)
    plan.add_on_host("optimizer, offloaded", HostOptimizerState::host_bytes(elements / own.shards, options.moments));
  std::vector<FlatRange> shared;
  for (const SharedElements& one : parameters.shared_elements()) shared.push_back({one.begin, one.end});
  if (!shared.empty()) plan.add("shared gradients", GradientReducer::bytes(shared));
  if (options.grid.pp > 1)
    plan.add("pipeline buffers", Pipeline::buffer_bytes(stage, options.grid.pp, options.model.hidden_size,
                                                        most_rows(options), options.dtype));
  return plan;
}

Pipeline::Result RankModel::forward_backward(const Exec& exec, std::span<const MicroBatch> batches,
                                             const std::function<bool()>& stop, const Pipeline::Order& order) {
  stage_.parameters().begin_gradients(exec);
  reducer_.start();
  Pipeline::Result result = pipeline_.train(
      exec, batches, order,
      {[this](int group) { reducer_.group_final(group); }, stop, [this] { return optimizer_.take_waits(); }});
  if (grid_.tp_rank() > 0) {
    result.loss = {};
    result.sources.clear();
  }
  return result;
}

LossSums RankModel::evaluate(const Exec& exec, const MicroBatch& batch, int slot) {
  const LossSums loss = pipeline_.evaluate(exec, batch, slot);
  return grid_.tp_rank() > 0 ? LossSums() : loss;
}

double RankModel::reduce(const Exec& exec) {
  reducer_.finish(exec);
  // A tied embedding is on two stages and counts once.
  const bool second_copy = grid_.last_stage() && !grid_.first_stage();
  const double own = optimizer_.squared_norm(exec, second_copy ? tied_bucket_ : -1, counted_elsewhere_);
  return std::sqrt(grid_.world().all_reduce(own));
}

void RankModel::update(const Exec& exec, const AdamWStep& step) {
  optimizer_.update(exec, step);
  // Now, and not in the next micro-batch's forward, whose time is measured.
  stage_.round_weights(exec);
}

void RankModel::settle() {
  optimizer_.await_weights();
  grid_.replicas().barrier();
  grid_.pipeline().barrier();
  grid_.tensor().barrier();
}

// How an item of a checkpoint comes to a rank.
TensorCollector::Wanted RankModel::wanted(const TensorWriters::Item& item, int to) {
  using enum TensorWriters::Kind;
  if (item.kind != weight)
    return {item.tensor, item.kind == first_moment ? optimizer_.first_moment() : optimizer_.second_moment(), true, to};
  const bool sharded = !optimizer_.values().empty();
  return {item.tensor, sharded ? optimizer_.values() : stage_.parameters().values(), sharded, to};
}

std::vector<SafetensorsTensor> RankModel::weights() {
  std::vector<SafetensorsTensor> tensors;
  for (const ModelLayout::Tensor& tensor : layout_.tensors())
    tensors.push_back({tensor.name, tensor.shape, nullptr, [this, &tensor] {
                         const TensorCollector::Wanted one = wanted({&tensor, TensorWriters::Kind::weight}, 0);
                         return collector_.collect({&one, 1});
                       }});
  return tensors;
}

OwnTensors RankModel::own_tensors() {
  using enum TensorWriters::Kind;
  const int rank = grid_.world().rank();
  OwnTensors own;
  for (const auto& [tensor, kind] : writers_.of(rank)) {
    if (kind == weight)
      own.tensors.weights.push_back({tensor->name, tensor->shape});
    else
      own.tensors.moments.push_back(
          {kind == first_moment ? first_moment_name(tensor->name) : second_moment_name(tensor->name), tensor->shape});
  }
  const auto number = [](const TensorWriters::File& file) { return FileNumber{file.number, file.count}; };
  own.tensors.weights_file = number(writers_.weights_file(rank));
  own.tensors.moments_file = number(writers_.moments_file(rank));
  own.rounds = writers_.rounds();
  own.next = [this, round = size_t{0}](float* into) mutable {
    std::vector<TensorCollector::Wanted> all;
    for (int to = 0; to < grid_.world().size(); ++to)
      if (round < writers_.of(to).size()) all.push_back(wanted(writers_.of(to)[round], to));
    ++round;
    return collector_.collect(all, into);
  };
  return own;
}

int64_t RankModel::most_own_bytes(const RankModelOptions& options, int stage) {
  const ModelLayout layout = options.layout();
  const TensorWriters writers = options.writers(layout);
  int64_t most = 0;
  for (int rank = 0; rank < options.grid.ranks(); ++rank)
    if (grid_place(options.grid, rank).stage == stage) most = std::max(most, writers.elements(rank));
  return most * dtype_bytes(DType::f32);
}

void RankModel::serve(std::span<const SafetensorsTensor> tensors) {
  for (const SafetensorsTensor& tensor : tensors) tensor.fetch();
}

TrainState RankModel::load(const std::filesystem::path& checkpoint) {
  return load_checkpoint(checkpoint, stage_.parameters(), shards_, grid_.replicas().rank(), optimizer_.first_moment(),
                         optimizer_.second_moment());
}

TrainState RankModel::load_moments(const std::filesystem::path& checkpoint) {
  return sb::load_moments(checkpoint, stage_.parameters(), shards_, grid_.replicas().rank(), optimizer_.first_moment(),
                          optimizer_.second_moment());
}

}  // namespace sb
