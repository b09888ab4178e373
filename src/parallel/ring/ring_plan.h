#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/cpu/sparse_attention.h"
#include "attention/index/block_index.h"
#include "comm/communicator.h"
#include "core/thread_pool.h"
#include "parallel/ring/context_layout.h"

namespace sb {

// Keys that every rank gets a copy of before the ring starts: sinks and gathered columns, which nearly all queries
// want, so that their owner would be a straggler. The same on all ranks.
struct ReplicatedKeys {
  // For every rank the tokens it gives copies of, counted among the tokens it holds, ascending.
  std::vector<std::vector<int32_t>> given;
  // A rank's piece has room for this many: the most any gives.
  int64_t piece = 0;
  // Of a token of the micro-batch: rank · piece + number in `given`, or -1.
  std::vector<int32_t> copy;
};

// `wanted`: nonzero for every token of the micro-batch that some rank's row has as a gathered column; empty: none.
// Besides these, the first `replicated_blocks` blocks of every sequence that is not dense, but not its last block,
// which nobody else sees. Copies never take more room than the tokens that one rank holds: gathered columns that are
// too many for that are left out and travel with the ring (being many, they are on all ranks alike), and so are sinks.
ReplicatedKeys replicated_keys(const ContextLayout& layout, const BlockIndex& index, int replicated_blocks,
                               std::span<const uint8_t> wanted);

// Which tokens of the micro-batch somebody's rows have as gathered columns; empty: none. Collective.
std::vector<uint8_t> wanted_columns(Communicator& group, const ContextLayout& layout, const BlockIndex& index);

// Adds the pairs of this rank's queries to a report.
void count_ring_pairs(const ContextLayout& layout, int rank, const BlockIndex& index, LayerAttention& report,
                      int64_t first_query = 0);

// Adds the measured coverage of every sequence, on the first rank alone, for all of them.
void add_ring_coverage(const ContextLayout& layout, int rank, int layer, const std::vector<CoverageSample>& samples,
                       AttentionReport& report);

// One call of the attention kernels: the queries of this rank against keys that lie together. Selected blocks lie
// before their queries, as in the true order: the index of a call is one of sequences made of the keys' blocks,
// followed by the rank's own blocks. Against its own keys the sequences are the rank's tokens, which are keys and
// queries.
struct RingPass {
  enum class Keys { own, copies, chunk };
  struct Part {
    int64_t begin = 0;         // first token of the made-up sequence
    int64_t keys = 0;          // tokens before the own ones, a multiple of the block
    int64_t key_source = 0;    // where they come from in the chunk, or in `copies`
    int64_t before = 0;        // against its own keys: those of earlier pieces, which are no queries
    int64_t queries = 0;       // own tokens
    int64_t query_source = 0;  // their place among the tokens the rank holds
    int64_t end() const { return begin + keys + before + queries; }
  };
  Keys source = Keys::chunk;
  std::vector<Part> parts;
  std::vector<int32_t> copies;  // of every token of the parts' keys its copy (ReplicatedKeys), or -1: padding
  BlockIndex index;
  int64_t tokens() const { return parts.empty() ? 0 : parts.back().end(); }
  // The parts, as the kernels want them.
  std::vector<SequenceRows> rows() const;
};

// Which made-up sequences the passes over some of the sequences have, and where keys lie in them: what does not depend
// on the lists. Pass c is that of rank c's chunk, the last one that of the copies.
class PassLayout {
 public:
  // `replicated_blocks` as in replicated_keys(): only these and gathered columns are looked for among the copies.
  // `first_query`: of a piece, which is all of the layout's only sequence from there on.
  PassLayout(const ContextLayout& layout, int rank, const ReplicatedKeys& replicated, int replicated_blocks,
             int64_t first_query = 0);

  // `copies`: keys that have copies here are taken from them.
  void add_sequence(int sequence, bool copies);
  int passes() const { return static_cast<int>(passes_.size()); }
  // With source, parts and copies.
  RingPass& pass(int c) { return passes_[c]; }
  const RingPass& pass(int c) const { return passes_[c]; }
  // Of the tokens that the rank holds, those before the queries.
  int64_t before() const { return before_; }
  // Which part of the pass a sequence is; -1: none.
  int part_of(int c, int sequence) const { return part_of_[c][sequence]; }
  // Which pass has a key block of a sequence, or a single key, and which block or token of the made-up sequence it is.
  struct Place {
    int pass;
    int64_t at;
  };
  Place place_of_block(int sequence, int64_t b) const;
  Place place_of_token(int sequence, int64_t token) const;

 private:
  void add_copies(int sequence, std::vector<int32_t>& copies);
  // Where the copy of a token lies in the made-up sequence; -1: there is none.
  int64_t place_of_copy(int sequence, int64_t token) const;

  const ContextLayout& layout_;
  const int rank_, copies_;  // `copies_`: the pass after those of the chunks
  const ReplicatedKeys& replicated_;
  const int replicated_blocks_;
  int64_t before_ = 0;
  std::vector<std::vector<int32_t>> local_;
  std::vector<RingPass> passes_;
  std::vector<std::vector<int>> part_of_;     // [pass][sequence]
  std::vector<std::vector<int32_t>> copied_;  // [sequence]: its tokens that have copies here, ascending
};

// All calls of one attention forward or backward. `index` covers the whole micro-batch, but only the rows of query
// blocks that `rank` holds count. `first_query`: as in PassLayout.
constexpr int kDenseQueryBlock = 64;  // tokens that share a list of a dense sequence

class RingPlan {
 public:
  void build(const ContextLayout& layout, int rank, int kv_heads, const BlockIndex& index,
             const ReplicatedKeys& replicated, int replicated_blocks, ThreadPool& pool, int64_t first_query = 0);
  // The calls for one chunk: none when nothing of it was selected.
  std::span<const RingPass> passes(int chunk) const { return passes_[chunk]; }
  // The one for copies, or null.
  const RingPass* copies() const { return passes_.empty() || passes_.back().empty() ? nullptr : &passes_.back()[0]; }
  // Bytes the lists hold now.
  int64_t bytes() const;

 private:
  std::vector<std::vector<RingPass>> passes_;  // [ranks + 1]: of every chunk, then of the copies
};

}  // namespace sb
