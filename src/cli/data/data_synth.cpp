#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>

#include "cli/data/data_commands.h"
#include "cli/output_file.h"
#include "core/errors.h"
#include "data/files/token_writer.h"
#include "data/synthetic/ruler_text.h"
#include "data/synthetic/synthetic.h"
#include "data/tokenizer/tokenizer.h"
#include "plan/simulate/length_pool.h"

namespace sb {
namespace {

struct SynthArguments {
  std::string task = "chunk_recall", output, pool, tokenizer;
  int64_t sequences = 1000, length = 2048, min_length = 0;
  uint64_t seed = 1;
  bool text = false, overwrite = false;
  SyntheticOptions tokens;
  RulerOptions ruler;
};

LengthDistribution lengths_of(const SynthArguments& arguments) {
  if (!arguments.pool.empty()) return LengthDistribution::from_pool(find_lengths(arguments.pool));
  if (arguments.min_length > 0) return LengthDistribution::log_uniform(arguments.min_length, arguments.length);
  return LengthDistribution::fixed(arguments.length);
}

void synth_tokens(const SynthArguments& arguments) {
  SyntheticOptions options = arguments.tokens;
  options.task = parse_synthetic_task(arguments.task);
  options.length = lengths_of(arguments);
  const std::unique_ptr<SequenceSource> source = make_synthetic_source(options, arguments.seed);
  TokenWriter::Options writing;
  writing.type = options.vocab_size <= 65536 ? TokenType::u16 : TokenType::i32;
  writing.overwrite = arguments.overwrite;
  TokenWriter writer(arguments.output, writing);
  std::vector<uint8_t> targets;
  for (int64_t i = 0; i < arguments.sequences; ++i) {
    const TokenSequence sequence = source->read(static_cast<uint64_t>(i));
    targets.assign(sequence.tokens.size(), 0);
    for (size_t t = 0; t + 1 < sequence.tokens.size(); ++t) targets[t + 1] = sequence.labels[t] != kIgnoredLabel;
    writer.add(sequence.tokens, targets);
  }
  writer.finish();
  std::printf("%s: %lld sequences, %lld tokens of %s\n", arguments.output.c_str(),
              static_cast<long long>(writer.documents()), static_cast<long long>(writer.tokens()),
              arguments.task.c_str());
}

void synth_text(const SynthArguments& arguments) {
  SB_USER_CHECK(arguments.overwrite || !std::filesystem::exists(arguments.output),
                "{} already exists; choose another --output, or replace it with --overwrite", arguments.output);
  check_output(arguments.output);
  RulerOptions options = arguments.ruler;
  options.task = parse_ruler_task(arguments.task);
  options.needles = arguments.tokens.needles;
  options.queries = arguments.tokens.queries;
  options.hops = arguments.tokens.hops;
  options.chains = arguments.tokens.chains;
  options.depth = arguments.tokens.depth;
  if (arguments.tokens.min_distance >= 0) options.min_distance_words = arguments.tokens.min_distance;
  std::unique_ptr<Tokenizer> tokenizer;
  if (!arguments.tokenizer.empty()) tokenizer = std::make_unique<Tokenizer>(Tokenizer::load(arguments.tokenizer));
  const TokenCounter count = [&](std::string_view text) {
    return tokenizer ? static_cast<int64_t>(tokenizer->encode(text).size()) : count_words(text);
  };
  const LengthDistribution lengths = lengths_of(arguments);
  std::string lines;
  for (int64_t i = 0; i < arguments.sequences; ++i) {
    options.length = lengths.at(arguments.seed, static_cast<uint64_t>(i));
    lines += ruler_jsonl(make_ruler_sample(options, count, arguments.seed, i));
    lines += '\n';
  }
  write_output(arguments.output, lines);
  std::printf("%s: %lld samples of %s, lengths in %s\n", arguments.output.c_str(),
              static_cast<long long>(arguments.sequences), arguments.task.c_str(), tokenizer ? "tokens" : "words");
}

}  // namespace

void add_data_synth(CLI::App& data) {
  CLI::App* command =
      data.add_subcommand("synth", "generate a synthetic long-context task, over token ids or over text");
  auto arguments = std::make_shared<SynthArguments>();
  SynthArguments& a = *arguments;
  command
      ->add_option("--task", a.task,
                   fmt::format("the task; over token ids: {}; with --text: {}", fmt::join(synthetic_task_names(), ", "),
                               fmt::join(ruler_task_names(), ", ")))
      ->capture_default_str();
  command->add_option("--output", a.output, "prefix of the token files to write; with --text the JSONL file")
      ->required()
      ->check(names_files, "PREFIX");
  command->add_option("--sequences", a.sequences, "number of sequences")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--length", a.length, "sequence length in tokens; the maximum if lengths vary")
      ->capture_default_str();
  CLI::Option* least =
      command->add_option("--min-length", a.min_length, "draw lengths log-uniformly from here to --length");
  command
      ->add_option(
          "--lengths", a.pool,
          "draw lengths from this pool: a file with one length per line, or a named pool (see data lengths --help)")
      ->excludes(least);
  command->add_option("--seed", a.seed, "random seed of the sequences")->capture_default_str();
  command->add_option("--vocab-size", a.tokens.vocab_size, "number of token ids in use")->capture_default_str();
  command->add_option("--chunk", a.tokens.chunk, "chunk_recall: tokens per chunk")->capture_default_str();
  command->add_option("--needles", a.tokens.needles, "number of keys planted; associative_recall: number of pairs")
      ->capture_default_str();
  command->add_option("--values", a.tokens.values, "needle_multi_value: number of values planted for the key")
      ->capture_default_str();
  command->add_option("--queries", a.tokens.queries, "number of keys queried")->capture_default_str();
  command->add_option("--value-tokens", a.tokens.value_tokens, "tokens per value")->capture_default_str();
  command->add_option("--hops", a.tokens.hops, "variable_tracking: assignments per chain, after the first")
      ->capture_default_str();
  command->add_option("--chains", a.tokens.chains, "variable_tracking: number of chains, one of which is queried")
      ->capture_default_str();
  command->add_option("--answers", a.tokens.answers, "number of words to name")->capture_default_str();
  command->add_option("--depth", a.tokens.depth, "single needle: its position, 0 (start) to 1 (end); negative: random")
      ->capture_default_str();
  command
      ->add_option("--min-distance", a.tokens.min_distance,
                   "minimum distance from the question to anything that helps answer it, in tokens (words with "
                   "--text); -1: the task's own choice")
      ->capture_default_str();
  command->add_flag("--text", a.text,
                    "generate RULER's task families over text instead, as JSONL with index, input, outputs and length");
  command
      ->add_option("--tokenizer", a.tokenizer,
                   "tokenizer.json, or its directory, in whose tokens lengths are counted (default: in words)")
      ->needs("--text");
  command->add_flag("--overwrite", a.overwrite, "replace an existing output");
  command->callback([arguments] {
    SB_USER_CHECK(!arguments->output.empty(), "--output: is empty; name what to write");
    if (arguments->text)
      synth_text(*arguments);
    else
      synth_tokens(*arguments);
  });
}

}  // namespace sb
