#include "train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "comm/first_rank.h"
#include "comm/self_communicator.h"
#include "core/errors.h"
#include "core/log.h"
#include "device/cuda.h"
#include "device/event.h"
#include "model/flops.h"
#include "model/hf_checkpoint.h"
#include "parallel/ring/context_layout.h"
#include "run/checkpoint/selection_file.h"
#include "run/disk_room.h"
#include "train/adapter_start.h"
#include "train/index_dump.h"
#include "train/lr_schedule.h"
#include "train/make_planner.h"
#include "train/stage_split.h"
#include "train/sums/attention_sums.h"
#include "train/sums/step_sums.h"

namespace sb {
namespace {

constexpr int64_t kMaxSkippedInRow = 10;

std::chrono::nanoseconds time_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::steady_clock::now() - begin;
}

// Of a mixture, each by a name of its own; nothing where there is one source.
std::vector<std::string> source_names(const SequenceSource& source) {
  std::vector<std::string> names = source.sources();
  if (names.size() < 2) return {};
  for (size_t i = 1; i < names.size(); ++i)
    if (std::find(names.begin(), names.begin() + static_cast<int64_t>(i), names[i]) !=
        names.begin() + static_cast<int64_t>(i))
      names[i] += fmt::format(" ({})", i + 1);
  return names;
}

int64_t longest_sequence(const TrainerParts& parts) {
  const int64_t validation = parts.validation.source ? parts.validation.source->max_length() : 0;
  return std::max(parts.source.max_length(), validation);
}

// Before any memory is planned for them: what cannot run in pieces.
void check_chunk(const RunConfig& config, const TrainerParts& parts) {
  SB_USER_CHECK(config.parallel.cp == 1 || config.balance.chunk > 0 || config.parallel.pp == 1,
                "balance.chunk: auto does not work with parallel.cp {}, where ranks share sequences; set the size of a "
                "piece in tokens, for example balance.chunk: 4096",
                config.parallel.cp);
  SB_CHECK(config.device == DeviceKind::cpu || config.balance.chunk > 0 || config.parallel.pp == 1,
           "balance.chunk: auto is not settled, and a stage's memory cannot be divided differently from step to step");
  const std::string refusal = parts.attention.refuses_pieces();
  SB_USER_CHECK(refusal.empty(), "balance.chunk: {}; set balance.chunk: none", refusal);
}

RankModelOptions rank_model_options(const RunConfig& config, const TrainerParts& parts) {
  RankModelOptions options;
  options.model = parts.model;
  options.first_layers = split_layers(config, parts.model);
  options.grid = config.parallel.grid();
  options.device = config.device;
  options.dtype = config.dtype();
  options.recompute = config.train.recompute;
  options.max_sequence_length = longest_sequence(parts);
  options.max_micro_batch_tokens = most_rank_tokens(config, Trainer::packing(config, parts));
  if (config.balance.chunk != 0) check_chunk(config, parts);
  if (const int64_t chunk = smallest_piece(config); chunk > 0) {
    options.max_pieces = static_cast<int>((options.max_sequence_length + chunk - 1) / chunk);
    options.kept_tokens = kept_tokens(config, Trainer::packing(config, parts));
    options.split_backward_tokens =
        split_backward_tokens(config, parts.model.hidden_size, options.max_micro_batch_tokens);
    if (config.parallel.cp > 1)
      options.max_cut_tokens = ContextLayout::most_sequence_tokens(config.parallel.cp, config.attention.selection.block,
                                                                   options.max_sequence_length);
  }
  options.loss_chunk = config.train.loss_chunk;
  options.layer_chunk = config.train.layer_chunk;
  options.offload = parts.offload;
  options.offload_optimizer = config.train.offload_optimizer;
  options.moments = config.optimizer.moments;
  options.threads = thread_count(config, parts.cores);
  options.lora = config.lora_config();
  options.fp8 = config.train.precision == TrainOptions::Precision::fp8;
  for (const int layer : config.train.fp8_skip)
    options.fp8_skip.push_back(layer == kLastLayer ? parts.model.layers - 1 : layer);
  options.kept_codes = parts.kept_codes;
  return options;
}

const char* pass_name(Pipeline::Pass pass) {
  using enum Pipeline::Pass;
  return pass == forward ? "forward" : pass == backward ? "backward" : "weights";
}

// A resumed run keeps the traces of the processes before.
std::filesystem::path trace_path(const std::filesystem::path& directory) {
  std::filesystem::path file = directory / "trace.json";
  for (int process = 2; std::filesystem::exists(file); ++process)
    file = directory / fmt::format("trace-{}.json", process);
  return file;
}

// Whether blocks are to be judged by planes of which there are no statistics yet.
bool needs_first_look(const RunConfig& config, const ModelConfig& model, const LearnedSelection& learned) {
  if (!config.attention.selection.judges_by_planes()) return false;
  return std::ssize(learned.planes) != model.layers ||
         std::ranges::any_of(learned.planes, [](const PlaneSums& layer) { return layer.tokens == 0; });
}

}  // namespace

