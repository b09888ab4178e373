#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sb {

// The merges of a byte-level BPE model over token ids. Immutable after the last add_merge().
class BpeModel {
 public:
  static constexpr int32_t kNone = -1;

  explicit BpeModel(bool ignore_merges) : ignore_merges_(ignore_merges) { byte_tokens_.assign(256, kNone); }

  void reserve(size_t tokens, size_t merges);
  void add_token(std::string bytes, int32_t id);
  // Rank: earlier merges win. A pair given again takes the later rank, as the reference implementation has it.
  void add_merge(int32_t left, int32_t right, int32_t merged);
  // For bytes that have no token of their own; kNone: encode() reports them.
  void set_unknown(int32_t id) { unknown_ = id; }

  // kNone when no token stands for exactly these bytes.
  int32_t find(std::string_view bytes) const;

  struct Scratch;
  // Appends the tokens of one pre-token. Returns the offset of a byte that has no token, or -1.
  int64_t encode(std::string_view word, Scratch& scratch, std::vector<int32_t>& ids) const;

  struct Symbol {
    int32_t id;
    int32_t previous, next;  // in the list of what is left; -1 at the ends
  };
  struct Candidate {
    int32_t rank;
    int32_t at;
    int32_t left, right, merged;
    // For a heap with the least rank, then the leftmost place, on top.
    bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }
  };
  struct Scratch {
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
    std::vector<int32_t> ids;
    std::vector<int32_t> ranks;
    std::vector<int32_t> merged;
  };

 private:
  struct Merge {
    uint64_t pair = UINT64_MAX;
    int32_t rank = 0, merged = 0;
  };
  const Merge* find_merge(int32_t left, int32_t right) const;
  void grow(size_t slots);
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;

  bool ignore_merges_;
  int32_t unknown_ = kNone;
  int32_t next_rank_ = 0;
  size_t merge_count_ = 0;
  std::vector<int32_t> byte_tokens_;
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view bytes) const { return std::hash<std::string_view>()(bytes); }
  };
  std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> tokens_;
  std::vector<Merge> merges_;  // open addressing, a power of two of slots, at most half full
};

// Remembers the tokens of words seen before; forgets all when full. One thread at a time.
class WordCache {
 public:
  WordCache();
  // Words longer than this are not worth remembering.
  static constexpr size_t kMaxWord = 48;

  // Appends what the word became earlier; false when it is not known.
  bool find(std::string_view word, uint64_t hash, std::vector<int32_t>& ids) const;
  void insert(std::string_view word, uint64_t hash, const int32_t* ids, size_t count);
  static uint64_t hash(std::string_view word);

 private:
  struct Entry {
    uint64_t hash = 0;
    uint32_t bytes_at = 0, ids_at = 0;
    uint16_t bytes = 0, ids = 0;  // bytes 0: free
  };
  std::vector<Entry> entries_;
  std::vector<char> bytes_;
  std::vector<int32_t> ids_;
  size_t used_ = 0;
};

}  // namespace sb
