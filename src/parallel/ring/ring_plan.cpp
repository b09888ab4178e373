#include "parallel/ring/ring_plan.h"

#include <algorithm>

#include "core/errors.h"

namespace sb {

namespace {

int64_t in_blocks(int64_t tokens, int block) {
  return (tokens + block - 1) / block * block;
}

// Empty if they need more room than `limit` tokens, as pieces of the ranks or as blocks of made-up sequences.
ReplicatedKeys keys_within(int64_t limit, const ContextLayout& layout, const BlockIndex& index, int replicated_blocks,
                           std::span<const uint8_t> wanted) {
  const std::span<const int32_t> cu_seqlens = layout.cu_seqlens();
  const int block = layout.block();
  ReplicatedKeys keys;
  keys.given.resize(layout.ranks());
  std::vector<std::vector<int32_t>> tokens(layout.ranks());  // of the micro-batch
  std::vector<std::vector<int32_t>> local(layout.ranks());
  for (int r = 0; r < layout.ranks(); ++r) local[r] = layout.local_cu_seqlens(r);
  int64_t room = 0;
  for (int s = 0; s < layout.sequences(); ++s) {
    if (index.sequences()[s].dense) continue;
    int64_t count = 0;
    for (int64_t b = 0; b < layout.blocks(s); ++b) {
      const bool whole = b < replicated_blocks && b + 1 < layout.blocks(s);
      if (!whole && wanted.empty()) continue;
      const int owner = layout.owner(s, b);
      for (int64_t i = 0; i < layout.block_length(s, b); ++i) {
        const auto token = static_cast<int32_t>(cu_seqlens[s] + b * block + i);
        if (!whole && wanted[token] == 0) continue;
        tokens[owner].push_back(token);
        keys.given[owner].push_back(static_cast<int32_t>(local[owner][s] + layout.place(s, b) * block + i));
        ++count;
      }
    }
    room += in_blocks(count, block);
  }
  for (const std::vector<int32_t>& given : keys.given) keys.piece = std::max<int64_t>(keys.piece, std::ssize(given));
  if (std::max(room, keys.piece * layout.ranks()) > limit) return {};
  keys.copy.assign(cu_seqlens.back(), -1);
  for (int r = 0; r < layout.ranks(); ++r)
    for (size_t i = 0; i < tokens[r].size(); ++i)
      keys.copy[tokens[r][i]] = static_cast<int32_t>(r * keys.piece + static_cast<int64_t>(i));
  return keys;
}

}  // namespace

ReplicatedKeys replicated_keys(const ContextLayout& layout, const BlockIndex& index, int replicated_blocks,
                               std::span<const uint8_t> wanted) {
  int64_t limit = -1;  // one rank alone needs no copies
  for (int r = 0; layout.ranks() > 1 && r < layout.ranks(); ++r)
    limit = std::max<int64_t>(limit, layout.local_cu_seqlens(r).back());
  ReplicatedKeys keys = keys_within(limit, layout, index, replicated_blocks, wanted);
  if (keys.given.empty() && !wanted.empty()) keys = keys_within(limit, layout, index, replicated_blocks, {});
  if (keys.given.empty()) {
    keys.given.resize(layout.ranks());
    keys.copy.assign(layout.cu_seqlens().back(), -1);
  }
  return keys;
}

std::vector<uint8_t> wanted_columns(Communicator& group, const ContextLayout& layout, const BlockIndex& index) {
  std::vector<uint8_t> wanted;
  if (group.all_reduce(static_cast<int32_t>(index.has_gathered_columns()), ReduceOp::max) == 0) return wanted;
  wanted.resize(layout.cu_seqlens().back());
  for (int64_t id = 0; id < index.rows(); ++id) {
    const BlockIndex::Row row = index.row(id);
    if (row.columns.empty()) continue;
    const int64_t begin = index.place_of(id).sequence->token_begin;
    for (const int32_t column : row.columns) wanted[begin + column] = 1;
  }
  group.all_reduce(std::span<uint8_t>(wanted), ReduceOp::max);
  return wanted;
}

void count_ring_pairs(const ContextLayout& layout, int rank, const BlockIndex& index, LayerAttention& report,
                      int64_t first_query) {
  const RingWork work = count_ring_work(layout, index, 0, first_query);
  report.pairs += work.outside[rank];
  for (int t = 0; t < layout.ranks(); ++t) report.pairs += work.at(rank, t);
  for (int s = 0; s < layout.sequences(); ++s)
    for (const int32_t b : layout.held_from(rank, s, first_query)) {
      const int64_t begin = int64_t{b} * layout.block(), end = begin + layout.block_length(s, b);
      report.causal_pairs += index.shape().list_heads * (end * (end + 1) - begin * (begin + 1)) / 2;
    }
}

void add_ring_coverage(const ContextLayout& layout, int rank, int layer, const std::vector<CoverageSample>& samples,
                       AttentionReport& report) {
  for (int s = 0; s < layout.sequences() && rank == 0; ++s) {
    const int64_t tokens = layout.length(s);
    if (tokens == 0) continue;
    report.samples.push_back({layer, tokens, samples[s]});
    report.layers[layer].coverage += samples[s].held * static_cast<double>(tokens);
    report.layers[layer].covered_tokens += tokens;
  }
}

std::vector<SequenceRows> RingPass::rows() const {
  std::vector<SequenceRows> rows;
  for (const Part& part : parts)
    rows.push_back(source == Keys::own
                       ? SequenceRows{part.before + part.queries, part.before, part.query_source, part.query_source}
                       : SequenceRows{part.keys, part.keys, part.key_source, part.query_source});
  return rows;
}

PassLayout::PassLayout(const ContextLayout& layout, int rank, const ReplicatedKeys& replicated, int replicated_blocks,
                       int64_t first_query)
    : layout_(layout),
      rank_(rank),
      copies_(layout.ranks()),
      replicated_(replicated),
      replicated_blocks_(replicated_blocks),
      passes_(copies_ + 1),
      part_of_(copies_ + 1, std::vector<int>(layout.sequences(), -1)),
      copied_(layout.sequences()) {
  for (int c = 0; c < layout.ranks(); ++c) local_.push_back(layout.local_cu_seqlens(c));
  if (first_query > 0) {
    SB_CHECK(layout.sequences() == 1 && first_query % layout.block() == 0, "queries from token {} of {} sequences on",
             first_query, layout.sequences());
    before_ = layout.block() * (std::ssize(layout.held(rank, 0)) - std::ssize(layout.held_from(rank, 0, first_query)));
  }
  passes_[rank].source = RingPass::Keys::own;
  passes_[copies_].source = RingPass::Keys::copies;
}

void PassLayout::add_sequence(int s, bool copies) {
  const int64_t queries = local_[rank_][s + 1] - local_[rank_][s] - before_;
  if (queries == 0) return;
  for (int c = 0; c <= copies_; ++c) {
    RingPass::Part part;
    part.begin = passes_[c].tokens();
    part.queries = queries;
    part.query_source = local_[rank_][s];
    if (c == rank_) part.before = before_;
    if (c == copies_) {
      part.key_source = std::ssize(passes_[c].copies);
      if (copies) add_copies(s, passes_[c].copies);
      part.keys = std::ssize(passes_[c].copies) - part.key_source;
    } else if (c != rank_) {
      // A short block is the sequence's last: only its own queries see it.
      part.keys = (local_[c][s + 1] - local_[c][s]) / layout_.block() * layout_.block();
      part.key_source = local_[c][s];
    }
    if (c != rank_ && part.keys == 0) continue;
    part_of_[c][s] = static_cast<int>(passes_[c].parts.size());
    passes_[c].parts.push_back(part);
  }
}

PassLayout::Place PassLayout::place_of_block(int s, int64_t b) const {
  const int owner = layout_.owner(s, b);
  // Sinks come first among the copies, so entries stay ascending.
  const int64_t copy = owner != rank_ && b < replicated_blocks_ ? place_of_copy(s, b * layout_.block()) : -1;
  if (copy >= 0) return {copies_, copy / layout_.block()};
  return {owner, layout_.place(s, b)};
}

PassLayout::Place PassLayout::place_of_token(int s, int64_t token) const {
  const int64_t b = token / layout_.block();
  const int owner = layout_.owner(s, b);
  const int64_t copy = owner == rank_ ? -1 : place_of_copy(s, token);
  if (copy >= 0) return {copies_, copy};
  return {owner, layout_.place(s, b) * int64_t{layout_.block()} + token % layout_.block()};
}

// Copies of other ranks' keys, padded to a block.
void PassLayout::add_copies(int s, std::vector<int32_t>& copies) {
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
  copies.resize(copies.size() + in_blocks(std::ssize(copied_[s]), block) - std::ssize(copied_[s]), -1);
}

int64_t PassLayout::place_of_copy(int s, int64_t token) const {
  const auto found = std::lower_bound(copied_[s].begin(), copied_[s].end(), static_cast<int32_t>(token));
  return found != copied_[s].end() && *found == token ? found - copied_[s].begin() : -1;
}

namespace {

// The passes of either the sparse or the dense sequences, under construction.
class PassBuilder {
 public:
  PassBuilder(const ContextLayout& layout, int rank, const BlockIndexShape& shape, const ReplicatedKeys& replicated,
              int replicated_blocks, int64_t first_query)
      : layout_(layout),
        shape_(shape),
        passes_(layout, rank, replicated, replicated_blocks, first_query),
        builders_(passes_.passes()),
        entries_(passes_.passes()),
        columns_(passes_.passes()) {}

