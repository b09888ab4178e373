#include "cli/eval/eval_options.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/output_file.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "core/log.h"
#include "run/checkpoint/selection_file.h"
#include "run/config/run_config.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// What was trained, --adapter or else --model, without the slash that shells complete with, so that what it lies in is
// its parent.
fs::path model_folder(const EvalOptions& options) {
  const fs::path model = fs::absolute(options.adapter.empty() ? options.model : options.adapter).lexically_normal();
  return model.has_filename() ? model : model.parent_path();
}

// run.yaml lies beside a checkpoint's weights, or in the run's folder beside the final model.
fs::path find_run_config(const EvalOptions& options) {
  if (!options.run_config.empty()) return options.run_config;
  const fs::path model = model_folder(options);
  for (const fs::path& candidate : {model / "run.yaml", model.parent_path() / "run.yaml"}) {
    if (fs::exists(candidate)) return candidate;
  }
  throw UserError("--attention as-trained: no run.yaml in {} or next to it; name it with --run-config", options.model);
}

// What selection had learned in training, which a checkpoint and a final model hold.
LearnedSelection find_learned(const EvalOptions& options, const SelectionConfig& selection) {
  if (!selection.learns_thresholds() && !selection.judges_by_planes()) return {};
  const fs::path folder = model_folder(options);
  FoundSelection found = read_selection_of(folder, read_model_config(fs::path(options.model) / "config.json"));
  if (!found.problem.empty())
    log::warning("{}; {}", found.problem,
                 selection.judges_by_planes()
                     ? "the planes of attention.score are chosen in a first pass over the data"
                     : "the thresholds of attention.pattern mass start from their initial values");
  return std::move(found.learned);
}

}  // namespace

void add_common(CLI::App* command, EvalOptions& options, bool model_required) {
  auto* model =
      command->add_option("--model", options.model, "the model: a Hugging Face directory, such as final/ of a run");
  if (model_required) model->required();
  command->add_option("--adapter", options.adapter, "PEFT directory of a LoRA adapter for the model");
  command->add_option("--attention", options.attention, "dense, or as-trained: the attention of the run's run.yaml")
      ->check(CLI::IsMember({"dense", "as-trained"}))
      ->capture_default_str();
  command->add_option("--run-config", options.run_config, "run.yaml for as-trained, if it is not next to the model");
  command
      ->add_option("--max-tokens", options.max_tokens, "maximum sequence length in tokens, prompt and answer together")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--device", options.device, "device to run the model on")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command
      ->add_option("--precision", options.precision,
                   "dtype of weights and activations; auto: bfloat16 on cuda, float32 on the CPU")
      ->check(CLI::IsMember({"auto", "float32"}))
      ->capture_default_str();
  command->add_option("--threads", options.threads, "worker threads; 0: all cores")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_option("--seed", options.seed, "random seed of the samples and of sampling")->capture_default_str();
  command->add_option("--json", options.json, "also write the results to this file, as JSON");
}

void add_sampling(CLI::App* command, EvalOptions& options) {
  command->add_option("--max-new-tokens", options.max_new_tokens, "maximum tokens per answer")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  command->add_option("--batch", options.batch, "number of prompts to run at once")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_flag("--chat", options.chat,
                    "wrap each prompt in the chat template, as the user's message (see `messages` of data tokenize)");
  command->add_option("--temperature", options.temperature, "sampling temperature; 0: greedy")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command
      ->add_option("--top-p", options.top_p,
                   "nucleus sampling: sample from the fewest tokens with this total probability")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
}

EvalModel open_model(const EvalOptions& options) {
  check_output(options.json);
  SB_USER_CHECK(options.run_config.empty() || options.attention == "as-trained",
                "--run-config {}: only applies to --attention as-trained; add that, or remove it", options.run_config);
  const fs::path named = options.model;
  SB_USER_CHECK(fs::exists(named / "config.json") || !fs::exists(named / "final" / "config.json"),
                "--model {}: is the directory of a run; its trained model is {}", options.model,
                (named / "final").string());
  EvalModelOptions model;
  model.model = options.model;
  model.adapter = options.adapter;
  model.max_tokens = options.max_tokens;
  model.batch = options.batch;
  model.threads = options.threads;
  if (options.device == "cuda") {
    model.device = DeviceKind::cuda;
    if (options.precision == "auto") model.dtype = DType::bf16;
  }
  if (options.attention == "as-trained") {
    const AttentionRunOptions attention = load_run_config(find_run_config(options)).attention;
    model.attention = attention.selection;
    if (options.measure_coverage) model.coverage_rows = static_cast<int>(attention.coverage_rows);
    model.learned = find_learned(options, *model.attention);
  }
  return EvalModel(model);
}

GenerationOptions generation(const EvalOptions& options) {
  // The range that the option is checked for holds what is no number.
  SB_USER_CHECK(!std::isnan(options.temperature) && !std::isnan(options.top_p),
                "--temperature {} --top-p {}: both must be numbers", options.temperature, options.top_p);
  GenerationOptions result;
  result.max_new_tokens = options.max_new_tokens;
  result.sampling = {options.temperature, options.top_p, options.seed};
  return result;
}

void write_json(const EvalOptions& options, const std::string& results) {
  if (options.json.empty()) return;
  auto object = nlohmann::ordered_json::parse(results);
  object["model"] = options.model;
  if (!options.adapter.empty()) object["adapter"] = options.adapter;
  object["attention"] = options.attention;
  object["device"] = options.device;
  // A folder's name need not be UTF-8, which JSON is.
  write_output(options.json, object.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void show(Progress& progress, size_t done, size_t all, const char* what) {
  progress.show(static_cast<double>(done) / static_cast<double>(all), fmt::format("{} of {} {}", done, all, what));
}

}  // namespace sb
