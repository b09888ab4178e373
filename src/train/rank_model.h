#pragma once

#include <memory>
#include <vector>

#include "attention/attention.h"
#include "core/memory_plan.h"
#include "device/exec.h"
#include "model/stage/stage.h"
#include "parallel/gradient_reducer.h"
#include "parallel/grid.h"
#include "parallel/model_layout.h"
#include "parallel/pipeline.h"
#include "parallel/sharded_adamw.h"
#include "parallel/tensor_collector.h"
#include "parallel/tensor_ranks.h"
#include "parallel/tensor_writers.h"
#include "run/checkpoint/checkpoint.h"
#include "run/checkpoint_saver.h"
#include "run/config/run_config.h"

namespace sb {

// What a rank has to know to take its memory; the same on all ranks.
struct RankModelOptions {
  ModelConfig model;
  std::vector<int> first_layers;  // of every stage and, last, the number of layers
  GridShape grid;
  DeviceKind device = DeviceKind::cpu;
  DType dtype = DType::f32;  // of activations
  Recompute recompute = Recompute::attention;
  int64_t max_micro_batch_tokens = 0, max_sequence_length = 0;
  int max_pieces = 1;          // of a sequence; 1: all come whole
  int64_t max_cut_tokens = 0;  // of a sequence in pieces on a rank that shares it; 0: nobody does
  // Of every stage: tokens of all micro-batches in flight, each counted as large as the largest of the step; empty:
  // those of a pipeline whose micro-batches are all as large as they may be.
  std::vector<int64_t> kept_tokens;
  int64_t split_backward_tokens = 0;  // of micro-batches that run backward in two halves on all stages but the first
  int64_t loss_chunk = 1024, layer_chunk = 32768;
  std::vector<int> offload;  // of every stage; empty: nothing
  bool offload_optimizer = false;
  DType moments = DType::f32;  // AdamW's
  int threads = 1;
  bool fp8 = false;
  std::vector<int> fp8_skip;
  std::vector<int> kept_codes;  // layers of every stage that keep their weights' codes; empty: all
  LoraConfig lora;              // with a rank: adapters, and the rest of the model is frozen

  // `tp_rank`: the first one has as much as any other.
  StageOptions stage(int index, int tp_rank = 0) const;
  ModelLayout layout() const;
  TensorWriters writers(const ModelLayout& layout) const;
  ShardedAdamW::Storage optimizer() const { return {offload_optimizer, moments}; }
};

// One rank's share of the model in training: its pipeline stage, its shard of the optimizer and the ways to the other
// ranks. Everything but memory_plan() and stage() is collective.
class RankModel {
 public:
  // `data`: all ranks for memory of their devices; nullptr: the world.
  RankModel(const RankModelOptions& options, Attention& attention, Communicator& world, Communicator* data = nullptr);

  // What a rank of this stage takes.
  static MemoryPlan memory_plan(const RankModelOptions& options, const Attention& attention, int stage);

  Grid& grid() { return grid_; }
  Stage& stage() { return stage_; }

  // Gradients of this rank's micro-batches, the reduction between ranks already under way; they start from zero.
  // `stop` may end it early in a run of one rank. `order`: ahead at most by max_pieces.
  Pipeline::Result forward_backward(const Exec& exec, std::span<const MicroBatch> batches,
                                    const std::function<bool()>& stop, const Pipeline::Order& order = {});
  // Of ranks that share products, the first one has the loss.
  LossSums evaluate(const Exec& exec, const MicroBatch& batch, int slot = 0);
  // Ends the reduction; the norm of the whole gradient.
  double reduce(const Exec& exec);
  // The weights of other replicas may still be on their way; whoever reads some of them waits for these.
  void update(const Exec& exec, const AdamWStep& step);
  void await_weights() { optimizer_.await_weights(); }

  // Until nothing is on its way between ranks any more; throws what failed in the meantime.
  void settle();

  // All tensors that are trained, for writing on rank 0, one at a time; the other ranks serve() them in the same order.
  std::vector<SafetensorsTensor> weights();
  // What this rank writes of a checkpoint.
  OwnTensors own_tensors();
  // Bytes of that, of the rank of a stage that has the most.
  static int64_t most_own_bytes(const RankModelOptions& options, int stage);
  static void serve(std::span<const SafetensorsTensor> tensors);
  TrainState load(const std::filesystem::path& checkpoint);
  // The same without the weights.
  TrainState load_moments(const std::filesystem::path& checkpoint);

 private:
  std::vector<GradientReducer::Shared> shared_gradients();
  TensorCollector::Wanted wanted(const TensorWriters::Item& item, int to);
  void connect_groups(DeviceKind device);

  Grid grid_;
  TensorRanks tensor_ranks_;
  std::unique_ptr<Communicator> key_ranks_;
  std::vector<FlatRange> counted_elsewhere_;  // of the gradient's norm, by another rank that has them, too
  ModelLayout layout_;
  Stage stage_;
  Pipeline pipeline_;
  const ShardLayout& shards_;
  int tied_bucket_;
  GradientReducer reducer_;
  ShardedAdamW optimizer_;
  TensorWriters writers_;
  TensorCollector collector_;
};

}  // namespace sb
