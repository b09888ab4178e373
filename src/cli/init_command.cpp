#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <optional>

#include "cli/at_least.h"
#include "cli/commands.h"
#include "cli/output_file.h"
#include "core/config/config_value.h"
#include "core/errors.h"
#include "data/files/token_file.h"
#include "data/text/token_origin.h"
#include "device/cuda.h"
#include "model/model_config.h"
#include "run/config/run_config.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

struct InitArguments {
  std::string model, out = "run.yaml", device;
  std::vector<std::string> data;
  int ranks = 0;
  int64_t length = 0;
  bool overwrite = false;
};

// Above this, dense attention takes most of a step.
constexpr int64_t kSparseAbove = 32768, kBudget = 8192;

int64_t longest_document(const std::vector<std::string>& paths) {
  int64_t longest = 0;
  for (const std::string& path : expand_token_paths(paths)) {
    const std::unique_ptr<TokenFile> file = open_token_file(path);
    for (int64_t d = 0; d < file->documents(); ++d) longest = std::max(longest, file->length(d));
  }
  return longest;
}

struct Choice {
  bool cuda = false;
  int ranks = 1;
  int64_t longest = 0, length = 0;
  int64_t positions = 0, unscaled = 0;  // of the model, with the rotary scaling that it has and without
  bool sparse() const { return length > kSparseAbove; }
  // By how much rotary positions have to stretch; 1: not at all.
  int64_t stretch() const { return length <= positions ? 1 : (length + unscaled - 1) / unscaled; }
};

Choice choose(const InitArguments& arguments) {
  Choice choice;
  const ModelConfig model = read_model_config(fs::path(arguments.model) / "config.json");
  choice.positions = longest_sequence(model);
  choice.unscaled = model.rope.original_max_position_embeddings > 0 ? model.rope.original_max_position_embeddings
                                                                    : model.max_position_embeddings;
  const bool usable = cuda::problem().empty();
  choice.cuda = arguments.device.empty() ? usable : arguments.device == "cuda";
  choice.ranks = arguments.ranks > 0 ? arguments.ranks : choice.cuda && usable ? cuda::device_count() : 1;
  choice.longest = longest_document(arguments.data);
  SB_USER_CHECK(choice.longest > 1,
                "{}: no document has two or more tokens, so there is nothing to train on; check it with `sparsebalance "
                "data stats`",
                arguments.data.front());
  const int64_t rounded = std::max<int64_t>(1024, (choice.longest + 1023) / 1024 * 1024);
  choice.length = arguments.length > 0 ? arguments.length : std::min(rounded, choice.positions);
  return choice;
}

std::string run_yaml(const InitArguments& arguments, const Choice& choice) {
  std::string text = fmt::format(
      "# Written by `sparsebalance init`. Check it with `sparsebalance config {0}`, start it with\n"
      "# `sparsebalance train {0}{1}`; the same command resumes it. docs/configuration.md lists every option.\n"
      "device: {2}\n"
      "model:\n"
      "  path: {3}\n",
      arguments.out, choice.ranks > 1 ? fmt::format(" --ranks {}", choice.ranks) : "", choice.cuda ? "cuda" : "cpu",
      yaml_text(arguments.model));
  if (choice.stretch() > 1)
    text += fmt::format(
        "  # The model's context is {} tokens; YaRN extends it to the length below.\n"
        "  rope: {{ type: yarn, factor: {}, original_max_position_embeddings: {} }}\n",
        choice.positions, choice.stretch(), choice.unscaled);
  std::vector<std::string> data;
  for (const std::string& path : arguments.data) data.push_back(yaml_text(path));
  text += fmt::format(
      "data:\n"
      "  train: [{}]\n"
      "  # The longest document has {} tokens. Documents above this length are split into several sequences.\n"
      "  max_sequence_length: {}\n"
      "# Sequences per optimizer step, over all ranks, and the maximum tokens packed into a micro-batch.\n"
      "batch: {{ global_batch_size: {}, micro_batch_tokens: {} }}\n",
      fmt::join(data, ", "), choice.longest, choice.length, std::max(16, 4 * choice.ranks), choice.length);
  if (choice.sparse())
    text += fmt::format(
        "# Each query attends to about {} keys. `pattern: dense` is exact, but slower.\n"
        "attention: {{ pattern: mass, budget: {} }}\n",
        kBudget, kBudget);
  else
    text += fmt::format(
        "# Dense attention is exact. Above about {} tokens, {{ pattern: mass, budget: {} }} saves most of its time.\n"
        "attention: {{ pattern: dense }}\n",
        kSparseAbove, kBudget);
  if (choice.ranks > 1)
    text += fmt::format(
        "parallel: {{ dp: {} }}\n"
        "# Divides the sequences so that all ranks finish together, without changing the result. Predictions start\n"
        "# from built-in latencies and learn from measured ones; `sparsebalance profile --run {}` measures "
        "beforehand.\n"
        "balance: {{ batching: sab, ordering: auto, profile: h200-analytic }}\n",
        choice.ranks, arguments.out);
  text += fmt::format(
      "optimizer: {{ learning_rate: 1.0e-5, schedule: cosine, warmup_ratio: 0.03, min_learning_rate_ratio: 0.1 }}\n"
      "# One pass over the data. `recompute: layer` takes less memory, `recompute: none` less time.\n"
      "train: {{ num_train_epochs: 1, recompute: attention, save_steps: 100, save_total_limit: 3, output_dir: {} }}\n",
      yaml_text((fs::path("runs") / fs::path(arguments.out).stem()).string()));
  return text;
}

void init(const InitArguments& arguments) {
  SB_USER_CHECK(arguments.overwrite || !fs::exists(arguments.out),
                "{}: already exists; choose another --out, or replace it with --overwrite", arguments.out);
  check_output(arguments.out);
  warn_of_other_tokenizer(arguments.data, arguments.model);
  const Choice choice = choose(arguments);
  const std::string text = run_yaml(arguments, choice);
  parse_run_config(text, arguments.out);  // what is written can be run
  write_output(arguments.out, text);
  fmt::print(
      "wrote {}: {} rank{} on {}, sequences of up to {} tokens, {} attention\n"
      "next: sparsebalance train {}{}\n",
      arguments.out, choice.ranks, choice.ranks == 1 ? "" : "s", choice.cuda ? "cuda" : "cpu", choice.length,
      choice.sparse() ? "sparse" : "dense", arguments.out,
      choice.ranks > 1 ? fmt::format(" --ranks {}", choice.ranks) : "");
}

}  // namespace

void add_init_command(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("init", "write a commented run.yaml for a checkpoint, your data and this machine");
  auto arguments = std::make_shared<InitArguments>();
  command->add_option("--model", arguments->model, "Hugging Face directory of the model to train further")->required();
  command->add_option("--data", arguments->data, "token files (see data tokenize); may be repeated")->required();
  command->add_option("--out", arguments->out, "file to write")->capture_default_str();
  command->add_option("--device", arguments->device, "cpu or cuda (default: cuda if there is a GPU)")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  command->add_option("--ranks", arguments->ranks, "number of processes (default: one per GPU)")
      ->check(CLI::Range(1, 4096));
  command
      ->add_option(
          "--length", arguments->length,
          "maximum sequence length in tokens (default: the longest document, up to the model's context length)")
      ->check(at_least(2), "at least 2");
  command->add_flag("--overwrite", arguments->overwrite, "replace an existing file");
  command->callback([arguments] { init(*arguments); });
}

}  // namespace sb
