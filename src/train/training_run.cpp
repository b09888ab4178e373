#include "train/training_run.h"

#include <fmt/format.h>

#include <sys/resource.h>

#include <algorithm>

#include "attention/cpu/sparse_attention.h"
#include "attention/factory/make_attention.h"
#include "attention/gpu/launch/head_dim_check.h"
#include "attention/gpu/launch/head_dims.h"
#include "comm/first_rank.h"
#include "core/cpu_isa.h"
#include "core/errors.h"
#include "core/files/durable_file.h"
#include "core/log.h"
#include "core/memory_plan.h"
#include "device/blas.h"
#include "device/cuda.h"
#include "device/rate/matmul_rate.h"
#include "parallel/grid.h"
#include "parallel/ring/gpu/cuda_ring_attention.h"
#include "parallel/ring/gpu/cuda_ring_memory.h"
#include "parallel/ring/ring_attention.h"
#include "run/common_directory.h"
#include "run/config/run_config_lora.h"
#include "run/config/run_config_precision.h"
#include "run/disk_room.h"
#include "run/host_memory.h"
#include "run/logs/event_log.h"
#include "run/machine.h"
#include "run/rank_start.h"
#include "train/adapter_start.h"
#include "train/index_dump.h"
#include "train/lr_schedule.h"
#include "train/make_planner.h"
#include "train/run_estimate.h"
#include "train/sources.h"
#include "train/stage_split.h"

