#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/at_least.h"
#include "cli/eval/eval_commands.h"
#include "cli/eval/eval_options.h"
#include "cli/progress.h"
#include "core/log.h"
#include "data/files/token_dataset.h"
#include "data/text/token_origin.h"
#include "eval/perplexity.h"
#include "train/sums/step_sums.h"

namespace sb {
namespace {

using Json = nlohmann::ordered_json;

void run_ppl(EvalOptions options, const std::vector<std::string>& data, int64_t sequences) {
  options.measure_coverage = true;
  EvalModel model = open_model(options);
  TokenDatasetOptions files;
  files.paths = data;
  files.max_sequence_length = options.max_tokens;
  files.shuffle = false;
  files.vocab_size = model.config().vocab_size;
  const TokenDataset dataset(files, options.seed);
  const auto count = static_cast<int64_t>(dataset.size());
  const int64_t chosen = sequences > 0 ? std::min(sequences, count) : count;
  warn_of_other_tokenizer(data, options.model);
  if (const TokenDataset::Summary& summary = dataset.summary(); summary.split_documents > 0)
    log::warning(
        "{} of {} documents are longer than --max-tokens {} and are split into pieces that do not see what came "
        "before; raise --max-tokens to score them whole",
        summary.split_documents, summary.documents, options.max_tokens);
  PositionLosses losses;
  LossSums sums;
  LayerAttention read;
  Progress progress;
  for (int64_t i = 0; i < chosen; ++i) {
    const TokenSequence sequence = dataset.read(static_cast<uint64_t>(i));
    const EvalModel::Score score = model.score(sequence.tokens, sequence.labels);
    losses.add(score.token_loss, sequence.labels);
    sums += score.sums;
    read = AttentionReport{{read, score.attention}, {}}.total();
    show(progress, static_cast<size_t>(i + 1), static_cast<size_t>(chosen), "sequences");
  }
  progress.clear();
  fmt::print("{:>18} {:>12} {:>10} {:>12}\n", "positions", "tokens", "loss", "perplexity");
  Json rows = Json::array();
  const auto print = [&](const PositionLosses::Bucket& bucket, const std::string& name) {
    // Where no token counts there is no loss, which a 0 would not say.
    Json loss = nullptr, perplexity = nullptr;
    if (bucket.tokens > 0) {
      loss = bucket.loss / static_cast<double>(bucket.tokens);
      perplexity = bucket.perplexity();
    }
    const auto shown = [](const Json& value) {
      return value.is_null() ? "-" : fmt::format("{:.4f}", value.get<double>());
    };
    fmt::print("{:>18} {:>12} {:>10} {:>12}\n", name, bucket.tokens, shown(loss), shown(perplexity));
    rows.push_back({{"positions", name}, {"tokens", bucket.tokens}, {"loss", loss}, {"perplexity", perplexity}});
  };
  for (const PositionLosses::Bucket& bucket : losses.buckets()) {
    print(bucket, fmt::format("{}-{}", bucket.begin, bucket.end - 1));
  }
  print(losses.total(), "all");
  Json right = nullptr;
  if (sums.targets > 0) {
    right = accuracy(sums);
    fmt::print("top-1 accuracy: {:.2f}%\n", 100 * right.get<double>());
  }
  // Dense attention holds everything; what chose without rows to measure on does not know.
  const bool dense = read.pairs == read.causal_pairs;
  Json coverage = nullptr;
  if (dense || read.covered_tokens > 0) coverage = dense ? 1.0 : read.mean_coverage();
  if (!dense)
    fmt::print("attention: {:.2f}% of the causal pairs{}\n", 100 * read.density(),
               coverage.is_null() ? "" : fmt::format(", {:.2f}% of the attention mass", 100 * coverage.get<double>()));
  const Json result = {
      {"task", "ppl"}, {"rows", rows}, {"accuracy", right}, {"density", read.density()}, {"coverage", coverage}};
  write_json(options, result.dump());
}

}  // namespace

void add_eval_ppl(CLI::App& eval) {
  auto options = std::make_shared<EvalOptions>();
  CLI::App* ppl = eval.add_subcommand("ppl", "perplexity on token files, by position");
  auto data = std::make_shared<std::vector<std::string>>();
  auto sequences = std::make_shared<int64_t>(0);
  add_common(ppl, *options, true);
  ppl->add_option("--data", *data,
                  "token files: prefixes of .bin and .idx, llm.c .bin files, or directories of MDS shards")
      ->required();
  ppl->add_option("--sequences", *sequences, "maximum number of sequences; 0: all")
      ->check(at_least(0), "at least 0")
      ->capture_default_str();
  ppl->callback([=] { run_ppl(*options, *data, *sequences); });
}

}  // namespace sb
