#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/cpu/sparse_attention.h"
#include "comm/communicator.h"
#include "core/memory_plan.h"
#include "core/thread_pool.h"
#include "data/sequence_source.h"
#include "device/context.h"
#include "model/stage/stage.h"
#include "plan/planner/step_planner.h"
#include "run/checkpoint/checkpoint.h"
#include "run/checkpoint_saver.h"
#include "run/config/run_config.h"
#include "run/logs/console.h"
#include "run/logs/run_log.h"
#include "run/logs/step_ticker.h"
#include "run/logs/trace.h"
#include "run/run_directory.h"
#include "run/time_left.h"
#include "train/packing.h"
#include "train/rank_device.h"
#include "train/rank_model.h"

namespace sb {

class IndexDump;

// Fixed sequences on which the model is measured now and then: the first `sequences` of the source.
struct ValidationSet {
  const SequenceSource* source = nullptr;  // none: no validation
  int64_t sequences = 0;
  int64_t recall_chunk = 0;  // chunk recall: tokens per chunk; also measure the third and later ones. 0: another task
};

// What a run is made of besides its configuration. All of it outlives the trainer.
struct TrainerParts {
  ModelConfig model;
  Attention& attention;
  SequenceSource& source;
  ValidationSet validation;
  Console& console;                      // rank 0's is used
  std::function<bool()> stop_requested;  // one rank: asked between micro-batches; several: between steps
  // `attention`, where it is sparse: its selections are reported and what it learns is saved.
  SelectingAttention* sparse = nullptr;
  // All ranks of the run; nullptr: this one alone.
  Communicator* world = nullptr;
  int cores = available_cores();   // this rank's share
  StepPlanner* planner = nullptr;  // rank 0's; nullptr: as the configuration says
  std::vector<int> offload = {};   // layer inputs of every stage in host memory (Trainer::offload); empty: none
  // Layers of every stage that keep the fp8 codes of their weights (Trainer::kept_codes); empty: all.
  std::vector<int> kept_codes = {};
  // Several ranks on GPUs: where this one computes and how its data gets to the others.
  RankDevice* device = nullptr;
  IndexDump* dump = nullptr;  // `attention`, where lists of a step are saved
  // Of the ranks of every stage: host memory for a copy of what they write of a checkpoint while all go on training
  // (Trainer::checkpoint_copies). Empty: they wait for the write.
  std::vector<int64_t> checkpoint_copies = {};
};

// What balancing did in the steps of a process: means of what the step line shows.
struct BalanceSummary {
  int64_t steps = 0;
  double rank_imbalance = 0, bubble_percent = 0, gain = 0;
  double cluster_seconds = 0;  // of all steps, predicted, where a cluster is rehearsed
  // Of the steps that balance.compare_steps compared, in seconds.
  int64_t compared = 0;
  double in_order = 0, balanced = 0;
  void add(const StepReport& report);
};

struct TrainSummary {
  int64_t steps = 0;  // done in all
  bool interrupted = false;
  double loss = 0;  // of the last step of this process; 0 when it had none
  int64_t tokens = 0;
  double seconds = 0;  // in steps, of this process
  double saving = 0;   // for checkpoints, of this process
  int64_t skipped = 0;
  BalanceSummary balance;
  std::optional<ValidationReport> first_validation, last_validation;
  std::filesystem::path checkpoint;   // the newest; empty: none
  std::filesystem::path final_model;  // empty: interrupted before the end
  std::filesystem::path merged;       // the same with the adapter in its weights; empty: not written
  std::filesystem::path trace;        // of this process; empty: none, or on a rank that does not write it
};

// Worker threads of a rank.
int thread_count(const RunConfig& config, int cores);

// The global batch of a step, as a planner is told of it, seen from the state after an earlier one.
std::vector<Sequence> step_batch(const RunConfig& config, const SequenceSource& source, const TrainState& state,
                                 int64_t step);

// The training loop, as every rank of a run goes through it. Rank 0 plans, writes and speaks for all.
class Trainer {
 public:
  // Takes all memory, loads or initialises the model and, when the directory says so, resumes.
  Trainer(const RunConfig& config, TrainerParts parts, RunDirectory& directory);

  // Trains to train.max_steps, or until asked to stop: then saves and returns.
  TrainSummary run();