void BalanceSummary::add(const StepReport& report) {
  if (!report.gain) return;
  ++steps;
  const double share = 1.0 / static_cast<double>(steps);
  rank_imbalance += share * (report.rank_imbalance.value_or(1.0) - rank_imbalance);
  bubble_percent += share * (report.bubble_percent.value_or(0.0) - bubble_percent);
  gain += share * (*report.gain - gain);
  cluster_seconds += report.cluster_seconds.value_or(0.0);
  if (!report.in_order_seconds) return;
  ++compared;
  in_order += *report.in_order_seconds;
  balanced += *report.balanced_seconds;
}

int thread_count(const RunConfig& config, int cores) {
  return config.train.threads > 0 ? config.train.threads : cores;
}

std::vector<Sequence> step_batch(const RunConfig& config, const SequenceSource& source, const TrainState& state,
                                 int64_t step) {
  const int64_t batch = config.batch.global_batch_size;
  const int64_t first = static_cast<int64_t>(state.position) + (step - state.step - 1) * batch;
  std::vector<Sequence> sequences;
  for (int64_t position = first; position < first + batch; ++position)
    sequences.push_back({position, source.length(static_cast<uint64_t>(position))});
  return sequences;
}

PackingLimits Trainer::packing(const RunConfig& config, const TrainerParts& parts) {
  return run_packing(config, longest_sequence(parts));
}

MemoryPlan Trainer::memory_plan(const RunConfig& config, const TrainerParts& parts, int stage) {
  MemoryPlan plan = RankModel::memory_plan(rank_model_options(config, parts), parts.attention, stage);
  if (parts.checkpoint_copies.empty()) return plan;
  const int64_t copy = parts.checkpoint_copies[static_cast<size_t>(stage)];
  if (config.device == DeviceKind::cpu)
    plan.add("checkpoint copy", copy);
  else
    plan.add_on_host("checkpoint copy", copy);
  return plan;
}

std::vector<int64_t> Trainer::checkpoint_copies(const RunConfig& config, const TrainerParts& parts) {
  std::vector<int64_t> bytes;
  const RankModelOptions options = rank_model_options(config, parts);
  for (int stage = 0; stage < config.parallel.pp; ++stage) bytes.push_back(RankModel::most_own_bytes(options, stage));
  return bytes;
}

std::vector<int> Trainer::offload(const RunConfig& config, TrainerParts parts, int64_t memory) {
  parts.offload.assign(static_cast<size_t>(config.parallel.pp), 0);
  parts.kept_codes.assign(static_cast<size_t>(config.parallel.pp), 0);  // nothing moves to make room for them
  const int64_t wanted = config.train.offload;
  for (int stage = 0; stage < config.parallel.pp; ++stage) {
    const StageOptions options = rank_model_options(config, parts).stage(stage);
    const int most = Stage::most_offload(options);
    SB_USER_CHECK(wanted <= most,
                  "train.offload: {}, but of the {} layers of stage {} at most {} can keep their input in host memory "
                  "(two stay on the GPU); lower it, or set -1",
                  wanted, options.last_layer - options.first_layer, stage, most);
    int& chosen = parts.offload[static_cast<size_t>(stage)];
    if (wanted >= 0) {
      chosen = static_cast<int>(wanted);
    } else if (config.device == DeviceKind::cuda) {
      chosen = Stage::least_offload(options, memory, [&](int offload) {
        chosen = offload;
        return memory_plan(config, parts, stage);
      });
    }
  }
  return parts.offload;
}