namespace sb {
namespace {

// Where a ring of GPUs selects pairs and makes lists.
bool lists_on_device(const RunConfig& config) {
  if (config.parallel.ring_lists == ParallelOptions::RingLists::automatic && config.balance.chunk != 0) return false;
  return config.parallel.ring_lists != ParallelOptions::RingLists::host &&
         ring_selects_on_device(config.attention.selection);
}

// What the kernels would refuse in the first step.
void check_head_dim(const RunConfig& config, const ModelConfig& model) {
  if (config.device != DeviceKind::cuda) return;
  const std::string name = config.model.init ? "model.init" : (config.model.path / "config.json").string();
  require_cuda_head_dim(model.head_dim, config.dtype(), name,
                        {.too_large = "set device: cpu", .not_in_bf16 = "set train.precision: float32"});
  const bool measures = config.attention.coverage_rows > 0 &&
                        config.attention.selection.pattern != SelectionPattern::dense &&
                        (config.parallel.cp == 1 || lists_on_device(config));  // lists from the host: measured there
  SB_USER_CHECK(!measures || model.head_dim % kCoverageHeadDimUnit == 0,
                "{}: head_dim is {}, but on GPUs coverage can only be measured for multiples of {}; set "
                "attention.coverage_rows: 0",
                name, model.head_dim, kCoverageHeadDimUnit);
}

void check_pipeline(const RunConfig& config, const ModelConfig& model) {
  SB_USER_CHECK(config.parallel.pp <= model.layers,
                "parallel.pp: {} stages are more than the model's {} layers: some would be empty; lower it",
                config.parallel.pp, model.layers);
}

// What ranks that share products cannot cut into equal parts.
void check_tensor_parallel(const RunConfig& config, const ModelConfig& model) {
  const int tp = config.parallel.tp;
  if (tp == 1) return;
  const std::string name = config.model.init ? "model.init" : (config.model.path / "config.json").string();
  const auto divides = [&](int64_t count, const char* what) {
    SB_USER_CHECK(count % tp == 0, "parallel.tp: {} ranks cannot divide the {} {} of {} equally; set it to a divisor",
                  tp, count, what, name);
  };
  divides(model.heads, "attention heads");
  divides(model.intermediate_size, "channels (intermediate_size)");
  SB_USER_CHECK(model.kv_heads % tp == 0 || tp % model.kv_heads == 0,
                "parallel.tp: {} ranks and the {} key/value heads of {}: one must be a multiple of the other; change "
                "parallel.tp",
                tp, model.kv_heads, name);
  SB_USER_CHECK(tp <= model.kv_heads || config.attention.selection.pattern == SelectionPattern::dense,
                "parallel.tp: {} ranks are more than the {} key/value heads of {}, but attention.pattern makes one "
                "list for all query heads of a key/value head, which ranks cannot share; set parallel.tp to {} or "
                "less, or attention.pattern: dense",
                tp, model.kv_heads, name, model.kv_heads);
  SB_USER_CHECK(config.train.precision != TrainOptions::Precision::fp8,
                "parallel.tp: does not support train.precision: fp8, since every rank would scale its shard of a "
                "tensor by itself; set parallel.tp: 1 or train.precision: auto");
  const bool drops = config.device == DeviceKind::cuda && config.lora_config().dropout > 0;
  constexpr int64_t kTogether = 8;  // channels whose dropout one draw of random bits decides
  SB_USER_CHECK(!drops || (int64_t{model.heads} * model.head_dim / tp % kTogether == 0 &&
                           model.intermediate_size / tp % kTogether == 0),
                "lora.dropout: on GPUs each of parallel.tp {} ranks must have a multiple of {} channels of {}; lower "
                "parallel.tp, or set lora.dropout: 0",
                tp, kTogether, name);
  SB_USER_CHECK(tp <= model.vocab_size, "parallel.tp: {} ranks are more than the vocabulary of {}; lower it", tp,
                model.vocab_size);
}

// Before anything is written, and whatever attention the layout has: a ring would take layers that are not there.
void check_dense_layers(const RunConfig& config, const ModelConfig& model) {
  const SelectionConfig& selection = config.attention.selection;
  if (selection.pattern == SelectionPattern::dense) return;
  for (const int64_t layer : selection.dense_layers)
    SB_USER_CHECK(layer < model.layers, "attention.dense_layers: there is no layer {}; the model has layers 0 to {}",
                  layer, model.layers - 1);
}

// Hopper's; later ones take other scales, which nobody tried.
void check_fp8_device(const RunConfig& config) {
  if (config.train.precision != TrainOptions::Precision::fp8) return;
  const cuda::DeviceInfo device = cuda::device_info();
  SB_USER_CHECK(device.major == 9,
                "train.precision: fp8 needs a GPU of compute capability 9.0 (Hopper), but {} has {}.{}; set "
                "train.precision: auto",
                device.name, device.major, device.minor);
}

// Before anything is taken or written: a run started with another number of ranks says so at once.
void check_ranks(const RunConfig& config, const RunRanks& ranks) {
  check_grid(config.parallel.grid(), ranks.world ? ranks.world->size() : 1);
}

// What a run names and may not have, before the data are looked through and the memory is planned.
void check_named(const RunConfig& config, const ModelConfig& model) {
  check_run_directory(config);
  if (!config.balance.profile.empty()) run_profile(config, model);
  check_adapter_to_continue(config, model);
}

// Of a budget that leaves nothing to select, and of one that selection cannot keep: a query block always lists its
// sinks, its neighbours and two blocks more.
void warn_of_budget(const SelectionConfig& selection, int64_t longest) {
  if (longest <= selection.dense_limit()) {
    log::warning(
        "attention.pattern has no effect: the longest sequence has {} tokens, and sequences of up to {} use dense "
        "attention; lower attention.{}",
        longest, selection.dense_limit(), selection.dense_below < 0 ? "budget" : "dense_below");
    return;
  }
  const int64_t least = int64_t{selection.sink_blocks + selection.local_blocks + 2} * selection.block;
  const bool follows = selection.pattern == SelectionPattern::topk || selection.pattern == SelectionPattern::mass;
  if (!follows || selection.budget >= least) return;
  log::warning(
      "attention.budget: {} is below {} sink + {} local + 2 blocks of {} tokens = {}, so queries see up to {} keys; "
      "raise it, or lower attention.block",
      selection.budget, selection.sink_blocks, selection.local_blocks, selection.block, least, least);
}

// Rank 0's planner of a run with balance.replay, made while nothing is written yet, so that plans of another run are
// refused then and not in the middle of this one. Nothing on other ranks and for other runs.
std::unique_ptr<BalancedPlanner> make_replaying_planner(const RunConfig& config, const TrainerParts& parts) {
  if (config.balance.replay.empty()) return nullptr;
  const ReplayedSteps steps{
      .last = config.train.max_steps,
      .batch = [&](int64_t step) { return step_batch(config, parts.source, TrainState(), step); },
      .lengths_known = parts.source.state().empty()};  // otherwise later ones follow from the training
  std::unique_ptr<BalancedPlanner> planner;
  const auto make = [&] {  // reads the whole log
    planner = make_balanced_planner(config, parts.model, Trainer::packing(config, parts), steps);
  };
  if (parts.world)
    on_first_rank(*parts.world, make);
  else
    make();
  return planner;
}

// The ranks that share this one's sequences: for what they tell each other, and for data on their devices. Nothing
// where none do.
struct RingGroups {
  std::unique_ptr<Communicator> host, data;

