#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "attention/select/selection_config.h"
#include "core/tensor.h"
#include "data/files/token_dataset.h"
#include "data/synthetic/synthetic.h"
#include "model/lora/lora_config.h"
#include "model/model_config.h"
#include "model/stage/stage.h"
#include "parallel/grid.h"
#include "parallel/ring/context_placement.h"
#include "plan/batching/batching_policy.h"
#include "plan/tuning/tuning_policy.h"

namespace sb {

// What one run does, as run.yaml says it. Plain data: every field's initial value is the option's default. The option
// table in run_config.cpp gives names, ranges and help; docs/configuration.md is generated from it.

struct ModelOptions {
  std::filesystem::path path;       // Hugging Face directory; empty: `init` is used
  std::optional<ModelConfig> init;  // a model from scratch
  // Overrides the model's, and is written out; theta 0 and original_max_position_embeddings 0 keep the model's values.
  std::optional<RopeConfig> rope;
  DType save_dtype = DType::f32;  // of the weights written for `transformers`
};

struct WeightedPath {
  std::filesystem::path path;  // prefix of .bin/.idx
  double weight = 1.0;         // what of: DataOptions::mixture
  bool operator==(const WeightedPath&) const = default;
};

struct DataOptions {
  // A weight is how often each sequence of a path is seen, relative to the others', or the path's share of the tokens.
  enum class Mixture { sequences, tokens };
  std::vector<WeightedPath> train;
  std::vector<WeightedPath> validation;
  std::optional<SyntheticOptions>
      synthetic;                            // instead of train; validation then draws from the same task, another seed
  std::filesystem::path synthetic_lengths;  // file the lengths of `synthetic` are drawn from; empty: by its options
  int64_t max_sequence_length = 2048;
  Mixture mixture = Mixture::sequences;
  bool shuffle = true;
  Overlong overlong = Overlong::split;  // what happens to sequences longer than max_sequence_length
};

struct BatchOptions {
  enum class Loss { token_mean, sequence_mean };
  int64_t global_batch_size = 16;     // sequences per optimizer step
  int64_t micro_batch_sequences = 0;  // 0: as many as fit into micro_batch_tokens
  int64_t micro_batch_tokens = 0;     // hard cap; 0: max_sequence_length · max(1, micro_batch_sequences)
  Loss loss = Loss::token_mean;
};

struct AttentionRunOptions {
  AttentionRunOptions() {
    selection.pattern = SelectionPattern::dense;
    selection.score = BlockScore::planes;
  }
  SelectionConfig selection;
  int64_t coverage_rows = 4;         // rows of every sequence and layer on which the true coverage is measured; 0: none
  std::filesystem::path dump_index;  // folder for the lists of one micro-batch; empty: none
  int64_t dump_index_step = 1;       // from this step on
  bool layer_metrics = false;        // coverage and density of every layer in metrics.jsonl
};

struct BalanceOptions {
  enum class Ordering { none, automatic };
  BatchingPolicy batching = BatchingPolicy::in_order;
  Ordering ordering = Ordering::none;
  TuningPolicy tuning = TuningPolicy::none;
  AnchorKind anchor = AnchorKind::mean;
  double p = 0.1;
  double target = -1.0;    // -1: equal_coverage
  int64_t max_budget = 0;  // 0: four times attention.budget
  static constexpr int64_t kAutomaticChunk = -1;
  int64_t chunk = 0;  // most tokens of a piece; 0: sequences stay whole
  bool adapt = true;
  int64_t compare_steps = 0;      // every so many steps the same batch also runs in order, to be timed; 0: never
  std::filesystem::path profile;  // or the name of a built-in one
  std::filesystem::path links;    // measured between ranks; empty: those of the profile
  std::filesystem::path replay;   // plan.jsonl of another run
};

// A cluster that is planned for and not there; 0: none.
struct RehearsedGrid {
  int dp = 0, pp = 0;
  bool on() const { return dp > 0; }
};

struct ParallelOptions {
  enum class Backend { automatic, nccl, staged };
  int dp = 1;
  int pp = 1;
  int cp = 1;
  int tp = 1;
  ContextPlacement placement = ContextPlacement::triangular;  // of a sequence's blocks on cp ranks
  int node_size = 0;                     // cp ranks of one machine, for the hierarchical ring; 0: a plain ring
  Backend backend = Backend::automatic;  // device: cuda
  enum class RingLists { automatic, device, host };
  RingLists ring_lists = RingLists::automatic;  // device: cuda, cp: where lists are made
  int64_t timeout = 0;                          // seconds that a rank waits for another; 0: by the predicted step
  int64_t start_timeout = 60;                   // the same until all have found each other
  RehearsedGrid rehearse;
  GridShape grid() const { return {dp, pp, cp, tp}; }
  // Data-parallel ranks that plans are made for.
  int planned_dp() const { return rehearse.on() ? rehearse.dp : dp; }
};

struct OptimizerOptions {
  enum class Schedule { constant, linear, cosine, warmup_stable_decay };
  double learning_rate = 1e-5;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  double max_grad_norm = 1.0;  // 0: no clipping
  DType moments = DType::f32;  // or bf16, rounded at random
  Schedule schedule = Schedule::cosine;
  int64_t warmup_steps = 0;
  double warmup_ratio = 0.0;             // above 0: warmup_steps as a share of the run
  int64_t decay_steps = 0;               // warmup_stable_decay: the last steps, over which the rate falls
  double min_learning_rate_ratio = 0.0;  // where the decay ends, as a share of learning_rate
};

struct LoraOptions {
  LoraOptions() { config.rank = 16; }
  LoraConfig config;
  std::filesystem::path adapter;  // PEFT directory to go on from; empty: a new adapter
  bool merged = false;            // write the merged model, too (RunConfig::writes_merged)
};

inline constexpr int kLastLayer = -1;

struct TrainOptions {
  int64_t max_steps = 1000;
  double num_train_epochs = 0.0;  // above 0: max_steps as passes over the training data
  Recompute recompute = Recompute::attention;
  int64_t save_steps = 100;      // 0: only at the end
  int64_t save_total_limit = 3;  // 0: keep all
  std::string resume = "auto";   // auto | never | a checkpoint directory
  std::filesystem::path output_dir = "runs/run";
  uint64_t seed = 1;
  int64_t validation_steps = 0;       // 0: only at the end, when there is validation data
  int64_t validation_sequences = 64;  // at most so many a time; 0: all
  enum class ValidationAttention { as_trained, dense };
  ValidationAttention validation_attention = ValidationAttention::as_trained;
  int64_t log_steps = 1;
  bool tensorboard = true;
  int threads = 0;  // 0: all cores
  int64_t loss_chunk = 1024;
  int64_t layer_chunk = 32768;
  int64_t offload = -1;            // layer inputs in host memory; -1: as many as the device's memory asks for
  bool offload_optimizer = false;  // fp32 values and moments in host memory
  enum class Precision { automatic, float32, fp8 };
  Precision precision = Precision::automatic;  // of activations on CUDA: bf16 unless float32
  std::vector<int> fp8_skip;                   // layers that fp8 leaves alone; kLastLayer: the last one
  bool deterministic = false;
  bool trace = false;  // write trace.json
};

struct RunConfig {
  DeviceKind device = DeviceKind::cpu;
  ModelOptions model;
  DataOptions data;
  BatchOptions batch;
  AttentionRunOptions attention;
  BalanceOptions balance;
  ParallelOptions parallel;
  OptimizerOptions optimizer;
  std::optional<LoraOptions> lora;  // none: the whole model is trained
  TrainOptions train;

