#pragma once

// Row lists and their transpose on the host, made the obvious way.

#include <cstdint>
#include <span>
#include <vector>

#include "attention/gpu/plan/work.h"

namespace sb::gpu {

// The selected key blocks of every (list head, query block), laid out as RowLayout says. Entries ascend by key block.
struct RowLists {
  int32_t heads = 0;
  int32_t query_block = 0;
  int32_t rows = 0;
  std::vector<int32_t> offsets;
  std::vector<uint32_t> entries;
  int32_t block = kBlock;
  RowLayout layout() const { return {heads, query_block, block, block, rows, offsets}; }
};

// offsets[head * columns + column], entries (query block, first token) ascending.
struct ColumnLists {
  int32_t columns = 0;
  std::vector<int32_t> offsets;
  std::vector<uint32_t> entries;
};

inline ColumnLists transpose(const RowLists& lists, std::span<const int32_t> cu_seqlens) {
  ColumnLists out;
  for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s)
    out.columns += (cu_seqlens[s + 1] - cu_seqlens[s] + lists.block - 1) / lists.block;
  std::vector<std::vector<uint32_t>> columns(static_cast<size_t>(lists.heads) * out.columns);
  for (int32_t head = 0; head < lists.heads; ++head) {
    int32_t row = 0, column = 0;
    for (size_t s = 0; s + 1 < cu_seqlens.size(); ++s) {
      const int32_t length = cu_seqlens[s + 1] - cu_seqlens[s];
      for (int32_t b = 0; b * lists.query_block < length; ++b, ++row) {
        const size_t at = static_cast<size_t>(head) * lists.rows + row;
        for (int32_t i = lists.offsets[at]; i < lists.offsets[at + 1]; ++i)
          columns[static_cast<size_t>(head) * out.columns + column + entry_id(lists.entries[i])].push_back(
              list_entry(b, entry_first(lists.entries[i])));
      }
      column += (length + lists.block - 1) / lists.block;
    }
  }
  out.offsets.push_back(0);
  for (const auto& column : columns) {
    out.entries.insert(out.entries.end(), column.begin(), column.end());
    out.offsets.push_back(static_cast<int32_t>(out.entries.size()));
  }
  return out;
}

}  // namespace sb::gpu