  void add_sequence(int s, bool sparse) { passes_.add_sequence(s, sparse); }

  void begin() {
    for (int c = 0; c < passes_.passes(); ++c) {
      std::vector<int32_t> cu_seqlens = {0};
      for (const RingPass::Part& part : passes_.pass(c).parts) cu_seqlens.push_back(static_cast<int32_t>(part.end()));
      builders_[c].begin(passes_.pass(c).index, shape_, cu_seqlens, {}, 1);
    }
  }

  void add_entry(int s, const IndexEntry& entry) {
    const PassLayout::Place place = passes_.place_of_block(s, entry.block);
    entries_[place.pass].push_back({static_cast<uint16_t>(place.at), entry.first});
  }

  void add_column(int s, int32_t column) {
    const PassLayout::Place place = passes_.place_of_token(s, column);
    columns_[place.pass].push_back(static_cast<int32_t>(place.at));
  }

  // Hands what was added over as the row of tile `tile` of the sequence.
  void end_row(int s, int list_head, int64_t tile) {
    const int64_t first = tile * shape_.query_block, b = first / layout_.block();
    for (int c = 0; c < passes_.passes(); ++c) {
      if (entries_[c].empty() && columns_[c].empty()) continue;
      const int part = passes_.part_of(c, s);
      const RingPass& pass = passes_.pass(c);
      const BlockIndex::Sequence& sequence = pass.index.sequences()[part];
      // The first query follows the keys of a chunk, and against its own the keys of earlier pieces.
      const int64_t token = pass.parts[part].keys + pass.parts[part].before - passes_.before() +
                            layout_.place(s, b) * int64_t{layout_.block()} + first % layout_.block();
      builders_[c].set_row(0, BlockIndex::row_id(sequence, list_head, static_cast<int>(token / shape_.query_block)),
                           entries_[c], columns_[c]);
      entries_[c].clear();
      columns_[c].clear();
    }
  }

