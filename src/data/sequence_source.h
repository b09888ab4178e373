#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/labels.h"

namespace sb {

struct TokenSequence {
  int64_t id = 0;  // names the sequence in logs and plans; stable over epochs for token files
  std::vector<int32_t> tokens;
  // labels[i] is the target at position i, the next token (already shifted), or kIgnoredLabel; always kIgnoredLabel at
  // the last token. Same size as tokens.
  std::vector<int32_t> labels;
  int source = 0;  // which of SequenceSource::sources() it is from
};

// An endless order of sequences. Everything is a pure function of (seed, position) and, for a source that learns from
// the training (a curriculum), of state(): to resume, a trainer needs the next position and that string. Reading is
// safe from several threads at once; observe() and restore_state() are not, while others read.
class SequenceSource {
 public:
  virtual ~SequenceSource() = default;

  // Tokens of the sequence at this position of the (shuffled, endless) order; cheap.
  virtual int64_t length(uint64_t position) const = 0;
  // How many of its labels count; cheap.
  virtual int64_t valid_targets(uint64_t position) const = 0;
  virtual TokenSequence read(uint64_t position) const = 0;

  // Sequences of one pass over the data (positions 0 .. size-1 visit each once); 0 when there is no such thing.
  virtual uint64_t size() const { return 0; }
  // No sequence is ever longer, whatever the source may learn later: what memory is planned for.
  virtual int64_t max_length() const = 0;

  // What it draws from, by name, where that is several things.
  virtual std::vector<std::string> sources() const { return {}; }

  // What the order depends on besides the seed, in words; empty: nothing that could change from one run to the next.
  virtual std::string identity() const { return {}; }

  // Tells the source how many of the counted targets were predicted right in a step. `next_position` is the first one
  // nobody has asked about yet: what changes, changes from there on. Returns whether something changed.
  virtual bool observe(int64_t correct, int64_t counted, uint64_t next_position) { return false; }
  // What was learned from observe(), as printable text for the checkpoint.
  virtual std::string state() const { return {}; }
  virtual void restore_state(const std::string& state) {}
};

}  // namespace sb
