#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/sequence_source.h"
#include "data/synthetic/curriculum.h"

namespace sb {

// Tasks over token ids, for models trained from scratch. Only the answers are labels.
enum class SyntheticTask {
  chunk_recall,        // random first half; the second half repeats chunks from random places of it
  copy,                // the second half repeats the first
  needle_single,       // one key with its value, asked for at the end
  needle_multi_key,    // several keys, one asked for
  needle_multi_value,  // several values of one key, all asked for
  needle_multi_query,  // several keys, several asked for
  variable_tracking,   // chains of assignments; which variables hold this value?
  common_words,        // words that occur often among words that occur rarely
  frequent_words,      // the most frequent words of a steep distribution, most frequent first
  associative_recall,  // scattered key-value pairs, some asked for at the end
};

// "chunk_recall" and so on; an unknown name is a UserError that lists them all.
SyntheticTask parse_synthetic_task(std::string_view name);
std::string_view synthetic_task_name(SyntheticTask task);
std::vector<std::string_view> synthetic_task_names();

struct LengthDistribution {
  enum class Kind { fixed, uniform, log_uniform, pool };
  Kind kind = Kind::fixed;
  int64_t min = 2048;         // the length when fixed
  int64_t max = 2048;         // inclusive
  std::vector<int64_t> pool;  // drawn with equal chances

  static LengthDistribution fixed(int64_t length) { return {Kind::fixed, length, length, {}}; }
  static LengthDistribution uniform(int64_t min, int64_t max) { return {Kind::uniform, min, max, {}}; }
  static LengthDistribution log_uniform(int64_t min, int64_t max) { return {Kind::log_uniform, min, max, {}}; }
  static LengthDistribution from_pool(std::vector<int64_t> lengths);
  // A pure function of (seed, position).
  int64_t at(uint64_t seed, uint64_t position) const;
};

struct SyntheticOptions {
  SyntheticTask task = SyntheticTask::chunk_recall;
  int64_t vocab_size = 1024;
  LengthDistribution length;
  std::optional<CurriculumOptions> curriculum;  // overrides `length`

  int64_t chunk = 8;         // chunk_recall: tokens per chunk; the 2nd and later ones are labels
  int64_t needles = 4;       // keys planted (needle_multi_key, needle_multi_query), pairs (associative_recall)
  int64_t values = 4;        // values of the key (needle_multi_value)
  int64_t queries = 2;       // keys asked for (needle_multi_query, associative_recall)
  int64_t value_tokens = 1;  // tokens of a value (needles, associative_recall)
  int64_t hops = 4;          // variable_tracking: assignments after the first
  int64_t chains = 2;        // variable_tracking: chains, one asked for
  int64_t answers = 4;       // common_words, frequent_words: words asked for
  double depth = -1.0;       // needle_single: place of the needle, 0 (start) to 1 (end); negative: random
  // Nothing that helps lies closer to the question than this. -1: 0 for chunk_recall and copy, else 512 or a quarter
  // of the length, whichever is less.
  int64_t min_distance = -1;
};

// Throws UserError where the options do not fit each other (a vocabulary too small, a length too short).
std::unique_ptr<SequenceSource> make_synthetic_source(const SyntheticOptions& options, uint64_t seed);

// For chunk recall: which token of its chunk (2 .. chunk) the label at position i of a sequence of `length` tokens is;
// 0 where no label counts. Accuracy from the third token on is what tells recall from guessing among repeats.
int64_t chunk_recall_token(int64_t i, int64_t length, int64_t chunk = 8);

}  // namespace sb
