#include "train/sources.h"

#include <algorithm>

#include "core/errors.h"
#include "core/log.h"
#include "data/files/token_dataset.h"
#include "data/synthetic/synthetic.h"
#include "data/text/token_origin.h"
#include "plan/simulate/length_pool.h"

namespace sb {
namespace {

// Validation must not repeat what was trained on.
constexpr uint64_t kValidationSeed = 0x76616c6964617465;
// Looked at before the first step: a moment from memory, seconds from a slow disk.
constexpr int64_t kSpotCheck = int64_t{1} << 26;

Sources synthetic_sources(const RunConfig& config, int64_t vocab_size) {
  SyntheticOptions task = *config.data.synthetic;
  if (const std::filesystem::path& file = config.data.synthetic_lengths; !file.empty()) {
    std::vector<int64_t> lengths = find_lengths(file.string());
    for (int64_t& length : lengths) length = std::min(length, task.length.max);
    task.length = LengthDistribution::from_pool(std::move(lengths));
  }
  SB_USER_CHECK(task.vocab_size <= vocab_size,
                "data.synthetic.vocab_size: {} is above the model's vocab_size {}; lower it", task.vocab_size,
                vocab_size);
  Sources sources;
  sources.train = make_synthetic_source(task, config.train.seed);
  // Always of the full length: what a curriculum has reached so far would be another measure each time.
  SyntheticOptions fixed = task;
  if (task.curriculum) fixed.length = LengthDistribution::fixed(task.curriculum->end);
  fixed.curriculum.reset();
  sources.validation = make_synthetic_source(fixed, config.train.seed ^ kValidationSeed);
  sources.validation_set = {sources.validation.get(), config.train.validation_sequences,
                            task.task == SyntheticTask::chunk_recall ? task.chunk : 0};
  return sources;
}

TokenDatasetOptions dataset_options(const RunConfig& config, const std::vector<WeightedPath>& paths,
                                    int64_t vocab_size) {
  TokenDatasetOptions options;
  for (const WeightedPath& path : paths) options.paths.push_back(path.path.string());
  options.max_sequence_length = config.data.max_sequence_length;
  options.overlong = config.data.overlong;
  options.vocab_size = vocab_size;
  return options;
}

void check_vocabulary(const TokenDataset& data, const char* option) {
  const int64_t looked_at = data.spot_check(kSpotCheck), tokens = data.summary().stored_tokens;
  if (looked_at < tokens)
    log::info("{}: checked {:.1f}% of the tokens against the vocabulary; `sparsebalance data check` checks all of them",
              option, 100.0 * static_cast<double>(looked_at) / static_cast<double>(tokens));
}

std::unique_ptr<SequenceSource> token_source(const RunConfig& config, int64_t vocab_size, bool leads) {
  const std::vector<WeightedPath>& paths = config.data.train;
  TokenDatasetOptions options = dataset_options(config, paths, vocab_size);
  options.shuffle = config.data.shuffle;
  const bool by_tokens = config.data.mixture == DataOptions::Mixture::tokens;
  options.weigh = by_tokens ? TokenDatasetOptions::Weigh::tokens : TokenDatasetOptions::Weigh::visits;
  if (by_tokens || std::any_of(paths.begin(), paths.end(), [](const WeightedPath& path) { return path.weight != 1.0; }))
    for (const WeightedPath& path : paths) options.weights.push_back(path.weight);
  auto source = std::make_unique<TokenDataset>(options, config.train.seed);
  if (!leads) return source;
  const TokenDataset::Summary& summary = source->summary();
  log::info("training data: {} sequences with {} tokens from {} documents ({} split, {} too long, {} too short)",
            summary.sequences, summary.tokens, summary.documents, summary.split_documents, summary.dropped_long,
            summary.dropped_short);
  if (paths.size() > 1)
    for (const TokenDataset::Share& share : source->shares())
      log::info("  {}: {:.1f}% of the sequences drawn, {:.1f}% of the tokens", share.path, 100 * share.sequences,
                100 * share.tokens);
  check_vocabulary(*source, "data.train");
  return source;
}

}  // namespace

Sources make_sources(const RunConfig& config, int64_t vocab_size, bool leads) {
  if (config.data.synthetic) return synthetic_sources(config, vocab_size);
  Sources sources;
  sources.train = token_source(config, vocab_size, leads);
  if (leads) {
    warn_of_other_tokenizer(dataset_options(config, config.data.train, vocab_size).paths, config.model.path);
    warn_of_other_tokenizer(dataset_options(config, config.data.validation, vocab_size).paths, config.model.path);
  }
  if (config.data.validation.empty()) return sources;
  // In the order of the files, so that it is the same sequences every time.
  TokenDatasetOptions options = dataset_options(config, config.data.validation, vocab_size);
  options.shuffle = false;
  auto validation = std::make_unique<TokenDataset>(options, config.train.seed);
  if (leads) check_vocabulary(*validation, "data.validation");
  sources.validation = std::move(validation);
  const auto all = static_cast<int64_t>(sources.validation->size());
  const int64_t wanted = config.train.validation_sequences;
  sources.validation_set = {sources.validation.get(), wanted == 0 ? all : std::min(wanted, all), 0};
  return sources;
}

}  // namespace sb
