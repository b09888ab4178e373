#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "attention/gpu/launch/head_dim_check.h"
#include "cli/at_least.h"
#include "cli/commands.h"
#include "cli/output_file.h"
#include "cli/profile/measured_date.h"
#include "cli/profile/other_work.h"
#include "cli/profile/profile_engine.h"
#include "cli/profile/profile_links.h"
#include "cli/profile/scoring_options.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "core/log.h"
#include "core/thread_pool.h"
#include "device/cuda.h"
#include "model/flops.h"
#include "plan/latency/profile_measure.h"
#include "run/config/recompute_words.h"
#include "train/make_planner.h"
#include "train/training_run.h"

namespace sb {
namespace {

struct ProfileArguments {
  std::string model = "qwen2-25m", run, out = "profile.json", samples, device = "cpu";
  ProfileEngineOptions engine;
  MeasureOptions measure;
  bool tokens_given = false, threads_given = false, device_given = false;
};

// Everything that a run's latencies depend on, as its configuration has it.
ModelShape take_from_run(ProfileArguments& arguments) {
  // What is about to be measured need not have a name yet.
  RunConfig config = load_run_config(arguments.run, {"balance.profile=h200-analytic"});
  if (arguments.device_given)
    config.device = arguments.engine.device;
  else
    arguments.engine.device = config.device;
  arguments.engine.spec = attention_spec(config);
  if (AttentionSpec& spec = arguments.engine.spec; spec.pattern != "topk" && spec.pattern != "mass") {
    if (config.attention.selection.pattern != SelectionPattern::dense)
      log::warning(
          "attention.pattern {} does not follow a budget: sparse attention is measured with mass by planes instead",
          spec.pattern);
    const AttentionSpec usual;
    spec.pattern = usual.pattern;
    spec.score = usual.score;
    spec.score_channels = usual.score_channels;
    spec.score_tokens = usual.score_tokens;
  }
  arguments.engine.recompute = word_of(kRecomputeWords, kept_at_hand(config.train.recompute));
  arguments.engine.lora = config.lora_config();
  if (config.train.precision == TrainOptions::Precision::fp8)
    log::warning("train.precision: fp8 is measured as bfloat16, whose matmuls take longer");
  if (!arguments.tokens_given)
    arguments.measure.max_tokens = packing_limits(config.batch, config.data.max_sequence_length).max_tokens;
  // Ranks of one machine share its cores.
  const int ranks = config.parallel.grid().ranks();
  if (!arguments.threads_given)
    arguments.engine.threads = config.train.threads > 0 ? config.train.threads : std::max(1, available_cores() / ranks);
  arguments.model = arguments.run;
  return model_shape(run_model_config(config));
}

// On a GPU nothing else disturbs a measurement and large shapes take long: fewer repeats, embedding and loss on some
// shapes only. Small micro-batches are of no interest there.
void measure_on_gpu(MeasureOptions& measure) {
  measure.min_tokens = std::min<int64_t>(1024, measure.max_tokens / 4);
  measure.passes = 1;
  measure.least_runs = 1;
  measure.longest_us = 1e5;
  measure.head_everywhere = false;
  measure.refinements = 24;
  measure.calibrate = true;
}

// Heads narrower than the default number of channels take all of theirs.
void settle_channels(AttentionSpec& spec, const ModelShape& shape) {
  if (spec.score != "planes") return;
  SelectionConfig selection;
  selection.score = BlockScore::planes;
  selection.score_channels = static_cast<int>(spec.score_channels);
  settle_score_channels(selection, static_cast<int>(shape.head_dim));
  spec.score_channels = selection.score_channels;
}

// Every measurement as a line: for a look at the fit, or another one.
constexpr const char* kSampleColumns =
    "kind,sequences,tokens,tiles,pairs,scores,linear_forward,linear_backward,attention_forward,attention_backward,"
    "selection,head_forward,head_backward (held_out: predicted,measured)\n";

std::string sample_text(const char* kind, const MeasuredShape& shape, const AttentionSpec& spec) {
  const Work work = shape.work(spec);
  return fmt::format("{},{},{:.0f},{:.0f},{:.0f},{:.0f}", kind, shape.tokens.size(), work.tokens, work.tiles,
                     work.pairs, work.scores);
}

// What one GPU cannot measure are the ways to others.
void describe_gpu(Profile& profile) {
  const cuda::DeviceInfo device = cuda::device_info();
  profile.memory_bytes = device.total_bytes;
  profile.peak_tflops = peak_bf16_flops(device.name) / 1e12;
  fmt::print("links between GPUs: not measured by one; `sparsebalance profile --links` measures them\n");
}

void warn(const std::string& disturbance) {
  if (!disturbance.empty()) log::warning("{}", disturbance);
}

void run(ProfileArguments arguments) {
  check_output(arguments.out);
  check_output(arguments.samples);
  const ModelShape shape = arguments.run.empty() ? find_model_shape(arguments.model) : take_from_run(arguments);
  SB_USER_CHECK(arguments.engine.layers >= 3,
                "--layers: at least three are needed to tell layers from embedding and loss");
  const bool gpu = arguments.engine.device == DeviceKind::cuda;
  if (gpu) {
    require_cuda_head_dim(
        shape.head_dim, ProfileEngine::kCudaDType, arguments.model,
        {.too_large = "use --device cpu",
         .not_in_bf16 = "GPU profiles are measured in bf16: name another model, or use --device cpu"});
    cuda::require_device();
    if (!arguments.tokens_given && arguments.run.empty()) arguments.measure.max_tokens = 131072;
    measure_on_gpu(arguments.measure);
  }
  settle_channels(arguments.engine.spec, shape);
  arguments.engine.spec.dense_below = 0;
  arguments.measure.spec = arguments.engine.spec;
  arguments.engine.max_tokens = arguments.measure.max_tokens;
  // A layer costs the same in a model of fewer.
  const int layers = static_cast<int>(std::clamp<int64_t>(shape.layers, 3, arguments.engine.layers));
  arguments.engine.layers = layers;
  ProfileEngine engine(shape, arguments.engine);
  MeasureTarget target;
  target.parts = [&](const MeasuredShape& s, bool head) { return engine.parts(s, head); };
  target.whole = [&](const MeasuredShape& s) { return engine.whole(s); };
  if (!gpu) {
    target.transfer = [&](int64_t bytes) { return engine.transfer(bytes); };
    target.reduction = [&](int64_t bytes) { return engine.reduction(bytes); };
  }
  target.layers = layers;
  arguments.measure.pieces = true;
  Progress progress;
  arguments.measure.progress = [&](int done, int total, const std::string& what) {
    // Small shapes come first, so the rest is guessed only when there is something to guess from.
    progress.show(static_cast<double>(done) / std::max(1, total), what, 4 * done >= total);
  };
  std::string samples = kSampleColumns;
  if (!arguments.samples.empty()) {
    arguments.measure.measured = [&](const MeasuredShape& batch, const MeasuredTimes& t) {
      samples += sample_text("parts", batch, arguments.measure.spec) +
                 fmt::format(",{:.2f},{:.2f},{:.2f},{:.2f},{:.2f},{:.2f},{:.2f}\n", t.linear_forward, t.linear_backward,
                             t.attention_forward, t.attention_backward, t.selection, t.head_forward, t.head_backward);
    };
    arguments.measure.checked = [&](const MeasuredShape& batch, double predicted, double measured) {
      samples += sample_text("held_out", batch, arguments.measure.spec) +
                 fmt::format(",{:.2f},{:.2f},,,,,\n", predicted, measured);
    };
  }
  // What a GPU takes hardly depends on the cores.
  if (gpu) warn(disturbed_on_gpu(cuda::processes()));
  const OtherWork other_work(engine.threads());
  Profile profile = measure_profile(shape, target, arguments.measure);
  progress.clear();
  if (!gpu) warn(other_work.disturbance());
  profile.name = arguments.out;
  profile.machine = engine.machine();
  profile.date = measured_date();
  profile.recompute = arguments.engine.recompute;
  profile.lora_rank = arguments.engine.lora.rank;
  if (gpu) describe_gpu(profile);
  if (!arguments.samples.empty()) write_output(arguments.samples, samples);
  write_output(arguments.out, write_profile(profile));
  const AttentionSpec& spec = arguments.measure.spec;
  fmt::print("{}: {}\n{}, {} layers measured in {:.0f} s, pairs selected with {} by {}\n", arguments.model,
             describe(shape), profile.machine, layers, progress.seconds(), spec.pattern, spec.score);
  fmt::print("prediction error on {} held-out micro-batches: median {:.1f}%, p95 {:.1f}%\nwrote {}\n",
             profile.held_out.count, 100 * profile.held_out.median, 100 * profile.held_out.p95, arguments.out);
}

}  // namespace

void add_profile_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("profile", "measure this machine with a model's shape, so that latencies can be predicted");
  auto a = std::make_shared<ProfileArguments>();
  auto links = std::make_shared<LinkArguments>();
  a->engine.spec.budget = 1024;
  command->add_option("--model", a->model, "model name or config.json (names: see simulate --help)")
      ->capture_default_str();
  command
      ->add_option("--run", a->run,
                   "run.yaml to take model, budget, blocks, recompute, adapters, longest micro-batch and threads from")
      ->check(CLI::ExistingFile);
  command->add_option("--device", a->device, "cpu or cuda; with --run that of the run unless given")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--out", a->out, "file to write")->capture_default_str();
  command->add_option("--samples", a->samples, "also write every measurement to this file, as CSV");
  command
      ->add_option("--max-tokens", a->measure.max_tokens,
                   "largest micro-batch to measure, in tokens; on cuda 131072 unless given")
      ->check(at_least(1), "at least 1")
      ->capture_default_str();
  command->add_option("--budget", a->engine.spec.budget, "base budget of the run, keys per query")
      ->capture_default_str();
  command->add_option("--block", a->engine.spec.block, "tokens per key block")->capture_default_str();
  command->add_option("--query-block", a->engine.spec.query_block, "tokens per query block")->capture_default_str();
  add_scoring_options(*command, a->engine.spec);
  command->add_option("--recompute", a->engine.recompute, "recompute level of the run: none, attention or layer")
      ->check(CLI::IsMember({"none", "attention", "layer"}))
      ->capture_default_str();
  command->add_option("--lora", a->engine.lora.rank, "rank of LoRA adapters on a frozen model; 0: full fine-tuning")
      ->check(CLI::Range(0, 1 << 12))
      ->capture_default_str();
  command->add_option("--layers", a->engine.layers, "number of layers to build; the times are scaled to the rest")
      ->capture_default_str();
  command->add_option("--threads", a->engine.threads, "worker threads; 0: all cores")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_option("--held-out", a->measure.held_out, "number of random micro-batches to check the predictions with")
      ->check(CLI::Range(0, 100000))
      ->capture_default_str();
  command->add_option("--repeats", a->measure.max_repeats, "maximum repeats of a measurement")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  command->add_option("--links", links->out,
                      "measure the links between the ranks that are started, instead of this machine, and write them "
                      "to this file; with --device cuda those between their GPUs too");
  command->add_option("--ranks", links->ranks, "--links: start this many processes on this machine")
      ->check(CLI::Range(2, 4096));
  command->callback([a, links, command] {
    SB_USER_CHECK(!links->out.empty() || command->count("--ranks") == 0, "--ranks: only applies to --links");
    if (!links->out.empty()) {
      for (const CLI::Option* option : command->get_options())
        SB_USER_CHECK(option->count() == 0 || option->check_lname("links") || option->check_lname("ranks") ||
                          option->check_lname("device"),
                      "{}: has no effect with --links; remove one of the two", option->get_name());
      links->gpu = a->device == "cuda";
      return profile_links(*links);
    }
    for (const char* option : {"--model", "--budget", "--block", "--query-block", "--pattern", "--score",
                               "--score-channels", "--score-tokens", "--recompute", "--lora"})
      SB_USER_CHECK(a->run.empty() || command->count(option) == 0, "{}: already set by --run {}; remove one of the two",
                    option, a->run);
    check_scoring_options(*command, a->engine.spec);
    a->tokens_given = command->count("--max-tokens") > 0;
    a->threads_given = command->count("--threads") > 0;
    a->device_given = command->count("--device") > 0;
    a->engine.device = a->device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu;
    run(*a);
  });
}

}  // namespace sb
