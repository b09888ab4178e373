#include "train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/errors.h"
#include "core/log.h"
#include "data/synthetic.h"
#include "model/hf_checkpoint.h"
#include "ops/adamw.h"
#include "train/flops.h"
#include "train/lr_schedule.h"

namespace sb {
namespace {

constexpr int64_t kMaxSkippedInRow = 10;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void add(LossSums& to, const LossSums& from) {
  to.weighted += from.weighted;
  to.nll += from.nll;
  to.targets += from.targets;
  to.correct += from.correct;
}

double ratio(int64_t part, int64_t whole) {
  return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
}

int thread_count(const RunConfig& config) {
  return config.train.threads > 0 ? config.train.threads : available_cores();
}

int64_t longest_sequence(const TrainerParts& parts) {
  const int64_t validation = parts.validation.source ? parts.validation.source->max_length() : 0;
  return std::max(parts.source.max_length(), validation);
}

StageOptions stage_options(const RunConfig& config, const TrainerParts& parts) {
  const int64_t longest = longest_sequence(parts);
  StageOptions options;
  options.last_layer = parts.model.layers;
  options.recompute = config.train.recompute;
  options.max_micro_batch_tokens = packing_limits(config.batch, longest).max_tokens;
  options.max_sequence_length = longest;
  options.loss_chunk = config.train.loss_chunk;
  return options;
}

}  // namespace

MemoryPlan Trainer::memory_plan(const RunConfig& config, const TrainerParts& parts) {
  const StageOptions options = stage_options(config, parts);
  MemoryPlan plan = Stage::memory_plan(parts.model, options, parts.attention, thread_count(config));
  plan.add("optimizer", 2 * plan.items().front().bytes);  // two moments as large as the weights, which come first
  return plan;
}

Trainer::Trainer(const RunConfig& config, TrainerParts parts, RunDirectory& directory)
    : config_(config),
      parts_(std::move(parts)),
      directory_(directory),
      limits_(packing_limits(config.batch, longest_sequence(parts_))),
      pool_(thread_count(config)),
      trace_(config.train.trace ? directory.path() / "trace.json" : std::filesystem::path()) {
  exec_.pool = &pool_;
  stage_ = std::make_unique<Stage>(parts_.model, stage_options(config_, parts_), parts_.attention, pool_.threads());
  const ParameterSet& parameters = stage_->parameters();
  moments_ = std::make_unique<Arena>("optimizer", 2 * Arena::rounded(parameters.flat_elements() * 4));
  first_moment_ = moments_->allocate(DType::f32, {parameters.flat_elements()});
  second_moment_ = moments_->allocate(DType::f32, {parameters.flat_elements()});

  // Neighbours of the same kind are updated together; the padding between them is zero and stays zero.
  for (int i = 0; i < parameters.count(); ++i) {
    const Parameter& parameter = parameters.parameter(i);
    const int64_t end = parameter.offset + parameter.elements();
    if (!decay_ranges_.empty() && decay_ranges_.back().decay == parameter.decay)
      decay_ranges_.back().end = end;
    else
      decay_ranges_.push_back({parameter.offset, end, parameter.decay});
  }

  load_start_of_run();
  metrics_ = std::make_unique<MetricsLog>(directory_.path() / "metrics.jsonl", state_.step);
  if (config_.train.tensorboard)
    tensorboard_ = std::make_unique<TensorBoardWriter>(directory_.path() / "tensorboard", state_.step + 1);
}

void Trainer::load_start_of_run() {
  if (const auto& checkpoint = directory_.resume_from()) {
    state_ = load_checkpoint(*checkpoint, stage_->parameters(), first_moment_, second_moment_);
    parts_.source.restore_state(state_.source_state);
    if (parts_.sparse) parts_.sparse->selector().set_thresholds(state_.thresholds);
    if (checkpoint->parent_path() == directory_.path()) saved_step_ = state_.step;
    parts_.console.text(fmt::format("resumed from {} after step {}", checkpoint->string(), state_.step));
    return;
  }
  state_.seed = config_.train.seed;
  std::memset(first_moment_.raw(), 0, static_cast<size_t>(first_moment_.bytes()));
  std::memset(second_moment_.raw(), 0, static_cast<size_t>(second_moment_.bytes()));
  if (config_.model.path.empty())
    stage_->initialize(config_.train.seed);
  else
    read_hf_weights(config_.model.path, stage_->parameters());
}

TrainSummary Trainer::run() {
  TrainSummary summary;
  if (state_.step == 0) summary.first_validation = validate();
  while (state_.step < config_.train.max_steps) {
    if (!step()) {
      summary.interrupted = true;
      break;
    }
    summary.loss = report_.loss;
    summary.seconds += report_.seconds;
    summary.tokens += report_.tokens;
    if (validation_due()) summary.last_validation = validate();
    if (config_.train.save_steps > 0 && state_.step % config_.train.save_steps == 0) save();
  }
  save();
  if (!summary.interrupted) write_final_model(summary);
  summary.steps = state_.step;
  summary.skipped = state_.skipped;
  summary.checkpoint = checkpoint_path(directory_.path(), saved_step_);
  parts_.console.finish();
  return summary;
}

bool Trainer::step() {
  const auto begin = std::chrono::steady_clock::now();
  const auto span = trace_.span("step", state_.step + 1);

  const StepPlan plan = plan_step();
  const std::optional<LossSums> sums = forward_backward(plan);
  if (!sums) return false;
  const double grad_norm = std::sqrt(squared_norm(exec_, stage_->parameters().gradients()));

  // From here on the step counts, whatever comes of it: its sequences are not seen again.
  ++state_.step;
  state_.position += plan.sequences.size();
  state_.tokens += std::accumulate(plan.lengths.begin(), plan.lengths.end(), int64_t{0});
  const bool finite = std::isfinite(grad_norm) && std::isfinite(sums->weighted);
  if (finite) {
    state_.skipped_in_row = 0;
    update(grad_norm);
    learn(*sums);
  } else {
    ++state_.skipped;
    ++state_.skipped_in_row;
  }
  log_step(plan, *sums, grad_norm, !finite, seconds_since(begin));
  if (state_.skipped_in_row >= kMaxSkippedInRow) give_up(plan);
  return true;
}

// The global batch is the next global_batch_size sequences of the source, whatever micro-batches they end up in.
Trainer::StepPlan Trainer::plan_step() const {
  StepPlan plan;
  std::vector<int64_t> targets;
  for (int64_t i = 0; i < config_.batch.global_batch_size; ++i) {
    const uint64_t position = state_.position + static_cast<uint64_t>(i);
    plan.sequences.push_back(parts_.source.read(position));
    plan.lengths.push_back(static_cast<int64_t>(plan.sequences.back().tokens.size()));
    plan.ids.push_back(plan.sequences.back().id);
    targets.push_back(parts_.source.valid_targets(position));
  }
  plan.weights = target_weights(config_.batch.loss, targets);
  plan.micro_batches = pack_in_order(plan.lengths, plan.ids, limits_);
  return plan;
}

// Gradients of the whole global batch; nothing when asked to stop on the way.
std::optional<LossSums> Trainer::forward_backward(const StepPlan& plan) {
  stage_->parameters().zero_gradients();
  LossSums sums;
  for (size_t i = 0; i < plan.micro_batches.size(); ++i) {
    if (parts_.stop_requested()) return std::nullopt;
    const MicroBatch batch =
        make_micro_batch(plan.sequences, plan.micro_batches[i], plan.weights, parts_.model.vocab_size);
    {
      const auto span = trace_.span("forward", static_cast<int64_t>(i));
      stage_->forward(exec_, batch, 0, {});
    }
    add(sums, stage_->loss(0));
    const auto span = trace_.span("backward", static_cast<int64_t>(i));
    stage_->backward(exec_, batch, 0, {});
  }
  return sums;
}

void Trainer::update(double grad_norm) {
  const auto span = trace_.span("update", state_.step);
  const OptimizerOptions& options = config_.optimizer;
  AdamWStep adamw;
  adamw.learning_rate = static_cast<float>(learning_rate(options, config_.train.max_steps, state_.step));
  adamw.beta1 = static_cast<float>(options.beta1);
  adamw.beta2 = static_cast<float>(options.beta2);
  adamw.eps = static_cast<float>(options.eps);
  adamw.step = ++state_.updates;
  const bool clip = options.max_grad_norm > 0 && grad_norm > options.max_grad_norm;
  adamw.gradient_scale = clip ? static_cast<float>(options.max_grad_norm / (grad_norm + 1e-6)) : 1.0f;
  const ParameterSet& parameters = stage_->parameters();
  for (const DecayRange& range : decay_ranges_) {
    adamw.weight_decay = range.decay ? static_cast<float>(options.weight_decay) : 0.0f;
    adamw_update(exec_, adamw, parameters.values().rows(range.begin, range.end),
                 parameters.gradients().rows(range.begin, range.end), first_moment_.rows(range.begin, range.end),
                 second_moment_.rows(range.begin, range.end));
  }
}

// A single non-finite gradient costs one step; a run of them does not heal by itself.
void Trainer::give_up(const StepPlan& plan) const {
  throw UserError(
      "step {}: the gradient was not finite in {} steps in a row; the last batch had the sequences {}. "
      "Lower optimizer.learning_rate or look at these sequences; {}",
      state_.step, kMaxSkippedInRow, fmt::join(plan.ids, ", "),
      saved_step_ >= 0 ? "the newest checkpoint is " + checkpoint_path(directory_.path(), saved_step_).string()
                       : std::string("there is no checkpoint yet"));
}

// A source with a curriculum moves on when the model is good enough.
void Trainer::learn(const LossSums& sums) {
  if (parts_.source.observe(sums.correct, sums.targets, state_.position))
    parts_.console.text(fmt::format("step {}: accuracy {:.1f} %, sequences of {} tokens from here on", state_.step,
                                    100.0 * ratio(sums.correct, sums.targets), parts_.source.length(state_.position)));
  state_.source_state = parts_.source.state();
  if (parts_.sparse) state_.thresholds = parts_.sparse->selector().thresholds();
}

void Trainer::log_step(const StepPlan& plan, const LossSums& sums, double grad_norm, bool skipped, double seconds) {
  report_ = {};
  report_.step = state_.step;
  report_.max_steps = config_.train.max_steps;
  report_.loss = sums.weighted;
  report_.grad_norm = grad_norm;
  report_.learning_rate = learning_rate(config_.optimizer, config_.train.max_steps, state_.step);
  report_.tokens = std::accumulate(plan.lengths.begin(), plan.lengths.end(), int64_t{0});
  report_.targets = sums.targets;
  report_.accuracy = ratio(sums.correct, sums.targets);
  report_.seconds = seconds;
  report_.flops = training_flops(parts_.model, plan.lengths);
  report_.skipped = skipped;
  report_.skipped_total = state_.skipped;
  std::vector<Metric> attention;
  add_attention_metrics(attention);
  parts_.console.step(report_);

  const int64_t longest = *std::max_element(plan.lengths.begin(), plan.lengths.end());
  std::vector<Metric> metrics = {
      {"step", static_cast<double>(report_.step), true},
      {"loss", report_.loss},
      {"grad_norm", report_.grad_norm},
      {"learning_rate", report_.learning_rate},
      {"tokens", static_cast<double>(report_.tokens), true},
      {"tokens_per_second", report_.tokens_per_second()},
      {"step_ms", 1e3 * seconds},
      {"accuracy", report_.accuracy},
      {"targets", static_cast<double>(report_.targets), true},
      {"micro_batches", static_cast<double>(plan.micro_batches.size()), true},
      {"longest_sequence", static_cast<double>(longest), true},
      {"gflops_per_second", report_.flops / seconds / 1e9},
      {"skipped_steps", static_cast<double>(state_.skipped), true},
      {"total_tokens", static_cast<double>(state_.tokens), true},
  };
  metrics.insert(metrics.end(), attention.begin(), attention.end());
  metrics_->write(metrics);
  if (tensorboard_) {
    std::vector<Scalar> scalars;
    for (const Metric& metric : metrics)
      if (metric.name != "step") scalars.push_back({"train/" + metric.name, metric.value});
    tensorboard_->write(report_.step, scalars);
  }
  trace_.flush();
}

// What sparse attention computed and kept in this step.
void Trainer::add_attention_metrics(std::vector<Metric>& metrics) {
  if (!parts_.sparse) return;
  const AttentionReport report = parts_.sparse->take_report();
  const LayerAttention total = report.total();
  report_.density = total.density();
  metrics.push_back({"density", total.density()});
  metrics.push_back({"attention_pairs", static_cast<double>(total.pairs), true});
  if (total.covered_tokens > 0) {
    report_.coverage = total.mean_coverage();
    metrics.push_back({"coverage", total.mean_coverage()});
  }
  if (!config_.attention.layer_metrics) return;
  for (size_t layer = 0; layer < report.layers.size(); ++layer) {
    metrics.push_back({fmt::format("density_layer_{}", layer), report.layers[layer].density()});
    if (report.layers[layer].covered_tokens > 0)
      metrics.push_back({fmt::format("coverage_layer_{}", layer), report.layers[layer].mean_coverage()});
  }
}

bool Trainer::validation_due() const {
  const int64_t every = config_.train.validation_steps;
  return state_.step == config_.train.max_steps || (every > 0 && state_.step % every == 0);
}

std::optional<ValidationReport> Trainer::validate() {
  const ValidationSet& set = parts_.validation;
  if (set.source == nullptr || set.sequences == 0) return std::nullopt;
  const auto span = trace_.span("validation", state_.step);
  // Looking must not change what training does next.
  const Selector::Thresholds kept = parts_.sparse ? parts_.sparse->selector().thresholds() : Selector::Thresholds();
  const std::optional<LossSums> all = evaluate(/*later_chunk_tokens_only=*/false);
  if (!all) return std::nullopt;
  const LossSums& sums = *all;
  ValidationReport report;
  report.step = state_.step;
  report.sequences = set.sequences;
  report.loss = sums.targets > 0 ? sums.nll / static_cast<double>(sums.targets) : 0.0;
  report.accuracy = ratio(sums.correct, sums.targets);
  std::vector<Metric> metrics = {{"step", static_cast<double>(report.step), true},
                                 {"validation_loss", report.loss},
                                 {"validation_accuracy", report.accuracy}};
  if (set.recall_chunk > 0) {
    const std::optional<LossSums> later = evaluate(/*later_chunk_tokens_only=*/true);
    if (!later) return std::nullopt;
    report.recall = ratio(later->correct, later->targets);
    metrics.push_back({"validation_recall", *report.recall});
  }
  if (parts_.sparse) {
    parts_.sparse->selector().set_thresholds(kept);
    parts_.sparse->take_report();
  }
  parts_.console.validation(report);
  metrics_->write(metrics);
  if (tensorboard_) {
    std::vector<Scalar> scalars;
    for (const Metric& metric : metrics)
      if (metric.name != "step") scalars.push_back({"validation/" + metric.name.substr(11), metric.value});
    tensorboard_->write(report.step, scalars);
  }
  return report;
}

// Nothing when asked to stop on the way.
std::optional<LossSums> Trainer::evaluate(bool later_chunk_tokens_only) {
  const ValidationSet& set = parts_.validation;
  LossSums sums;
  std::vector<int64_t> lengths, ids;
  for (int64_t i = 0; i < set.sequences; ++i) {
    lengths.push_back(set.source->length(static_cast<uint64_t>(i)));
    ids.push_back(i);
  }
  for (const std::vector<int>& chosen : pack_in_order(lengths, ids, limits_)) {
    if (parts_.stop_requested()) return std::nullopt;
    std::vector<TokenSequence> sequences;
    for (const int position : chosen) {
      sequences.push_back(set.source->read(static_cast<uint64_t>(position)));
      if (!later_chunk_tokens_only) continue;
      std::vector<int32_t>& labels = sequences.back().labels;
      const auto length = static_cast<int64_t>(labels.size());
      for (int64_t i = 0; i < length; ++i)
        if (chunk_recall_token(i, length, set.recall_chunk) < 3) labels[static_cast<size_t>(i)] = kIgnoredLabel;
    }
    std::vector<int> all(sequences.size());
    std::iota(all.begin(), all.end(), 0);
    const std::vector<float> weights(sequences.size(), 1.0f);
    stage_->evaluate(exec_, make_micro_batch(sequences, all, weights, parts_.model.vocab_size), 0, {});
    add(sums, stage_->loss(0));
  }
  return sums;
}

void Trainer::save() {
  if (saved_step_ == state_.step) return;
  const auto span = trace_.span("save", state_.step);
  const std::string run_config = print_run_config(config_);
  const std::filesystem::path saved = save_checkpoint(
      directory_.path(),
      {parts_.model, stage_->parameters(), first_moment_, second_moment_, state_, run_config, config_.model.path});
  saved_step_ = state_.step;
  remove_old_checkpoints(directory_.path(), config_.train.save_total_limit);
  log::debug("saved {}", saved.string());
}

void Trainer::write_final_model(TrainSummary& summary) {
  summary.final_model = directory_.path() / "final";
  write_directory_atomically(summary.final_model, [&](const std::filesystem::path& temporary) {
    HfWriteOptions options;
    options.dtype = config_.model.save_dtype;
    options.copy_from = config_.model.path;
    write_hf_model(temporary, parts_.model, stage_->parameters(), options);
  });
}

}  // namespace sb