  LoraConfig lora_config() const { return lora ? lora->config : LoraConfig(); }
  // With adapters: where it is wanted, and where the adapter alone would not give the same model.
  bool writes_merged() const { return lora && (lora->merged || lora->config.trains_base() || model.rope); }
  // Of activations and of the weights that operations read.
  DType dtype() const {
    const bool exact = train.precision == TrainOptions::Precision::float32;
    return device == DeviceKind::cuda && !exact ? DType::bf16 : DType::f32;
  }
};

// Reads and checks the file; `overrides` are "a.b=c" with c in YAML, later ones win. UserError names the file, the
// line, the key and the cure.
RunConfig load_run_config(const std::filesystem::path& path, const std::vector<std::string>& overrides = {});
// The same from text; `name` stands for the file in messages. Relative paths stay as written.
RunConfig parse_run_config(const std::string& yaml, const std::string& name,
                           const std::vector<std::string>& overrides = {});
// Puts model.rope, where given, over what config.json says: the model's own theta and length fill what it leaves open,
// and max_position_embeddings grows to what the scaling reaches. UserError when the run's sequences are longer than the
// model then reaches.
void adapt_model_config(const RunConfig& run, ModelConfig& config);
// Every option with its resolved value, as YAML that loads again to an equal configuration.
std::string print_run_config(const RunConfig& config);
// docs/configuration.md
std::string run_config_markdown();

}  // namespace sb
