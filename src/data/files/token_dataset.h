#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/files/token_file.h"
#include "data/sequence_source.h"

namespace sb {

// What becomes of a document that is too long: `split` cuts it into consecutive pieces, the last one shorter; `drop`
// leaves it out.
enum class Overlong { split, drop };

struct TokenDatasetOptions {
  std::vector<std::string> paths;  // as open_token_file() takes them; patterns allowed
  // How the sequences drawn are shared among the paths, relative to each other. Empty: each file by its number of
  // sequences, so that one pass sees every sequence once. Needs shuffle.
  std::vector<double> weights;
  // What a weight is of: the sequences drawn, the times that each sequence is seen, or the tokens drawn.
  enum class Weigh { sequences, visits, tokens };
  Weigh weigh = Weigh::sequences;
  int64_t max_sequence_length = 65536;
  Overlong overlong =
      Overlong::split;  // pieces and documents of fewer than two tokens have no target: they are left out
  bool shuffle = true;
  int64_t vocab_size = 0;  // ids must lie below; 0: only non-negative
};

// Sequences from token files in an endless order. With shuffle, every epoch has its own pseudo-random order, computed
// and not stored; without, the files follow each other as written.
class TokenDataset final : public SequenceSource {
 public:
  TokenDataset(const TokenDatasetOptions& options, uint64_t seed);
  ~TokenDataset() override;

  int64_t length(uint64_t position) const override;
  int64_t valid_targets(uint64_t position) const override;
  TokenSequence read(uint64_t position) const override;
  uint64_t size() const override { return sequences_; }
  int64_t max_length() const override { return longest_; }
  std::vector<std::string> sources() const override { return options_.paths; }
  std::string identity() const override;

  // Whether the files' ids fit the vocabulary, as far as `most_tokens` show it (data/files/token_check.h).
  int64_t spot_check(int64_t most_tokens) const;

  struct Summary {
    int64_t files = 0, documents = 0, sequences = 0, tokens = 0;  // tokens: of the sequences
    int64_t stored_tokens = 0;                                    // also those of documents that are left out
    int64_t split_documents = 0, dropped_long = 0, dropped_short = 0;
  };
  const Summary& summary() const { return summary_; }
  // What is drawn from each of the paths: its part of the sequences and of the tokens, over a whole cycle.
  struct Share {
    std::string path;
    double sequences = 0, tokens = 0;  // of 1
  };
  std::vector<Share> shares() const;

 private:
  struct File;
  struct Place {
    const File* file;
    int64_t document, begin, count, id;
  };
  Place find(uint64_t position) const;
  void index(File& file);
  // The weight of a path as a share of the sequences.
  double sequence_share(double weight, std::span<const std::unique_ptr<File>> files) const;
  void assign_slots(const std::vector<double>& weights);

  TokenDatasetOptions options_;
  uint64_t seed_;
  std::vector<std::unique_ptr<File>> files_;
  uint64_t cycle_ = 0;  // positions after which the shares come out exactly
  uint64_t sequences_ = 0;
  int64_t longest_ = 0;
  Summary summary_;
};

}  // namespace sb
