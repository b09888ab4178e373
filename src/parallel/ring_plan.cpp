#include "parallel/ring_plan.h"

#include <algorithm>

#include "core/errors.h"

namespace sb {

ReplicatedKeys replicated_keys(const ContextLayout& layout, const BlockIndex& index, int replicated_blocks,
                               std::span<const uint8_t> wanted) {
  const std::span<const int32_t> cu_seqlens = layout.cu_seqlens();
  const int block = layout.block();
  ReplicatedKeys keys;
  keys.given.resize(layout.ranks());
  keys.copy.assign(cu_seqlens.back(), -1);
  std::vector<std::vector<int32_t>> tokens(layout.ranks());  // of the micro-batch
  std::vector<std::vector<int32_t>> local(layout.ranks());
  for (int r = 0; r < layout.ranks(); ++r) local[r] = layout.local_cu_seqlens(r);
  for (int s = 0; s < layout.sequences(); ++s) {
    if (index.sequences()[s].dense) continue;
    for (int64_t b = 0; b < layout.blocks(s); ++b) {
      const bool whole = b < replicated_blocks && b + 1 < layout.blocks(s);
      if (!whole && wanted.empty()) continue;
      const int owner = layout.owner(s, b);
      for (int64_t i = 0; i < layout.block_length(s, b); ++i) {
        const auto token = static_cast<int32_t>(cu_seqlens[s] + b * block + i);
        if (!whole && wanted[token] == 0) continue;
        tokens[owner].push_back(token);
        keys.given[owner].push_back(static_cast<int32_t>(local[owner][s] + layout.place(s, b) * block + i));
      }
    }
  }
  for (const std::vector<int32_t>& given : keys.given) keys.piece = std::max<int64_t>(keys.piece, std::ssize(given));
  for (int r = 0; r < layout.ranks(); ++r)
    for (size_t i = 0; i < tokens[r].size(); ++i)
      keys.copy[tokens[r][i]] = static_cast<int32_t>(r * keys.piece + static_cast<int64_t>(i));
  return keys;
}

namespace {

// The passes of either the sparse or the dense sequences, under construction.
class PassBuilder {
 public:
  PassBuilder(const ContextLayout& layout, int rank, const BlockIndexShape& shape, const ReplicatedKeys& replicated,
              int replicated_blocks)
      : layout_(layout),
        rank_(rank),
        shape_(shape),
        replicated_(replicated),
        replicated_blocks_(replicated_blocks),
        passes_(layout.ranks()),
        builders_(layout.ranks()),
        part_of_(layout.ranks(), std::vector<int>(layout.sequences(), -1)),
        entries_(layout.ranks()),
        copied_(layout.sequences()) {
    for (int c = 0; c < layout.ranks(); ++c) local_.push_back(layout.local_cu_seqlens(c));
    passes_[rank].own = true;
  }

  void add_sequence(int s, bool sparse) {
    const int64_t queries = local_[rank_][s + 1] - local_[rank_][s];
    if (queries == 0) return;
    for (int c = 0; c < layout_.ranks(); ++c) {
      RingPass::Part part;
      part.begin = passes_[c].tokens();
      part.queries = queries;
      part.query_source = local_[rank_][s];
      if (c == rank_) {
        part.key_source = std::ssize(passes_[c].copies);
        if (sparse) add_copies(s, passes_[c].copies);
        part.keys = std::ssize(passes_[c].copies) - part.key_source;
      } else {
        // A short block is the sequence's last: only its own queries see it.
        part.keys = (local_[c][s + 1] - local_[c][s]) / layout_.block() * layout_.block();
        part.key_source = local_[c][s];
        if (part.keys == 0) continue;
      }
      part_of_[c][s] = static_cast<int>(passes_[c].parts.size());
      passes_[c].parts.push_back(part);
    }
  }

