#include <algorithm>

#include "attention/gpu/select/vertical_slash.h"
#include "attention/select/vertical_slash.h"

namespace sb::gpu {

static_assert(kSlashChunk == kEstimationQueries);

int slash_query_block(const SelectionConfig& config) {
  return std::max(config.query_block, std::min(config.block, kBlock));
}

SlashPlan make_slash_plan(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
                          const std::vector<SequenceTiles>& tiles, const SelectionConfig& config) {
  SlashPlan plan;
  plan.gathered.assign(tiles.size(), 0);
  for (size_t s = 0; s < tiles.size(); ++s) {
    if (dense[s]) continue;
    const VerticalSlashLimits limits = vertical_slash_limits(config, tiles[s].budget);
    SlashSequence one;
    one.first_chunk = plan.chunks;
    one.first_block = plan.blocks;
    one.token = cu_seqlens[s];
    one.tokens = static_cast<int32_t>(tiles[s].tokens);
    one.chunks = (one.tokens + kSlashChunk - 1) / kSlashChunk;
    one.blocks = static_cast<int32_t>(tiles[s].blocks());
    one.chunk_begin = plan.head_chunks;
    one.list = plan.lists;
    one.vertical_cap = static_cast<int32_t>(std::min<int64_t>(limits.vertical_cap, one.tokens));
    one.slash_cap = static_cast<int32_t>(std::min<int64_t>(limits.slash_cap, one.blocks));
    plan.gathered[s] = std::max(1, one.vertical_cap);
    plan.head_chunks += one.chunks;
    plan.chunks += int64_t{shape.query_heads} * one.chunks;
    plan.blocks += int64_t{shape.query_heads} * one.blocks;
    plan.lists += shape.query_heads;
    plan.sequences.push_back(one);
  }
  return plan;
}

}  // namespace sb::gpu