std::vector<int> Trainer::kept_codes(const RunConfig& config, TrainerParts parts, int64_t memory) {
  parts.kept_codes.assign(static_cast<size_t>(config.parallel.pp), 0);
  for (int stage = 0; stage < config.parallel.pp; ++stage) {
    int& chosen = parts.kept_codes[static_cast<size_t>(stage)];
    const StageOptions options = rank_model_options(config, parts).stage(stage);
    chosen = Stage::most_kept_codes(options, memory, [&](int kept_codes) {
      chosen = kept_codes;
      return memory_plan(config, parts, stage);
    });
  }
  return parts.kept_codes;
}

Trainer::OwnDevice::OwnDevice(DeviceKind device, int threads)
    : pool(threads), context(device, pool, norm_scratch_bytes(device)) {}

Trainer::Trainer(const RunConfig& config, TrainerParts parts, RunDirectory& directory)
    : config_(config),
      parts_(std::move(parts)),
      directory_(directory),
      limits_(packing(config, parts_)),
      alone_(parts_.world ? nullptr : make_self_communicator()),
      world_(parts_.world ? parts_.world : alone_.get()),
      own_device_(parts_.device ? nullptr
                                : std::make_unique<OwnDevice>(config.device, thread_count(config, parts_.cores))),
      exec_(parts_.device ? parts_.device->exec() : own_device_->context.exec()),
      peak_flops_(config.device == DeviceKind::cuda
                      ? peak_bf16_flops(cuda::device_info().name) / (parts_.device ? parts_.device->sharing() : 1)
                      : 0),
      model_(std::make_unique<RankModel>(rank_model_options(config_, parts_), parts_.attention, *world_,
                                         parts_.device ? &parts_.device->data() : nullptr)),
      time_left_(config.train.max_steps, config.train.validation_steps, config.train.save_steps),
      trace_(config.train.trace, leads() ? trace_path(directory.path()) : std::filesystem::path(), world_->rank(),
             config.parallel.pp > 1 ? fmt::format("stage {}", model_->grid().stage()) : "training loop") {
  on_first_rank(*world_, [&] {
    if (parts_.planner != nullptr) return;
    const auto& checkpoint = directory_.resume_from();
    const int64_t first_step = checkpoint ? read_train_state(*checkpoint).step + 1 : 1;
    own_planner_ = make_step_planner(config_, parts_.model, limits_, first_step);
  });
  sources_ = source_names(parts_.source);
  if (leads()) planner_ = parts_.planner ? parts_.planner : own_planner_.get();
  ahead_ = world_->all_reduce(planner_ ? int64_t{planner_->ahead()} : 0);
  load_start_of_run();
  const std::vector<int64_t>& copies = parts_.checkpoint_copies;
  saver_ = std::make_unique<CheckpointSaver>(config_, parts_.model, *world_,
                                             copies.empty() ? 0 : copies[static_cast<size_t>(model_->grid().stage())]);
  if (leads()) {
    log_ = std::make_unique<RunLog>(parts_.console, directory_.path(), state_.step, config_.train.tensorboard);
    ticker_ = std::make_unique<StepTicker>(parts_.console);
  }
  int64_t validated = leads() ? log_->last_validation() : 0;
  world_->broadcast(std::span(&validated, 1), 0);
  validated_step_ = validated;
}

void Trainer::load_start_of_run() {
  std::string base;
  if (config_.lora) base = start_adapters(config_, parts_.model, *model_, directory_.resume_from());
  if (const auto& checkpoint = directory_.resume_from()) {
    state_ = config_.lora ? model_->load_moments(*checkpoint) : model_->load(*checkpoint);
    if (config_.lora) check_same_base(*checkpoint, state_.base, base);
    parts_.source.restore_state(state_.source_state);
    if (const SelectionConfig& selection = config_.attention.selection;
        parts_.sparse && (selection.learns_thresholds() || selection.judges_by_planes())) {
      FoundSelection found = read_selection_of(*checkpoint, parts_.model);
      state_.selection = std::move(found.learned);
      if (leads() && !found.problem.empty())
        log::warning("{}; what attention.pattern and attention.score had learned is learned again", found.problem);
    }
    if (planner_) planner_->restore_state(state_.planner_state);
    if (checkpoint->parent_path() == directory_.path()) saved_step_ = state_.step;
    if (leads()) {
      parts_.console.text(fmt::format("resumed from {} after step {}", checkpoint->string(), state_.step));
      if (!state_.source.empty() && state_.source != parts_.source.identity())
        log::warning(
            "the training data changed since {} was saved: {} then, {} now; sequences may be repeated or skipped",
            checkpoint->string(), state_.source, parts_.source.identity());
    }
  } else if (!config_.lora) {
    if (config_.model.path.empty())
      stage().initialize(config_.train.seed);
    else
      read_hf_weights(config_.model.path, stage().parameters());
  }
  state_.base = base;
  state_.source = parts_.source.identity();
  next_announced_ = state_.step + 1;
  if (parts_.sparse) use_selection();
  if (parts_.sparse && needs_first_look(config_, parts_.model, state_.selection)) first_look();
}

