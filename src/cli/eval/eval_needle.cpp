#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/at_least.h"
#include "cli/eval/eval_commands.h"
#include "cli/eval/eval_options.h"
#include "cli/output_file.h"
#include "cli/progress.h"
#include "core/errors.h"
#include "data/synthetic/ruler_text.h"
#include "data/synthetic/synthetic.h"
#include "eval/needle.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

struct NeedleOptions {
  std::vector<int64_t> lengths = {1024, 2048, 4096};
  std::vector<double> depths = {0.0, 0.25, 0.5, 0.75};
  int64_t samples = 4, vocab = 0;
  std::string svg;
};

// Over text when the model has a tokenizer: the answer is generated and has to contain the number. Over token ids
// otherwise: every token of the answer has to be the most likely one.
double needle_cell(EvalModel& model, const EvalOptions& options, const NeedleOptions& needle, int64_t length,
                   double depth) {
  double found = 0;
  if (model.has_tokenizer()) {
    RulerOptions ruler;
    ruler.length = length;
    ruler.depth = depth;
    std::vector<std::string> prompts;
    std::vector<std::vector<std::string>> outputs;
    for (int64_t i = 0; i < needle.samples; ++i) {
      const RulerSample sample = make_ruler_sample(
          ruler, [&](std::string_view text) { return std::ssize(model.tokenizer().encode(text)); }, options.seed, i);
      prompts.push_back(sample.input);
      outputs.push_back(sample.outputs);
    }
    const std::vector<std::string> answers = model.answer(prompts, generation(options), {}, {.chat = options.chat});
    for (size_t i = 0; i < answers.size(); ++i) found += ruler_match_all(answers[i], outputs[i]);
  } else {
    SyntheticOptions task;
    task.task = SyntheticTask::needle_single;
    task.vocab_size = needle.vocab > 0 ? needle.vocab : model.config().vocab_size;
    task.length = LengthDistribution::fixed(length);
    task.depth = depth;
    const auto source = make_synthetic_source(task, options.seed);
    for (int64_t i = 0; i < needle.samples; ++i) {
      const TokenSequence sequence = source->read(static_cast<uint64_t>(i));
      const LossSums sums = model.score(sequence.tokens, sequence.labels).sums;
      found += sums.correct == sums.targets ? 1.0 : 0.0;
    }
  }
  return found / static_cast<double>(needle.samples);
}

void run_needle(EvalOptions options, const NeedleOptions& needle) {
  check_output(needle.svg);
  for (const int64_t length : needle.lengths) options.max_tokens = std::max(options.max_tokens, length);
  EvalModel model = open_model(options);
  SB_USER_CHECK(needle.vocab <= model.config().vocab_size, "--vocab {}: the model's vocabulary has only {} ids",
                needle.vocab, model.config().vocab_size);
  NeedleGrid grid{needle.depths, needle.lengths, {}};
  Progress progress;
  size_t done = 0;
  const size_t cells = needle.depths.size() * needle.lengths.size();
  for (const double depth : needle.depths) {
    std::vector<double>& row = grid.values.emplace_back();
    for (const int64_t length : needle.lengths) {
      row.push_back(needle_cell(model, options, needle, length, depth));
      show(progress, ++done, cells, "cells");
    }
  }
  progress.clear();
  std::printf("%s", needle_table(grid).c_str());
  if (!needle.svg.empty()) write_output(needle.svg, needle_svg(grid, "needle: " + options.model));
  write_json(options, Json({{"task", "needle"},
                            {"depths", grid.depths},
                            {"lengths", grid.lengths},
                            {"values", grid.values},
                            {"mean", grid.mean()}})
                          .dump());
}

}  // namespace

void add_eval_needle(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* needle =
      eval.add_subcommand("needle", "needle in a haystack: how often one fact is found, by depth and length");
  auto grid = std::make_shared<NeedleOptions>();
  add_common(needle, *options, true);
  add_sampling(needle, *options);
  needle->add_option("--lengths", grid->lengths, "context lengths in tokens")->delimiter(',')->capture_default_str();
  needle->add_option("--depths", grid->depths, "positions of the needle, 0 (start) to 1 (end)")
      ->delimiter(',')
      ->capture_default_str();
  needle->add_option("--samples", grid->samples, "samples per depth and length")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  needle
      ->add_option("--vocab", grid->vocab,
                   "number of token ids in use, for models without a tokenizer; 0: the model's vocabulary")
      ->check(at_least(0), "at least 0")
      ->capture_default_str();
  needle->add_option("--svg", grid->svg, "also write a heat map to this file, as SVG");
  needle->callback([=] { run_needle(*options, *grid); });
}

}  // namespace sb