  RingGroups(const RunConfig& config, Communicator* world, const RankDevice* device) {
    const GridShape grid = config.parallel.grid();
    if (grid.cp == 1) return;
    const GridPlace own = grid_place(grid, world->rank());
    const int ring = (own.dp * grid.pp + own.stage) * grid.tp + own.tp;
    host = world->split(ring, own.cp, "cp");
    if (device) data = device->data().split(ring, own.cp, "cp");
  }
};

bool validates_dense(const RunConfig& config) {
  return config.train.validation_attention == TrainOptions::ValidationAttention::dense;
}

std::unique_ptr<Attention> attention_of(const RunConfig& config, const ModelConfig& model, const RingGroups& ring) {
  SelectionConfig selection = config.attention.selection;
  settle_score_channels(selection, model.head_dim);
  const int64_t largest = std::min(largest_budget(config), config.data.max_sequence_length);
  const bool dense = config.attention.selection.pattern == SelectionPattern::dense;
  const int coverage_rows = dense ? 0 : static_cast<int>(config.attention.coverage_rows);
  if (ring.host) {
    RingAttention::Options options{selection, model.layers, config.parallel.placement, config.parallel.node_size,
                                   largest,   coverage_rows};
    options.any_dense = validates_dense(config);
    options.dtype = config.dtype();
    options.deterministic = config.train.deterministic;
    options.lists_on_device = lists_on_device(config);
    if (ring.data) return make_cuda_ring_attention(*ring.host, *ring.data, options);
    return std::make_unique<RingAttention>(*ring.host, options);
  }
  SparseAttention::Options options{selection, model.layers, coverage_rows};
  options.largest_budget = largest;
  return make_attention(options, config.device, config.train.deterministic);
}

std::string grid_text(const RunConfig& config, const ModelConfig& model, const RankDevice* device) {
  const ParallelOptions& parallel = config.parallel;
  const int ranks = parallel.grid().ranks();
  if (ranks == 1) return config.device == DeviceKind::cuda ? "1 process on " + cuda::device_info().name : "1 process";
  std::string text =
      fmt::format("{}: dp {} x pp {} x cp {} x tp {}", device ? device->text() : fmt::format("{} ranks", ranks),
                  parallel.dp, parallel.pp, parallel.cp, parallel.tp);
  if (parallel.pp == 1) return text;
  const std::vector<int> first_layers = split_layers(config, model);
  std::vector<std::string> stages;
  for (size_t i = 0; i + 1 < first_layers.size(); ++i)
    stages.push_back(fmt::format("{}-{}", first_layers[i], first_layers[i + 1] - 1));
  return text + fmt::format(", layers {}", fmt::join(stages, " | "));
}

std::string ranks_text(const RunConfig& config, const ModelConfig& model, const RankDevice* device) {
  const std::string text = grid_text(config, model, device);
  const RehearsedGrid& cluster = config.parallel.rehearse;
  return cluster.on() ? text + fmt::format(", rehearsing dp {} x pp {}", cluster.dp, cluster.pp) : text;
}

std::string header(const RunConfig& config, const TrainerParts& parts, int64_t memory_limit) {
  const PackingLimits limits = Trainer::packing(config, parts);
  const int threads = thread_count(config, parts.cores);
  const bool several = config.parallel.grid().ranks() > 1;
  std::string text = fmt::format(
      "layout\n  {}, {} thread{}{}; {} sequences per step, up to {} sequences and {} tokens per micro-batch\n",
      ranks_text(config, parts.model, parts.device), threads, threads == 1 ? "" : "s", several ? " per rank" : "",
      config.batch.global_batch_size, most_sequences(config, limits), limits.max_tokens);
  for (int stage = 0; stage < config.parallel.pp; ++stage) {
    text += several ? "\nmemory plan per rank" : "\nmemory plan";
    text += config.parallel.pp == 1 ? "\n" : fmt::format(" of stage {}\n", stage);
    text += Trainer::memory_plan(config, parts, stage).table(memory_limit);
  }
  return text;
}

// This rank's part of what is left on the GPU, less what every rank takes outside the plan: kernels, the product
// library, NCCL's buffers. `device`: of one of several ranks.
constexpr int64_t kNcclMemory = int64_t{1} << 29;

int64_t device_memory(const RankDevice* device) {
  constexpr int64_t kOutsideThePlan = int64_t{1} << 29;
  const int64_t part = cuda::device_info().free_bytes / (device ? device->sharing() : 1);
  return std::max<int64_t>(part - kOutsideThePlan - (device && device->over_nccl() ? kNcclMemory : 0), 1);
}

// What the run computes on, and at which rate (FLOP/s) its leader's threads multiply.
std::string machine_line(const RunConfig& config, double rate, int threads) {
  const std::string text = machine_text(config.device, available_cores());
  return config.device == DeviceKind::cuda ? text : text + ", " + describe_matmul_rate(rate, threads);
}

void warn_of_narrow_kernels(const RunConfig& config) {
  if (config.device == DeviceKind::cuda) return;
  if (const std::string text = warn_of_narrow(blas_kernels(), cpu_isa()); !text.empty()) log::warning("{}", text);
}

// Of threads, which no plan counts since it costs no memory: OpenBLAS' buffers, stacks, what malloc reserves.
int64_t thread_address_space(int threads) {
  constexpr int64_t kStack = int64_t{8} << 20, kHeap = int64_t{64} << 20;
  return threads * (kBlasBufferBytes + kStack + kHeap);
}

// This rank's part of what is left on its machine, and there or on its GPU for training. 0: not known.
struct AvailableMemory {
  int64_t host = 0, training = 0;
};

AvailableMemory available_memory(const RunConfig& config, const RunRanks& ranks, const RankDevice* device) {
  AvailableMemory memory;
  memory.host = available_host_memory(ranks.local_ranks, thread_address_space(thread_count(config, ranks.cores)));
  memory.training = config.device == DeviceKind::cuda ? device_memory(device) : memory.host;
  return memory;
}

std::string cure(const RunConfig& config, int offload) {
  std::string text;
  rlimit limit = {};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    text += fmt::format(
        "ulimit -v allows {} of address space, of which threads take {}: raise it, or lower train.threads. ",
        format_bytes(static_cast<int64_t>(limit.rlim_cur)),
        format_bytes(thread_address_space(thread_count(config, available_cores()))));
  if (config.train.recompute != Recompute::layer) text += "Set train.recompute: layer. ";
  if (config.device == DeviceKind::cuda && config.train.offload >= 0)
    text +=
        fmt::format("train.offload is {}; with -1 as many layer inputs as needed are kept in host memory. ", offload);
  else if (offload > 0)
    text += fmt::format("The inputs of {} layers are already kept in host memory. ", offload);
  return text + "Lower batch.micro_batch_tokens or data.max_sequence_length.";
}

// Throws OutOfMemory where this rank's plan does not fit.
void check_memory(const RunConfig& config, const TrainerParts& parts, const AvailableMemory& memory) {
  const int stage = parts.world ? grid_place(config.parallel.grid(), parts.world->rank()).stage : 0;
  const MemoryPlan plan = Trainer::memory_plan(config, parts, stage);
  plan.check_fits(memory.training, cure(config, parts.offload[static_cast<size_t>(stage)]));
  if (plan.host_total() <= memory.host || memory.host == 0) return;
  throw OutOfMemory(
      "the memory plan does not fit: it needs {} of host memory, of which {} are available; {}lower "
      "batch.micro_batch_tokens or data.max_sequence_length\n"
      "{}",
      format_bytes(plan.host_total()), format_bytes(memory.host),
      config.train.offload_optimizer ? "set train.offload_optimizer: false, use more ranks, or " : "", plan.table());
}

// What the ranks copy of a checkpoint to write it while they go on: nothing where one of them has no room for its copy.
std::vector<int64_t> copies_that_fit(const RunConfig& config, const TrainerParts& parts, int64_t host_memory) {
  if (config.train.save_steps == 0) return {};  // the last one alone, for which nobody waits
  const std::vector<int64_t> copies = Trainer::checkpoint_copies(config, parts);
  const bool first = parts.world == nullptr || parts.world->rank() == 0;
  const int stage = parts.world ? grid_place(config.parallel.grid(), parts.world->rank()).stage : 0;
  const MemoryPlan plan = Trainer::memory_plan(config, parts, stage);
  const int64_t planned = config.device == DeviceKind::cpu ? plan.total() : plan.host_total();
  const int64_t copy = copies[static_cast<size_t>(stage)];
  const bool fits = host_memory == 0 || planned + copy <= host_memory;
  if (parts.world ? parts.world->all_reduce(int32_t{fits}, ReduceOp::min) != 0 : fits) return copies;
  // Where not even the rest fits there will be no training.
  if (first && planned <= host_memory)
    log::info("training pauses while a checkpoint is saved: host memory has no room for a copy of {}{}",
              format_bytes(*std::ranges::max_element(copies)), parts.world ? " on every rank" : "");
  return {};
}

// Of the whole run, whoever started it how often.
std::string times_line(const std::filesystem::path& output, double saving) {
  const RunTimes times = run_times(output);
  std::string text = fmt::format("time        trained {}, {} of this start for checkpoints, ",
                                 format_duration(times.trained), format_duration(saving));
  if (times.losses == 0) return text + "nothing lost\n";
  return text + fmt::format("lost {} in {} restart{}\n", format_duration(times.lost), times.losses,
                            times.losses == 1 ? "" : "s");
}

std::string footer(const RunConfig& config, const TrainSummary& summary) {
  const std::string output = config.train.output_dir.string();
  std::string text;
  const RehearsedGrid& cluster = config.parallel.rehearse;
  if (const BalanceSummary& balance = summary.balance; balance.steps > 0 && cluster.on())
    text += fmt::format(
        "rehearsal of dp {} x pp {}: {} steps would take {:.2f} s there, without the optimizer; run in order, their "
        "schedules would take {:.2f} times as long (both predicted)\n",
        cluster.dp, cluster.pp, balance.steps, balance.cluster_seconds, balance.gain);
  else if (balance.steps > 0)
    text += fmt::format(
        "balancing: the busiest rank had {:.2f} times the mean work, and ranks were idle {:.0f}% of the time; run in "
        "order, the schedules of these steps would take {:.2f} times as long (predicted)\n",
        balance.rank_imbalance, balance.bubble_percent, balance.gain);
  if (const BalanceSummary& balance = summary.balance; balance.compared > 0)
    text += fmt::format(
        "measured: the same batches run in order took {:.2f} times as long ({} steps compared, without the optimizer "
        "update)\n",
        balance.in_order / balance.balanced, balance.compared);
  if (summary.seconds > 0)
    text += fmt::format("{} tokens in {} ({:.0f} tokens/s)\n", summary.tokens, format_duration(summary.seconds),
                        static_cast<double>(summary.tokens) / summary.seconds);
  else if (!summary.interrupted)
    text += fmt::format("nothing left to train: step {} is done and train.max_steps is {}; raise it to continue\n",
                        summary.steps, config.train.max_steps);
  if (summary.skipped > 0) text += fmt::format("{} steps skipped (gradient not finite)\n", summary.skipped);
  const std::string times = times_line(config.train.output_dir, summary.saving);
  if (summary.interrupted)
    return text + fmt::format("stopped after step {} of {}; saved {}; the same command resumes from there\n{}",
                              summary.steps, config.train.max_steps, summary.checkpoint.string(), times);
  if (summary.first_validation) text += "before: " + format_validation(*summary.first_validation) + "\n";
  if (summary.last_validation) text += "after:  " + format_validation(*summary.last_validation) + "\n";
  text += fmt::format("model       {}\ncheckpoint  {}\nsettings    {}/run.yaml\nmetrics     {}/metrics.jsonl\n",
                      summary.final_model.string(), summary.checkpoint.string(), output, output);
  if (!summary.merged.empty()) text += fmt::format("merged      {}\n", summary.merged.string());
  if (config.train.tensorboard) text += fmt::format("curves      tensorboard --logdir {}/tensorboard\n", output);
  if (!summary.trace.empty()) text += fmt::format("trace       {}\n", summary.trace.string());
  text += fmt::format("report      sparsebalance report {}\n", output);
  return text + times;
}

void warn_of_lookahead(const RunConfig& config, bool validates) {
  const bool in_validation = validates && !validates_dense(config);
  std::string cure = in_validation ? "train.validation_attention: dense validates without it" : "";
  if (config.attention.selection.pattern != SelectionPattern::vertical_slash)
    cure += fmt::format("{}attention.selection: causal trains without it", cure.empty() ? "" : ", ");
  log::warning(
      "attention.selection: lookahead lets later tokens influence which keys earlier ones see{}: losses may be lower "
      "than those of a model that cannot look ahead{}",
      in_validation ? ", in training and in validation" : "", cure.empty() ? "" : "; " + cure);
}

// What a user may not expect of these settings. `sparse`: there is a pattern; `ring_on_devices`: GPUs share sequences.
void say_what_will_happen(const RunConfig& config, const Sources& sources, bool sparse, bool ring_on_devices) {
  if (config.train.num_train_epochs > 0)
    log::info("train.num_train_epochs {}: {} steps of {} sequences", config.train.num_train_epochs,
              config.train.max_steps, config.batch.global_batch_size);
  if (!sparse) return;
  const SelectionConfig& selection = config.attention.selection;
  warn_of_budget(selection, sources.train->max_length());
  if (selection.order == SelectionOrder::lookahead && selection.pattern != SelectionPattern::window)
    warn_of_lookahead(config, sources.validation_set.source != nullptr);
  if (ring_on_devices && !lists_on_device(config))
    log::warning("parallel.cp on GPUs: {} selects pairs on the CPU, which is slow",
                 config.parallel.ring_lists == ParallelOptions::RingLists::host ? "parallel.ring_lists: host"
                 : ring_selects_on_device(selection)                            ? "balance.chunk"
                                                                                : "this attention.pattern");
}

// Rank 0 opens and decides; the others follow.
std::unique_ptr<RunDirectory> open_run_directory(const RunConfig& config, Communicator* world) {
  if (world == nullptr || world->size() == 1) return std::make_unique<RunDirectory>(config);
  check_common_directory(*world, config.train.output_dir);
  // Every rank reads its share of the checkpoint that rank 0 asks about; on rank 0, what any of them found.
  const auto look = [&](const std::filesystem::path& checkpoint) -> std::optional<std::string> {
    std::string own;
    on_all_ranks(*world, [&] { own = find_damage(checkpoint, {world->rank(), world->size()}).value_or(""); });
    for (const std::string& damage : gather_texts(*world, own, 0))
      if (!damage.empty()) return damage;
    return std::nullopt;
  };
  if (world->rank() == 0) {
    auto directory = std::make_unique<RunDirectory>(config, [&](const std::filesystem::path& checkpoint) {
      broadcast_text(*world, checkpoint.string(), 0);
      return look(checkpoint);
    });
    broadcast_text(*world, "", 0);
    broadcast_text(*world, directory->resume_from() ? directory->resume_from()->string() : "", 0);
    return directory;
  }
  for (std::string asked; !(asked = broadcast_text(*world, "", 0)).empty();) look(asked);
  const std::string resume_from = broadcast_text(*world, "", 0);
  return std::make_unique<RunDirectory>(
      config, resume_from.empty() ? std::nullopt : std::optional<std::filesystem::path>(resume_from));
}

// What ends a run goes to events.jsonl; a rank that was lost is noted by the one that noticed.
TrainSummary run_noting_failures(Trainer& trainer, Communicator* world, const std::filesystem::path& directory) {
  const int rank = world ? world->rank() : 0;
  try {
    return trainer.run();
  } catch (const CommAborted&) {
    throw;
  } catch (const CommTimeout& error) {
    append_event_once(directory, {.event = "timeout", .rank = rank, .reason = error.what()});
    throw;
  } catch (const std::exception& error) {
    append_event(directory, {.event = "failed", .rank = rank, .reason = error.what()});
    throw;
  }
}

}  // namespace

ModelConfig run_model_config(const RunConfig& config) {
  ModelConfig model = config.model.init ? *config.model.init : read_model_config(config.model.path / "config.json");
  adapt_model_config(config, model);
  check_head_dim(config, model);
  check_lora_fits(config, model);
  check_dense_layers(config, model);
  check_pipeline(config, model);
  check_tensor_parallel(config, model);
  check_precision_fits(config, model);
  return model;
}

TrainSummary run_training(const RunConfig& given, std::FILE* out, bool terminal,
                          const std::function<bool()>& stop_requested, const RunRanks& ranks) {
  RunConfig config = given;
  if (config.device == DeviceKind::cuda) cuda::require_device();
  check_fp8_device(config);
  check_ranks(config, ranks);
  const bool leads = ranks.world == nullptr || ranks.world->rank() == 0;
  settle_threads(config, ranks.world, ranks.cores);
  Console console(out, terminal, config.train.log_steps);
  const ModelConfig model = run_model_config(config);
  if (leads) check_named(config, model);
  // Before anything else on a device, since it chooses the GPU.
  std::unique_ptr<RankDevice> device;
  if (config.device == DeviceKind::cuda && ranks.world && ranks.world->size() > 1)
    device = std::make_unique<RankDevice>(config, *ranks.world, ranks.local_rank, thread_count(config, ranks.cores));
  const RingGroups ring(config, ranks.world, device.get());
  const std::unique_ptr<Attention> attention = attention_of(config, model, ring);
  auto* sparse = dynamic_cast<SelectingAttention*>(attention.get());
  if (config.attention.selection.pattern == SelectionPattern::dense) sparse = nullptr;
  const Sources sources = make_sources(config, model.vocab_size, leads);
  settle_steps(config, sources.train->size(), leads);
  const SequenceSource* validation = sources.validation_set.source;
  settle_chunk(config, model, *sources.train,
               std::max(sources.train->max_length(), validation ? validation->max_length() : 0), ranks.world);
  if (leads) say_what_will_happen(config, sources, sparse != nullptr, ring.data != nullptr);
  // Data-parallel copies of a stage see different sequences: the first one's lists are enough. (None share sequences or
  // layers: the settings were checked.)
  std::optional<IndexDump> dump;
  if (!config.attention.dump_index.empty() && (ranks.world == nullptr || ranks.world->rank() < config.parallel.pp))
    dump.emplace(*attention, config.device, config.attention.dump_index, config.attention.dump_index_step);
  TrainerParts parts{model,          dump ? static_cast<Attention&>(*dump) : *attention,
                     *sources.train, sources.validation_set,
                     console,        stop_requested,
                     sparse};
  parts.dump = dump ? &*dump : nullptr;
  parts.world = ranks.world;
  parts.cores = ranks.cores;
  parts.device = device.get();
  const std::unique_ptr<BalancedPlanner> planner = make_replaying_planner(config, parts);
  parts.planner = planner.get();

  const AvailableMemory memory = available_memory(config, ranks, device.get());
  if (device) ranks.world->barrier();  // before anybody takes any
  parts.offload = Trainer::offload(config, parts, memory.training);
  // They only save time, and what NCCL takes grows with the communicators: as much again stays free.
  const int64_t for_codes = memory.training - (device && device->over_nccl() ? kNcclMemory : 0);
  parts.kept_codes = Trainer::kept_codes(config, parts, std::max<int64_t>(for_codes, memory.training > 0 ? 1 : 0));
  parts.checkpoint_copies = copies_that_fit(config, parts, memory.host);
  if (ranks.world) check_links(config, *ranks.world);
  const std::string links = leads ? links_text(config, model) : std::string();
  if (leads) console.text(header(config, parts, memory.training));
  if (!links.empty()) console.text("links: " + links);
  check_memory(config, parts, memory);

  const std::unique_ptr<RunDirectory> directory = open_run_directory(config, ranks.world);
  if (leads) {
    warn_of_little_room(config, model);
    const auto& checkpoint = directory->resume_from();
    const bool own = checkpoint && checkpoint->parent_path() == directory->path();
    note_resume(directory->path(), own ? read_train_state(*checkpoint).step : 0);
  }
  Trainer trainer(config, parts, *directory);
  const std::string table = introduce_ranks(config, ranks.world, console);
  const double rate = measure_products(trainer.exec(), model, config.dtype(),
                                       most_rank_tokens(config, Trainer::packing(config, parts)));
  if (leads) {
    replace_file(directory->path() / "machine.txt", machine_line(config, rate, thread_count(config, parts.cores)) +
                                                        (links.empty() ? "\n" : "; links: " + links + "\n") + table);
    warn_of_narrow_kernels(config);
  }
  const RunEstimate estimate = estimate_run(config, model, *sources.train, trainer.state(), rate);
  if (ranks.world) settle_timeout(config, *ranks.world, estimate.step_seconds, checkpoint_bytes(config, model));
  if (leads && estimate.steps > 0) {
    console.text(describe(estimate));
    warn_of_long_run(estimate, config);
  }
  const TrainSummary summary = run_noting_failures(trainer, ranks.world, directory->path());
  if (leads) {
    append_event(directory->path(), {.event = summary.interrupted ? "stopped" : "finished", .step = summary.steps});
    console.text(footer(config, summary));
  }
  return summary;
}

}  // namespace sb