TrainSummary Trainer::run() {
  TrainSummary summary;
  // An earlier process may have done it, or have been stopped before it could.
  if (validated_step_ < state_.step && (state_.step == 0 || validation_due()))
    (state_.step == 0 ? summary.first_validation : summary.last_validation) = validate();
  while (state_.step < config_.train.max_steps) {
    if (!step()) {
      summary.interrupted = true;
      break;
    }
    summary.loss = report_.loss;
    summary.seconds += report_.seconds;
    summary.tokens += report_.tokens;
    summary.balance.add(report_);
    if (validation_due()) summary.last_validation = validate();
    if (due_after(state_.step, config_.train.save_steps, config_.train.max_steps)) save();
  }
  save();
  const auto writing = std::chrono::steady_clock::now();
  saver_->wait();
  summary.saving = saving_seconds_ + std::chrono::duration<double>(time_since(writing)).count();
  if (!summary.interrupted) write_final_model(summary);
  flush_trace();
  trace_.finish();
  summary.trace = trace_.written();
  summary.steps = state_.step;
  summary.skipped = state_.skipped;
  summary.checkpoint = checkpoint_path(directory_.path(), saved_step_);
  if (leads()) parts_.console.finish();
  return summary;
}

bool Trainer::step() {
  saver_->advance();
  if (stop_agreed()) return false;
  const auto begin = std::chrono::steady_clock::now();
  const auto span = trace_.span("step", state_.step + 1);

  const StepPlan plan = receive_plan();
  const int64_t number = state_.step + 1, every = config_.balance.compare_steps;
  const bool compare = every > 0 && number % every == 0;
  // Who runs second finds caches warm: they take turns.
  const bool in_order_first = compare && number / every % 2 == 1;
  const StepPlan in_order = compare ? plan_in_order() : StepPlan();
  std::chrono::nanoseconds in_order_time{0};
  if (in_order_first) in_order_time = time_in_order(in_order, number);
  if (compare) start_together();
  const auto computing = std::chrono::steady_clock::now();
  const std::optional<LossSums> sums = forward_backward(plan);
  if (!sums) return false;
  const double grad_norm = reduce_gradients();
  const double balanced = std::chrono::duration<double>(time_since(computing)).count();

  // From here on the step counts, whatever comes of it: its sequences are not seen again.
  ++state_.step;
  state_.position += plan.lengths.size();
  state_.tokens += plan.tokens();
  const bool finite = std::isfinite(grad_norm) && std::isfinite(sums->weighted);
  if (finite)
    update(grad_norm);
  else
    skip_update();
  const std::chrono::nanoseconds time = time_since(begin) - in_order_time;

  if (parts_.sparse) attention_report_ = sum_over_ranks(*world_, parts_.sparse->take_report(), config_.parallel.tp);
  SelectionObservations observed;
  if (parts_.sparse) observed = parts_.sparse->take_observations();
  // Before thresholds move: both ways select by the same ones.
  if (compare && finite && !in_order_first) in_order_time = time_in_order(in_order, number);
  if (finite) learn(plan, *sums, std::move(observed), time.count());
  report_ = {};
  if (compare && finite) {
    report_.in_order_seconds = std::chrono::duration<double>(in_order_time).count();
    report_.balanced_seconds = balanced;
  }
  log_step(plan, *sums, grad_norm, !finite, std::chrono::duration<double>(time).count());
  if (skipped_in_row_here_ >= kMaxSkippedInRow) give_up();
  return true;
}

// A signal may reach some ranks and not others: all stop at the same step.
bool Trainer::stop_agreed() {
  const bool own = parts_.stop_requested();
  if (world_->size() == 1) return own;
  return world_->all_reduce(int32_t{own}, ReduceOp::max) != 0;
}