  void begin() {
    for (int c = 0; c < layout_.ranks(); ++c) {
      std::vector<int32_t> cu_seqlens = {0};
      for (const RingPass::Part& part : passes_[c].parts)
        cu_seqlens.push_back(static_cast<int32_t>(part.begin + part.keys + part.queries));
      builders_[c].begin(passes_[c].index, shape_, cu_seqlens, {}, 1);
    }
  }

  void add_entry(int s, const IndexEntry& entry) {
    const int64_t j = entry.block;
    const int owner = layout_.owner(s, j);
    if (owner == rank_) {
      own_entries_.push_back({virtual_block(rank_, s, layout_.place(s, j)), entry.first});
    } else if (j < replicated_blocks_) {
      // Sinks come first among the copies, so the entries stay ascending.
      const int64_t place = place_of_copy(s, j * layout_.block());
      entries_[rank_].push_back({static_cast<uint16_t>(place / layout_.block()), entry.first});
    } else {
      entries_[owner].push_back({static_cast<uint16_t>(layout_.place(s, j)), entry.first});
    }
  }

  void add_column(int s, int32_t column) {
    const int64_t b = column / layout_.block();
    if (layout_.owner(s, b) == rank_)
      columns_.push_back(static_cast<int32_t>(own_begin(s) + layout_.place(s, b) * int64_t{layout_.block()} +
                                              column % layout_.block()));
    else
      columns_.push_back(static_cast<int32_t>(place_of_copy(s, column)));
  }

  // Hands what was added over as the row of tile `tile` of the sequence.
  void end_row(int s, int list_head, int64_t tile) {
    const int64_t first = tile * shape_.query_block, b = first / layout_.block();
    std::vector<IndexEntry>& own = entries_[rank_];
    own.insert(own.end(), own_entries_.begin(), own_entries_.end());
    own_entries_.clear();
    std::sort(columns_.begin(), columns_.end());
    for (int c = 0; c < layout_.ranks(); ++c) {
      const std::span<const int32_t> columns =
          c == rank_ ? std::span<const int32_t>(columns_) : std::span<const int32_t>();
      if (entries_[c].empty() && columns.empty()) continue;
      const int part = part_of_[c][s];
      const BlockIndex::Sequence& sequence = passes_[c].index.sequences()[part];
      const int64_t token =
          passes_[c].parts[part].keys + layout_.place(s, b) * int64_t{layout_.block()} + first % layout_.block();
      builders_[c].set_row(0, BlockIndex::row_id(sequence, list_head, static_cast<int>(token / shape_.query_block)),
                           entries_[c], columns);
      entries_[c].clear();
    }
    columns_.clear();
  }

  void finish(ThreadPool& pool, std::vector<std::vector<RingPass>>& out) {
    for (int c = 0; c < layout_.ranks(); ++c) {
      builders_[c].finish(pool);
      if (passes_[c].index.entries() > 0 || passes_[c].index.has_gathered_columns())
        out[c].push_back(std::move(passes_[c]));
    }
  }

 private:
  int64_t own_begin(int s) const { return passes_[rank_].parts[part_of_[rank_][s]].keys; }
  uint16_t virtual_block(int c, int s, int32_t place) const {
    return static_cast<uint16_t>(passes_[c].parts[part_of_[c][s]].keys / layout_.block() + place);
  }

  // Copies of other ranks' keys: whole blocks, then columns of later ones, padded to a block.
  void add_copies(int s, std::vector<int32_t>& copies) {
    const int block = layout_.block();
    for (int64_t b = 0; b < layout_.blocks(s); ++b) {
      if (layout_.owner(s, b) == rank_) continue;
      for (int64_t i = 0; i < layout_.block_length(s, b); ++i) {
        const int64_t token = b * block + i;
        const int32_t copy = replicated_.copy[layout_.cu_seqlens()[s] + token];
        if (copy < 0) continue;
        copied_[s].push_back(static_cast<int32_t>(token));
        copies.push_back(copy);
      }
    }
    copies.resize(copies.size() + (block - std::ssize(copied_[s]) % block) % block, -1);
  }

