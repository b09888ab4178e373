#include "attention/gpu/plan/given_index.h"

#include <algorithm>
#include <set>

#include "core/errors.h"

namespace sb::gpu {
namespace {

// Calls body(list head, sequence, query block of it) in the order of the kernels' rows: dense sequences have rows there
// too, without entries.
template <typename Body>
void each_row(const BlockIndex& index, int32_t first_query, Body body) {
  const int query_block = index.shape().query_block;
  for (int head = 0; head < index.shape().list_heads; ++head)
    for (const BlockIndex::Sequence& sequence : index.sequences())
      for (int i = first_query / query_block; i < divide_up(sequence.length, query_block); ++i) body(head, sequence, i);
}

// Key blocks of the kernels that a row lists.
std::vector<uint32_t> entries_of(const BlockIndex& index, const BlockIndex::Sequence& sequence, int head,
                                 int query_block, int block) {
  std::vector<uint32_t> entries;
  const BlockIndex::Row row = index.row(BlockIndex::row_id(sequence, head, query_block));
  const int expand = index.shape().block / block;
  const int last = query_block * index.shape().query_block + index.query_tokens(sequence, query_block) - 1;
  for (size_t i = 0; i < row.blocks.size(); ++i)
    for (int half = 0; half < expand; ++half)
      if (const int j = row.blocks[i] * expand + half; j * block <= last)
        entries.push_back(list_entry(static_cast<uint32_t>(j), row.first[i]));
  return entries;
}

}  // namespace

SelectPlan plan_of(const BlockIndex& index, int32_t first_query) {
  SB_CHECK(first_query == 0 || (index.sequences().size() == 1 && first_query % index.shape().query_block == 0 &&
                                !index.has_gathered_columns()),
           "lists of a piece from token {} on", first_query);
  SelectPlan plan;
  plan.list_heads = index.shape().list_heads;
  plan.query_block = index.shape().query_block;
  plan.select_block = index.shape().block;
  plan.block = std::min(plan.select_block, kBlock);
  plan.row_offsets.push_back(0);
  each_row(index, first_query, [&](int head, const BlockIndex::Sequence& sequence, int query_block) {
    size_t count = 0;
    if (!sequence.dense) count = entries_of(index, sequence, head, query_block, plan.block).size();
    SB_CHECK(plan.row_offsets.back() + static_cast<int64_t>(count) < INT32_MAX, "more than 2^31 entries");
    plan.row_offsets.push_back(plan.row_offsets.back() + static_cast<int32_t>(count));
  });
  plan.entries = plan.row_offsets.back();
  for (const BlockIndex::Sequence& sequence : index.sequences()) {
    plan.rows += divide_up(sequence.length - first_query, plan.query_block);
    plan.columns += plan.list_heads * divide_up(sequence.length, plan.block);
  }
  plan.token_pairs = index.token_pairs();
  return plan;
}

std::vector<int32_t> gathered_capacities(const BlockIndex& index) {
  if (!index.has_gathered_columns()) return {};
  std::vector<int32_t> most;
  for (const BlockIndex::Sequence& sequence : index.sequences()) {
    size_t columns = 0;
    for (int head = 0; head < index.shape().list_heads && !sequence.dense; ++head) {
      std::set<int32_t> all;
      for (int i = 0; i < sequence.query_blocks; ++i) {
        const BlockIndex::Row row = index.row(BlockIndex::row_id(sequence, head, i));
        all.insert(row.columns.begin(), row.columns.end());
      }
      columns = std::max(columns, all.size());
    }
    most.push_back(static_cast<int32_t>(columns));
  }
  return most;
}

HostLists lists_of(const BlockIndex& index, const SelectPlan& plan, const Work& work, int32_t first_query) {
  HostLists lists;
  std::vector<std::vector<uint32_t>> columns(plan.columns);
  const int32_t head_columns = plan.columns / plan.list_heads;
  int32_t column = 0;
  const int first_row = first_query / plan.query_block;
  each_row(index, first_query, [&](int head, const BlockIndex::Sequence& sequence, int query_block) {
    if (query_block == first_row) {
      // First row of this sequence: its columns follow those of the sequences before it.
      const auto before = static_cast<size_t>(&sequence - index.sequences().data());
      column = head * head_columns;
      for (size_t s = 0; s < before; ++s) column += divide_up(index.sequences()[s].length, plan.block);
    }
    if (sequence.dense) return;
    for (const uint32_t entry : entries_of(index, sequence, head, query_block, plan.block)) {
      lists.row_entries.push_back(entry);
      columns[column + entry_id(entry)].push_back(
          list_entry(static_cast<uint32_t>(query_block - first_row), entry_first(entry)));
    }
  });
  lists.column_offsets.push_back(0);
  for (const auto& one : columns) {
    lists.column_entries.insert(lists.column_entries.end(), one.begin(), one.end());
    lists.column_offsets.push_back(static_cast<int32_t>(lists.column_entries.size()));
  }
  lists.gathered_columns.assign(work.gathered_columns, kNoColumn);
  lists.gathered_bits.assign(work.gathered_words, 0);
  size_t at = 0;
  for (const BlockIndex::Sequence& sequence : index.sequences()) {
    if (at == work.gathered.size() || sequence.dense || work.gathered[at].token != sequence.token_begin ||
        sequence.length == 0)
      continue;
    for (int head = 0; head < plan.list_heads; ++head) {
      const GatheredList& list = work.gathered[at++];
      std::set<int32_t> all;
      for (int i = 0; i < sequence.query_blocks; ++i) {
        const BlockIndex::Row row = index.row(BlockIndex::row_id(sequence, head, i));
        all.insert(row.columns.begin(), row.columns.end());
      }
      const auto begin = lists.gathered_columns.begin() + list.columns;
      const auto end = std::copy(all.begin(), all.end(), begin);
      for (int i = 0; i < sequence.query_blocks; ++i)
        for (const int32_t key : index.row(BlockIndex::row_id(sequence, head, i)).columns) {
          const auto place = std::lower_bound(begin, end, key) - begin;
          lists.gathered_bits[list.bits + int64_t{i} * list.pieces + place / kGatheredPiece] |=
              uint64_t{1} << (place % kGatheredPiece);
        }
    }
  }
  return lists;
}

BlockIndex index_of(const IndexOf& what, const SelectPlan& plan, const Work& work, const HostLists& lists,
                    ThreadPool& pool) {
  BlockIndex index;
  BlockIndexBuilder builder;
  const std::vector<uint8_t> dense(what.dense.begin(), what.dense.end());
  builder.begin(index, what.shape, what.cu_seqlens, dense, pool.threads());
  const int expand = plan.block == 0 ? 1 : plan.select_block / plan.block;
  int64_t row_base = 0;
  size_t gathered = 0;
  for (const BlockIndex::Sequence& sequence : index.sequences()) {
    if (sequence.length == 0) continue;
    const int rows = plan.query_block == 0 ? 0 : divide_up(sequence.length, plan.query_block);
    const bool has_columns =
        gathered < work.gathered.size() && !sequence.dense && work.gathered[gathered].token == sequence.token_begin;
    for (int head = 0; head < what.shape.list_heads && !sequence.dense; ++head) {
      const GatheredList* list = has_columns ? &work.gathered[gathered++] : nullptr;
      for (int tile = what.first_query / what.shape.query_block; tile < sequence.query_blocks; ++tile) {
        const int own = (tile * what.shape.query_block - what.first_query) / plan.query_block;
        const int64_t row = int64_t{head} * plan.rows + row_base + own;
        std::vector<IndexEntry> entries;
        for (int32_t i = plan.row_offsets[row]; i < plan.row_offsets[row + 1]; ++i) {
          const uint32_t entry = lists.row_entries[i];
          if (entry == kNoEntry || entry_id(entry) % expand != 0) continue;
          entries.push_back(
              {static_cast<uint16_t>(entry_id(entry) / expand), static_cast<uint8_t>(entry_first(entry))});
        }
        std::vector<int32_t> columns;
        for (int i = 0; list != nullptr && i < list->pieces * kGatheredPiece; ++i)
          if (lists.gathered_bits[list->bits + int64_t{own} * list->pieces + i / kGatheredPiece] >>
                  (i % kGatheredPiece) &
              1)
            columns.push_back(lists.gathered_columns[list->columns + i]);
        builder.set_row(0, BlockIndex::row_id(sequence, head, tile), entries, columns);
      }
    }
    row_base += rows;
  }
  builder.finish(pool);
  return index;
}

}  // namespace sb::gpu
