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
                "{} exists already; choose another output or allow overwriting it with --overwrite", arguments.output);
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
  CLI::App* command = data.add_subcommand("synth", "generate a long-context task, over token ids or over text");
  auto arguments = std::make_shared<SynthArguments>();
  SynthArguments& a = *arguments;
  command
      ->add_option("--task", a.task,
                   fmt::format("over token ids: {}; with --text: {}", fmt::join(synthetic_task_names(), ", "),
                               fmt::join(ruler_task_names(), ", ")))
      ->capture_default_str();
  command->add_option("--output", a.output, "prefix of the token files, or the JSONL file with --text")
      ->required()
      ->check(names_files, "PREFIX");
  command->add_option("--sequences", a.sequences, "how many")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--length", a.length, "tokens of a sequence; the most when lengths vary")->capture_default_str();
  CLI::Option* least =
      command->add_option("--min-length", a.min_length, "lengths are log-uniform from here to --length");
  command
      ->add_option("--lengths", a.pool,
                   "draw lengths from this pool: a file with one per line, or a name (data lengths --help)")
      ->excludes(least);
  command->add_option("--seed", a.seed, "another seed, other sequences")->capture_default_str();
  command->add_option("--vocab-size", a.tokens.vocab_size, "token ids in use")->capture_default_str();
  command->add_option("--chunk", a.tokens.chunk, "chunk_recall: tokens of a chunk")->capture_default_str();
  command->add_option("--needles", a.tokens.needles, "keys planted; pairs of associative_recall")
      ->capture_default_str();
  command->add_option("--values", a.tokens.values, "needle_multi_value: values of the key")->capture_default_str();
  command->add_option("--queries", a.tokens.queries, "keys asked for")->capture_default_str();
  command->add_option("--value-tokens", a.tokens.value_tokens, "tokens of a value")->capture_default_str();
  command->add_option("--hops", a.tokens.hops, "variable tracking: assignments after the first")->capture_default_str();
  command->add_option("--chains", a.tokens.chains, "variable tracking: chains, one asked for")->capture_default_str();
  command->add_option("--answers", a.tokens.answers, "words asked for")->capture_default_str();
  command->add_option("--depth", a.tokens.depth, "single needle: its place, 0 (start) to 1 (end); negative: random")
      ->capture_default_str();
  command
      ->add_option("--min-distance", a.tokens.min_distance,
                   "nothing that helps lies closer to the question, in tokens (words with --text); -1: the task's own "
                   "choice")
      ->capture_default_str();
  command->add_flag("--text", a.text, "RULER's families over text, as JSONL with index, input, outputs and length");
  command
      ->add_option("--tokenizer", a.tokenizer,
                   "with --text: count lengths in the tokens of this tokenizer.json, or its folder's, not in words")
      ->needs("--text");
  command->add_flag("--overwrite", a.overwrite, "replace an existing output");
  command->callback([arguments] {
    SB_USER_CHECK(!arguments->output.empty(), "--output: a name of what to write is needed, and it is empty");
    if (arguments->text)
      synth_text(*arguments);
    else
      synth_tokens(*arguments);
  });
}

}  // namespace sb