  // Where the copy of a token lies in the made-up sequence.
  int64_t place_of_copy(int s, int64_t token) const {
    const auto found = std::lower_bound(copied_[s].begin(), copied_[s].end(), static_cast<int32_t>(token));
    SB_CHECK(found != copied_[s].end() && *found == token, "token {} of sequence {} has no copy", token, s);
    return found - copied_[s].begin();
  }

  const ContextLayout& layout_;
  const int rank_;
  const BlockIndexShape shape_;
  const ReplicatedKeys& replicated_;
  const int replicated_blocks_;
  std::vector<std::vector<int32_t>> local_;
  std::vector<RingPass> passes_;
  std::vector<BlockIndexBuilder> builders_;
  std::vector<std::vector<int>> part_of_;         // [chunk][sequence]
  std::vector<std::vector<IndexEntry>> entries_;  // of the row, by chunk
  std::vector<IndexEntry> own_entries_;
  std::vector<int32_t> columns_;
  std::vector<std::vector<int32_t>> copied_;  // [sequence]: its tokens that have copies here, ascending
};

}  // namespace

void RingPlan::build(const ContextLayout& layout, int rank, int kv_heads, const BlockIndex& index,
                     const ReplicatedKeys& replicated, int replicated_blocks, ThreadPool& pool) {
  const int block = layout.block(), query_block = index.shape().query_block;
  SB_CHECK(std::ssize(index.sequences()) == layout.sequences(), "an index of {} sequences for {}",
           index.sequences().size(), layout.sequences());
  passes_.clear();
  passes_.resize(layout.ranks());
  for (const bool sparse : {true, false}) {
    // Dense lists are free to choose their tiles.
    const BlockIndexShape shape =
        sparse ? index.shape() : BlockIndexShape{block, std::min(block, kDenseQueryBlock), kv_heads};
    PassBuilder passes(layout, rank, shape, replicated, sparse ? replicated_blocks : 0);
    bool any = false;
    for (int s = 0; s < layout.sequences(); ++s) {
      if (index.sequences()[s].dense == sparse) continue;
      passes.add_sequence(s, sparse);
      any = true;
    }
    if (!any) continue;
    SB_CHECK(!sparse || (index.shape().block == block && block % query_block == 0),
             "blocks of {} in the index and {} in the layout, query blocks of {}", index.shape().block, block,
             query_block);
    passes.begin();
    for (int s = 0; s < layout.sequences(); ++s) {
      const BlockIndex::Sequence& sequence = index.sequences()[s];
      if (sequence.dense == sparse) continue;
      for (const int32_t b : layout.held(rank, s))
        for (int64_t token = int64_t{b} * block; token < int64_t{b} * block + layout.block_length(s, b);
             token += shape.query_block)
          for (int head = 0; head < shape.list_heads; ++head) {
            const int64_t tile = token / shape.query_block;
            if (sparse) {
              const BlockIndex::Row row = index.row(BlockIndex::row_id(sequence, head, static_cast<int>(tile)));
              for (size_t i = 0; i < row.blocks.size(); ++i) passes.add_entry(s, {row.blocks[i], row.first[i]});
              for (const int32_t column : row.columns) passes.add_column(s, column);
            } else {
              for (int64_t j = 0; j <= b; ++j) passes.add_entry(s, {static_cast<uint16_t>(j), 0});
            }
            passes.end_row(s, head, tile);
          }
    }
    passes.finish(pool, passes_);
  }
}

int64_t RingPlan::bytes() const {
  int64_t sum = 0;
  for (const std::vector<RingPass>& passes : passes_)
    for (const RingPass& pass : passes) sum += pass.index.bytes() + std::ssize(pass.copies) * int64_t{sizeof(int32_t)};
  return sum;
}

}  // namespace sb