// The coming step's batch in order, at the configured budgets.
Trainer::StepPlan Trainer::plan_in_order() {
  InOrderPlanner planner(config_.parallel.dp, parts_.model.layers, limits_);
  planner.announce(state_.step + 1, step_batch(config_, parts_.source, state_, state_.step + 1));
  return read_step(planner.next());
}

// What is timed begins when every rank and its device have ended what came before.
void Trainer::start_together() {
  model_->await_weights();
  DeviceEvent queued(exec_.device);
  queued.record(exec_);
  queued.wait();
  world_->barrier();
}

// What the step takes in order, up to its reduced gradients. These are thrown away, and so is what attention learned.
std::chrono::nanoseconds Trainer::time_in_order(const StepPlan& plan, int64_t step) {
  const auto span = trace_.span("in order", step);
  start_together();
  const auto begin = std::chrono::steady_clock::now();
  model_->forward_backward(exec_, plan.micro_batches, [] { return false; });
  model_->reduce(exec_);
  const std::chrono::nanoseconds time = time_since(begin);
  if (parts_.sparse) {
    parts_.sparse->take_observations();
    parts_.sparse->take_report();
  }
  return time;
}

// Gradients of the whole global batch, before their reduction; nothing when asked to stop on the way.
std::optional<LossSums> Trainer::forward_backward(const StepPlan& plan) {
  const bool one_rank = world_->size() == 1;
  if (parts_.sparse) parts_.sparse->take_observations();  // of a validation, or of a step that did not count
  if (parts_.dump) parts_.dump->begin_step(state_.step + 1);
  if (ticker_) ticker_->begin(state_.step + 1, std::ssize(plan.micro_batches));
  const auto before_micro_batch = [&] {
    if (ticker_) ticker_->micro_batch();
    return one_rank && parts_.stop_requested();
  };
  Pipeline::Result result = model_->forward_backward(exec_, plan.micro_batches, before_micro_batch, plan.order);
  if (ticker_) ticker_->end();
  if (parts_.dump) parts_.dump->end_step();
  if (result.stopped) return std::nullopt;
  for (const Pipeline::Operation& operation : result.operations)
    trace_.complete(pass_name(operation.pass), operation.micro_batch, operation.begin, operation.end);
  operations_ = std::move(result.operations);
  if (!sources_.empty()) source_losses_ = sum_over_ranks(*world_, std::move(result.sources), sources_.size());
  return sum_over_ranks(*world_, result.loss);
}

// Their norm over all parameters, too.
double Trainer::reduce_gradients() {
  const auto span = trace_.span("reduce", state_.step + 1);
  return model_->reduce(exec_);
}

void Trainer::update(double grad_norm) {
  const auto span = trace_.span("update", state_.step);
  state_.skipped_in_row = skipped_in_row_here_ = 0;
  const OptimizerOptions& options = config_.optimizer;
  AdamWStep adamw;
  adamw.learning_rate = static_cast<float>(learning_rate(options, config_.train.max_steps, state_.step));
  adamw.beta1 = static_cast<float>(options.beta1);
  adamw.beta2 = static_cast<float>(options.beta2);
  adamw.eps = static_cast<float>(options.eps);
  adamw.weight_decay = static_cast<float>(options.weight_decay);
  adamw.step = ++state_.updates;
  const bool clip = options.max_grad_norm > 0 && grad_norm > options.max_grad_norm;
  adamw.gradient_scale = clip ? static_cast<float>(options.max_grad_norm / (grad_norm + 1e-6)) : 1.0f;
  model_->update(exec_, adamw);
}

void Trainer::skip_update() {
  ++state_.skipped;
  ++state_.skipped_in_row;
  ++skipped_in_row_here_;
}

// The newest checkpoint from before the gradients went wrong, in words.
std::string Trainer::last_good_checkpoint() const {
  saver_->wait();
  const std::vector<int64_t> steps = checkpoint_steps(directory_.path());
  const int64_t last_good = state_.step - state_.skipped_in_row;
  const auto after = std::upper_bound(steps.begin(), steps.end(), last_good);
  if (after == steps.begin())
    return fmt::format("there is no checkpoint of step {}, the last good one, or earlier", last_good);
  return fmt::format("the newest checkpoint from before that is {}",
                     checkpoint_path(directory_.path(), *std::prev(after)).string());
}

