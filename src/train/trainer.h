#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/sparse_attention.h"
#include "core/memory_plan.h"
#include "core/thread_pool.h"
#include "data/sequence_source.h"
#include "device/exec.h"
#include "model/stage.h"
#include "train/checkpoint.h"
#include "train/console.h"
#include "train/metrics_log.h"
#include "train/packing.h"
#include "train/run_config.h"
#include "train/run_directory.h"
#include "train/tensorboard_writer.h"
#include "train/trace.h"

namespace sb {

// Fixed sequences on which the model is measured now and then: the first `sequences` of the source.
struct ValidationSet {
  const SequenceSource* source = nullptr;  // none: no validation
  int64_t sequences = 0;
  int64_t recall_chunk = 0;  // chunk recall: tokens a chunk; also measure the third and later ones. 0: another task
};

// What a run is made of besides its configuration. All of it outlives the trainer.
struct TrainerParts {
  ModelConfig model;
  Attention& attention;
  SequenceSource& source;
  ValidationSet validation;
  Console& console;
  std::function<bool()> stop_requested;  // asked between micro-batches
  // `attention`, where it is sparse: its choices are reported and what it learns is saved.
  SparseAttention* sparse = nullptr;
};

struct TrainSummary {
  int64_t steps = 0;  // done in all
  bool interrupted = false;
  double loss = 0;  // of the last step of this process; 0 when it had none
  int64_t tokens = 0;
  double seconds = 0;  // in steps, of this process
  int64_t skipped = 0;
  std::optional<ValidationReport> first_validation, last_validation;
  std::filesystem::path checkpoint;   // the newest; empty: none
  std::filesystem::path final_model;  // empty: interrupted before the end
};

// The training loop of one process.
class Trainer {
 public:
  // Takes all memory, loads or initialises the model and, when the directory says so, resumes.
  Trainer(const RunConfig& config, TrainerParts parts, RunDirectory& directory);

  // Trains to train.max_steps, or until asked to stop: then saves and returns.
  TrainSummary run();

  // What the constructor takes.
  static MemoryPlan memory_plan(const RunConfig& config, const TrainerParts& parts);

  // One optimizer step; false: asked to stop in the middle, nothing has changed.
  bool step();

  Stage& stage() { return *stage_; }
  const TrainState& state() const { return state_; }
  const StepReport& last_step() const { return report_; }

 private:
  struct StepPlan {
    std::vector<TokenSequence> sequences;  // the global batch
    std::vector<int64_t> lengths, ids;
    std::vector<float> weights;                   // of each sequence's targets
    std::vector<std::vector<int>> micro_batches;  // indices into `sequences`
  };
  struct DecayRange {
    int64_t begin, end;  // elements of the flat buffers
    bool decay;
  };

  void load_start_of_run();
  StepPlan plan_step() const;
  std::optional<LossSums> forward_backward(const StepPlan& plan);
  void update(double grad_norm);
  [[noreturn]] void give_up(const StepPlan& plan) const;
  void learn(const LossSums& sums);
  void add_attention_metrics(std::vector<Metric>& metrics);
  void log_step(const StepPlan& plan, const LossSums& sums, double grad_norm, bool skipped, double seconds);

  bool validation_due() const;
  std::optional<ValidationReport> validate();
  std::optional<LossSums> evaluate(bool later_chunk_tokens_only);
  void save();
  void write_final_model(TrainSummary& summary);

  RunConfig config_;
  TrainerParts parts_;
  RunDirectory& directory_;
  PackingLimits limits_;
  ThreadPool pool_;
  Exec exec_;
  std::unique_ptr<Stage> stage_;
  std::unique_ptr<Arena> moments_;
  TensorView first_moment_, second_moment_;
  std::vector<DecayRange> decay_ranges_;
  TrainState state_;
  StepReport report_;
  int64_t saved_step_ = -1;
  std::unique_ptr<MetricsLog> metrics_;
  std::unique_ptr<TensorBoardWriter> tensorboard_;
  TraceWriter trace_;
};

}  // namespace sb
