#pragma once

// A block index from the host as the lists of the kernels, and back.

#include <cstdint>
#include <vector>

#include "attention/gpu/plan/work.h"
#include "attention/gpu/select/select.h"
#include "attention/index/block_index.h"

namespace sb::gpu {

// Blocks of 256 are listed as two of 128. `first_query`: of a piece, which is the index's only sequence from there on;
// rows before it count for nothing.
SelectPlan plan_of(const BlockIndex& index, int32_t first_query = 0);
// Gathered columns of any list of every sequence, at most.
std::vector<int32_t> gathered_capacities(const BlockIndex& index);

struct HostLists {
  std::vector<uint32_t> row_entries, column_entries;
  std::vector<int32_t> column_offsets;
  std::vector<int32_t> gathered_columns;
  std::vector<uint64_t> gathered_bits;
};
HostLists lists_of(const BlockIndex& index, const SelectPlan& plan, const Work& work, int32_t first_query = 0);

// The way back. `query_block` and `block` are those of the index; lists may be of longer query blocks and of shorter
// key blocks.
struct IndexOf {
  BlockIndexShape shape;
  std::vector<int32_t> cu_seqlens;  // of a piece: its end
  std::vector<bool> dense;
  int32_t first_query = 0;  // of a piece: the rows before it are empty
};
BlockIndex index_of(const IndexOf& what, const SelectPlan& plan, const Work& work, const HostLists& lists,
                    ThreadPool& pool);

}  // namespace sb::gpu