  void finish(ThreadPool& pool, std::vector<std::vector<RingPass>>& out) {
    for (int c = 0; c < passes_.passes(); ++c) {
      builders_[c].finish(pool);
      RingPass& pass = passes_.pass(c);
      if (pass.index.entries() > 0 || pass.index.has_gathered_columns()) out[c].push_back(std::move(pass));
    }
  }

 private:
  const ContextLayout& layout_;
  const BlockIndexShape shape_;
  PassLayout passes_;
  std::vector<BlockIndexBuilder> builders_;
  std::vector<std::vector<IndexEntry>> entries_;  // of the row, by pass
  std::vector<std::vector<int32_t>> columns_;
};

}  // namespace

void RingPlan::build(const ContextLayout& layout, int rank, int kv_heads, const BlockIndex& index,
                     const ReplicatedKeys& replicated, int replicated_blocks, ThreadPool& pool, int64_t first_query) {
  const int block = layout.block(), query_block = index.shape().query_block;
  SB_CHECK(std::ssize(index.sequences()) == layout.sequences(), "an index of {} sequences for {}",
           index.sequences().size(), layout.sequences());
  passes_.clear();
  passes_.resize(layout.ranks() + 1);
  for (const bool sparse : {true, false}) {
    // Dense lists are free to choose their tiles.
    const BlockIndexShape shape =
        sparse ? index.shape() : BlockIndexShape{block, std::min(block, kDenseQueryBlock), kv_heads};
    PassBuilder passes(layout, rank, shape, replicated, sparse ? replicated_blocks : 0, first_query);
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
      for (const int32_t b : layout.held_from(rank, s, first_query))
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