// A single non-finite gradient costs one step; a run of them does not heal by itself.
void Trainer::give_up() const {
  std::vector<int64_t> ids;
  for (int64_t i = config_.batch.global_batch_size; i > 0; --i)
    ids.push_back(parts_.source.read(state_.position - static_cast<uint64_t>(i)).id);
  throw UserError(
      "step {}: the gradient was not finite (NaN or infinity) for {} steps in a row; the last batch had sequences {}. "
      "Lower optimizer.learning_rate, or look at these sequences; {}",
      state_.step, kMaxSkippedInRow, fmt::join(ids, ", "), last_good_checkpoint());
}

// A source with a curriculum moves on when the model is good enough; selection and the planner follow what was
// measured. What comes of numbers that are none teaches nobody: forward_backward() forgets it.
void Trainer::learn(const StepPlan& plan, const LossSums& sums, SelectionObservations observed, int64_t step_ns) {
  const uint64_t unseen = state_.position + static_cast<uint64_t>(ahead_ * config_.batch.global_batch_size);
  if (parts_.source.observe(sums.correct, sums.targets, unseen) && leads())
    parts_.console.text(fmt::format("step {}: accuracy {:.1f}%, sequences of {} tokens from here on", state_.step,
                                    100.0 * accuracy(sums), parts_.source.length(unseen)));
  state_.source_state = parts_.source.state();
  if (parts_.sparse) learn_selection(std::move(observed));
  // The times of a rehearsal say nothing of the ranks that it is planned for.
  StepMeasurement measurement;
  if (!config_.parallel.rehearse.on()) measurement = gather_times(model_->grid(), plan.plan, operations_);
  if (!planner_) return;
  measurement.step = state_.step;
  measurement.step_ns = step_ns;
  measurement.coverage = std::move(attention_report_.samples);
  planner_->learn(measurement);
}

void Trainer::learn_selection(SelectionObservations observed) {
  state_.selection =
      sb::learn(state_.selection, sum_over_ranks(*world_, std::move(observed), stage().options().tensor));
  use_selection();
}

void Trainer::use_selection() {
  parts_.sparse->use(rank_selection(state_.selection, stage().options().tensor));
}

void Trainer::log_step(const StepPlan& plan, const LossSums& sums, double grad_norm, bool skipped, double seconds) {
  report_.step = state_.step;
  report_.max_steps = config_.train.max_steps;
  report_.loss = sums.weighted;
  report_.grad_norm = grad_norm;
  report_.learning_rate = learning_rate(config_.optimizer, config_.train.max_steps, state_.step);
  report_.tokens = plan.tokens();
  report_.targets = sums.targets;
  report_.accuracy = accuracy(sums);
  report_.seconds = seconds;
  time_left_.step(TimeLeft::Seconds(seconds + report_.in_order_seconds.value_or(0.0)));
  report_.seconds_left = time_left_.after(state_.step).count();
  report_.flops = training_flops(parts_.model, plan.lengths, 1.0, config_.lora_config());
  report_.peak_flops = peak_flops_ * world_->size();
  report_.skipped = skipped;
  report_.skipped_total = state_.skipped;
  std::vector<Metric> attention;
  if (parts_.sparse) {
    attention = attention_metrics(attention_report_, config_.attention.layer_metrics, report_);
    report_.executed_flops =
        training_flops(parts_.model, plan.lengths, report_.density.value_or(1.0), config_.lora_config());
  }
  flush_trace();
  if (!log_) return;

  size_t micro_batches = 0;
  for (const PlannedRank& rank : plan.plan.ranks) micro_batches += rank.micro_batches.size();
  const int64_t longest = *std::max_element(plan.lengths.begin(), plan.lengths.end());
  std::vector<Metric> metrics = {{"micro_batches", static_cast<double>(micro_batches), true},
                                 {"longest_sequence", static_cast<double>(longest), true},
                                 {"total_tokens", static_cast<double>(state_.tokens), true}};
  for (size_t i = 0; i < sources_.size(); ++i)
    if (const Pipeline::SourceLoss& own = source_losses_[i]; own.targets > 0)
      metrics.push_back({kSourceLoss + sources_[i], own.nll / static_cast<double>(own.targets)});
  metrics.insert(metrics.end(), attention.begin(), attention.end());
  const std::vector<Metric> planning = planner_->metrics();
  show_planning(planning, report_);
  metrics.insert(metrics.end(), planning.begin(), planning.end());
  log_->step(report_, metrics);
}

void Trainer::flush_trace() {
  if (trace_.enabled()) trace_.write(gather_texts(*world_, trace_.take(), 0));
}

}  // namespace sb
