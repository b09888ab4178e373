#include "data/files/token_dataset.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/errors.h"
#include "data/files/label_mask.h"
#include "data/files/token_check.h"
#include "data/permutation.h"

namespace sb {
namespace {

// One stored count a group of documents: small beside the index on disk, and a short walk finds the document.
constexpr int64_t kGroup = 256;
// Slots of a cycle when weights are given: the shares are exact to 1/65536.
constexpr uint64_t kWeightedCycle = 65536;
// Permutation streams: which file comes next, and the order inside each file.
constexpr uint64_t kMixStream = uint64_t{1} << 58;

}  // namespace

// A cycle of positions has `slots` places for this file, numbered from `first_slot`; the draw-th visit of the file
// reads its sequence permuted(draw % sequences) of epoch draw / sequences.
struct TokenDataset::File {
  std::unique_ptr<TokenFile> tokens;
  std::vector<int64_t> before;  // sequences before each group of documents, and the total
  uint64_t first_slot = 0, slots = 0;
  int64_t first_id = 0, used_tokens = 0;  // of its sequences
  size_t path = 0;                        // which of the paths named it

  int64_t sequences() const { return before.back(); }
};

namespace {

int64_t pieces_of(int64_t length, const TokenDatasetOptions& options) {
  if (length < 2) return 0;
  if (length <= options.max_sequence_length) return 1;
  if (options.overlong == Overlong::drop) return 0;
  return length / options.max_sequence_length + (length % options.max_sequence_length >= 2 ? 1 : 0);
}

}  // namespace

TokenDataset::TokenDataset(const TokenDatasetOptions& options, uint64_t seed) : options_(options), seed_(seed) {
  SB_USER_CHECK(options.max_sequence_length >= 2, "max_sequence_length must be at least 2, got {}",
                options.max_sequence_length);
  SB_USER_CHECK(options.weights.empty() || options.weights.size() == options.paths.size(),
                "{} weights for {} data paths; give one each or none", options.weights.size(), options.paths.size());
  SB_USER_CHECK(options.weights.empty() || options.shuffle, "weights need shuffle: true");
  std::vector<double> weights;
  for (size_t i = 0; i < options.paths.size(); ++i) {
    std::vector<std::unique_ptr<File>> matched;
    for (const std::string& path : expand_token_paths({options.paths[i]})) {
      matched.push_back(std::make_unique<File>());
      matched.back()->tokens = open_token_file(path);
      matched.back()->path = i;
      index(*matched.back());
    }
    const double share = options.weights.empty() ? 0 : sequence_share(options.weights[i], matched);
    // The weight of a pattern is shared among its files by their sequences.
    int64_t total = 0;
    for (const auto& file : matched) total += file->sequences();
    for (auto& file : matched) {
      if (!options.weights.empty())
        weights.push_back(share * static_cast<double>(file->sequences()) / static_cast<double>(total));
      files_.push_back(std::move(file));
    }
  }
  SB_USER_CHECK(!files_.empty(), "no data paths were given");
  summary_.files = static_cast<int64_t>(files_.size());
  for (const auto& file : files_) {
    file->first_id = summary_.sequences;
    summary_.sequences += file->sequences();
  }
  sequences_ = static_cast<uint64_t>(summary_.sequences);
  assign_slots(weights);
}

TokenDataset::~TokenDataset() = default;

double TokenDataset::sequence_share(double weight, std::span<const std::unique_ptr<File>> files) const {
  double sequences = 0, tokens = 0;
  for (const auto& file : files) {
    sequences += static_cast<double>(file->sequences());
    tokens += static_cast<double>(file->used_tokens);
  }
  switch (options_.weigh) {
    case TokenDatasetOptions::Weigh::visits:
      return weight * sequences;
    case TokenDatasetOptions::Weigh::tokens:
      return weight * sequences / tokens;  // long sequences are drawn less often
    default:
      return weight;
  }
}

std::vector<TokenDataset::Share> TokenDataset::shares() const {
  std::vector<Share> shares;
  for (const std::string& path : options_.paths) shares.push_back({path, 0, 0});
  double tokens = 0;
  for (const auto& file : files_) {
    const double drawn = static_cast<double>(file->slots) / static_cast<double>(cycle_);
    const double length = static_cast<double>(file->used_tokens) / static_cast<double>(file->sequences());
    shares[file->path].sequences += drawn;
    shares[file->path].tokens += drawn * length;
    tokens += drawn * length;
  }
  for (Share& share : shares) share.tokens /= tokens;
  return shares;
}

void TokenDataset::index(File& file) {
  const TokenFile& tokens = *file.tokens;
  int64_t sequences = 0;
  for (int64_t d = 0; d < tokens.documents(); ++d) {
    if (d % kGroup == 0) file.before.push_back(sequences);
    const int64_t length = tokens.length(d), pieces = pieces_of(length, options_);
    sequences += pieces;
    summary_.stored_tokens += length;
    summary_.split_documents += pieces > 1;
    summary_.dropped_short += length < 2;
    summary_.dropped_long += length >= 2 && pieces == 0;
    if (pieces > 0) {
      longest_ = std::max(longest_, std::min(length, options_.max_sequence_length));
      const int64_t rest = length % options_.max_sequence_length;
      file.used_tokens += length - (pieces > 1 && rest == 1 ? 1 : 0);
    }
  }
  summary_.tokens += file.used_tokens;
  file.before.push_back(sequences);
  summary_.documents += tokens.documents();
  SB_USER_CHECK(sequences > 0,
                "{}: none of its {} documents can be used: all have fewer than two tokens, or are dropped because they "
                "are longer than max_sequence_length ({})",
                tokens.name(), tokens.documents(), options_.max_sequence_length);
}

void TokenDataset::assign_slots(const std::vector<double>& weights) {
  if (weights.empty()) {
    for (auto& file : files_) {
      file->first_slot = cycle_;
      file->slots = static_cast<uint64_t>(file->sequences());
      cycle_ += file->slots;
    }
    return;
  }
  for (double weight : weights)
    SB_USER_CHECK(std::isfinite(weight) && weight > 0.0, "data weights must be positive, got {}", weight);
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  double exact_end = 0.0;
  for (size_t f = 0; f < files_.size(); ++f) {
    exact_end += weights[f];
    // Borders rounded on the running sum, so that the slots always add up.
    const auto end = f + 1 == files_.size()
                         ? kWeightedCycle
                         : static_cast<uint64_t>(std::llround(exact_end / total * static_cast<double>(kWeightedCycle)));
    files_[f]->first_slot = cycle_;
    files_[f]->slots = end - cycle_;
    cycle_ = end;
    SB_USER_CHECK(files_[f]->slots > 0,
                  "{}: its weight is too small, below 1/{} of all weights; raise it, or remove the entry",
                  files_[f]->tokens->name(), kWeightedCycle);
  }
}

TokenDataset::Place TokenDataset::find(uint64_t position) const {
  const uint64_t turn = position / cycle_;
  uint64_t slot = position % cycle_;
  if (options_.shuffle) slot = IndexPermutation(cycle_, seed_, kMixStream ^ turn).at(slot);
  const auto after = std::upper_bound(files_.begin(), files_.end(), slot,
                                      [](uint64_t s, const auto& file) { return s < file->first_slot; });
  const auto number = static_cast<uint64_t>(std::prev(after) - files_.begin());
  const File& file = *files_[number];
  const auto count = static_cast<uint64_t>(file.sequences());
  const uint64_t draw = turn * file.slots + (slot - file.first_slot);
  uint64_t sequence = draw % count;
  if (options_.shuffle) sequence = IndexPermutation(count, seed_, (number + 1) << 36 ^ draw / count).at(sequence);

  const auto wanted = static_cast<int64_t>(sequence);
  const auto group = std::prev(std::upper_bound(file.before.begin(), std::prev(file.before.end()), wanted));
  int64_t document = (group - file.before.begin()) * kGroup, left = wanted - *group;
  for (;; ++document) {
    const int64_t length = file.tokens->length(document), pieces = pieces_of(length, options_);
    if (left < pieces) {
      const int64_t begin = left * options_.max_sequence_length;
      return {&file, document, begin, std::min(options_.max_sequence_length, length - begin), file.first_id + wanted};
    }
    left -= pieces;
  }
}

int64_t TokenDataset::length(uint64_t position) const {
  return find(position).count;
}

int64_t TokenDataset::valid_targets(uint64_t position) const {
  const Place place = find(position);
  const LabelMask* mask = place.file->tokens->mask();
  if (!mask) return place.count - 1;
  if (place.count == place.file->tokens->length(place.document)) return mask->valid_targets(place.document);
  return mask->count(place.document, place.begin + 1, place.begin + place.count);
}

std::string TokenDataset::identity() const {
  return fmt::format("{} files, {} sequences, {} tokens", summary_.files, summary_.sequences, summary_.tokens);
}

int64_t TokenDataset::spot_check(int64_t most_tokens) const {
  std::vector<const TokenFile*> files;
  for (const auto& file : files_) files.push_back(file->tokens.get());
  return spot_check_ids(files, options_.vocab_size, most_tokens);
}

TokenSequence TokenDataset::read(uint64_t position) const {
  const Place place = find(position);
  const TokenFile& file = *place.file->tokens;
  TokenSequence sequence;
  sequence.id = place.id;
  sequence.source = static_cast<int>(place.file->path);
  sequence.tokens.resize(static_cast<size_t>(place.count));
  file.read(place.document, place.begin, place.count, sequence.tokens.data());
  check_token_ids(file, place.document, place.begin, sequence.tokens, options_.vocab_size);
  sequence.labels.assign(sequence.tokens.size(), kIgnoredLabel);
  const LabelMask* mask = file.mask();
  int64_t counted = 0;
  for (size_t i = 0; i + 1 < sequence.tokens.size(); ++i)
    if (!mask || mask->is_target(place.document, place.begin + static_cast<int64_t>(i) + 1)) {
      sequence.labels[i] = sequence.tokens[i + 1];
      ++counted;
    }
  SB_USER_CHECK(counted == valid_targets(position),
                "{}.mask: document {} should have {} targets but has {}: damaged, or from another token file",
                file.name(), place.document, valid_targets(position), counted);
  return sequence;
}

}  // namespace sb