  // Of every micro-batch, training and validation.
  static PackingLimits packing(const RunConfig& config, const TrainerParts& parts);
  // What the constructor takes on a rank of this stage.
  static MemoryPlan memory_plan(const RunConfig& config, const TrainerParts& parts, int stage = 0);
  // How many layer inputs of every stage go to host memory, as train.offload says, on a device with `memory` bytes (0:
  // unknown).
  static std::vector<int> offload(const RunConfig& config, TrainerParts parts, int64_t memory);
  // How many layers of every stage keep the fp8 codes of their weights there: as many as have room beside all else.
  static std::vector<int> kept_codes(const RunConfig& config, TrainerParts parts, int64_t memory);
  static std::vector<int64_t> checkpoint_copies(const RunConfig& config, const TrainerParts& parts);

  // One optimizer step; false: asked to stop, or without a plan; nothing has changed.
  bool step();

  Stage& stage() { return model_->stage(); }
  const Exec& exec() const { return exec_; }
  const TrainState& state() const { return state_; }
  const StepReport& last_step() const { return report_; }

 private:
  struct StepPlan {
    Plan plan;
    std::vector<int64_t> lengths;           // of the global batch
    std::vector<MicroBatch> micro_batches;  // of this rank, in the order they run
    Pipeline::Order order;
    int64_t tokens() const;  // of the global batch
  };

  bool leads() const { return world_->rank() == 0; }
  bool stop_agreed();
  void load_start_of_run();
  StepPlan receive_plan();
  StepPlan read_step(Plan plan);
  void start_together();
  StepPlan plan_in_order();
  std::chrono::nanoseconds time_in_order(const StepPlan& plan, int64_t step);
  void announce_steps();
  std::vector<MicroBatch> read_micro_batches(const PlannedRank& planned, std::span<const float> weights) const;
  MicroBatch read_micro_batch(const PlannedMicroBatch& planned, std::span<const float> weights) const;
  MicroBatch own_part(MicroBatch batch) const;
  std::optional<LossSums> forward_backward(const StepPlan& plan);
  double reduce_gradients();
  void update(double grad_norm);
  void skip_update();
  [[noreturn]] void give_up() const;
  std::string last_good_checkpoint() const;
  void learn(const StepPlan& plan, const LossSums& sums, SelectionObservations observed, int64_t step_ns);
  void learn_selection(SelectionObservations observed);
  void use_selection();
  void log_step(const StepPlan& plan, const LossSums& sums, double grad_norm, bool skipped, double seconds);
  void flush_trace();

  bool validation_due() const;
  std::optional<ValidationReport> validate();
  std::optional<LossSums> evaluate(bool later_chunk_tokens_only);
  void first_look();
  // A forward of some sequences of a source, each through `prepare` first.
  struct Look {
    const SequenceSource& source;
    std::vector<int64_t> positions, lengths;
    std::function<void(TokenSequence&)> prepare;
    bool dense = false;         // whatever the pattern
    bool interruptible = true;  // asks whether to stop; then there is no result
  };
  std::optional<LossSums> forward(const Look& look);
  LossSums evaluate_whole(MicroBatch batch);
  void save();
  void write_final_model(TrainSummary& summary);

  RunConfig config_;
  TrainerParts parts_;
  RunDirectory& directory_;
  PackingLimits limits_;
  std::unique_ptr<Communicator> alone_;
  Communicator* world_;
  // Where the parts bring no device.
  struct OwnDevice {
    ThreadPool pool;
    DeviceContext context;
    OwnDevice(DeviceKind device, int threads);
  };
  std::unique_ptr<OwnDevice> own_device_;
  Exec exec_;
  double peak_flops_;  // of a rank's device; 0: unknown
  std::unique_ptr<RankModel> model_;
  std::unique_ptr<StepPlanner> own_planner_;
  StepPlanner* planner_ = nullptr;  // on rank 0
  int64_t ahead_ = 0;               // steps that it is told of early
  int64_t next_announced_ = 0;      // step
  TrainState state_;
  StepReport report_;
  TimeLeft time_left_;
  AttentionReport attention_report_;                 // of the last step, all ranks
  std::vector<std::string> sources_;                 // of a mixture; empty: there is one
  std::vector<Pipeline::SourceLoss> source_losses_;  // of the last step, all ranks
  std::vector<Pipeline::Operation> operations_;      // of the last step, this rank
  int64_t saved_step_ = -1, validated_step_ = -1;
  double saving_seconds_ = 0;
  int64_t skipped_in_row_here_ = 0;  // by this process: one that is resumed tries as often again
  std::unique_ptr<CheckpointSaver> saver_;
  std::unique_ptr<RunLog> log_;         // on rank 0
  std::unique_ptr<StepTicker> ticker_;  // on rank 0
  TraceWriter trace_;
};

}  // namespace sb
