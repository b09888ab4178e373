#include <algorithm>

#include "attention/gpu/coverage/coverage.h"
#include "attention/select/coverage.h"

namespace sb::gpu {

int64_t most_piece_coverage_floats(int64_t rows, int64_t tokens, int64_t longest, int block, int64_t query_heads,
                                   int64_t kv_heads) {
  const int64_t seen = (rows * tokens + longest) / block + rows + 2;  // the product of both, and what rounding adds
  return 3 * seen * (query_heads + kv_heads) + rows * kv_heads * (1 + std::ssize(coverage_grid(longest, block)));
}

CoveragePlan make_coverage_plan(const Shape& shape, std::span<const int32_t> cu_seqlens, const std::vector<bool>& dense,
                                const std::vector<SequenceTiles>& tiles, int rows, const SelectPlan* select,
                                std::span<const int32_t> gathered) {
  CoveragePlan plan;
  int32_t lists = 0;
  int32_t row_base = 0;
  for (size_t s = 0; s < tiles.size(); ++s) {
    const SequenceTiles& t = tiles[s];
    CoverageSequence one;
    one.scores = plan.scores;
    one.ranks = plan.ranks;
    one.token = cu_seqlens[s];
    one.tokens = shape.first_query + cu_seqlens[s + 1] - cu_seqlens[s];
    one.whole_tokens = static_cast<int32_t>(t.tokens);
    one.whole_sampled = static_cast<int32_t>(std::min<int64_t>(rows, t.tokens));
    one.goes_on = one.tokens < one.whole_tokens;
    one.dense = dense[s];
    if (!gathered.empty() && gathered[s] > 0) {
      one.gathered = lists;
      lists += select->list_heads;
    }
    one.first_block = plan.blocks;
    one.blocks = (one.tokens + t.block - 1) / t.block;
    one.first_token = static_cast<int32_t>(plan.tokens.size());
    one.grid = static_cast<int32_t>(plan.grid.size());
    one.results = plan.results;
    if (t.tokens > 0)
      for (const int64_t budget : coverage_grid(t.tokens, t.block))
        plan.grid.push_back(static_cast<int32_t>(budget / t.block));
    one.points = static_cast<int32_t>(plan.grid.size()) - one.grid;
    for (int i = 0; i < one.whole_sampled; ++i) {
      const auto position = static_cast<int32_t>(sampled_token(i, one.whole_sampled, t.tokens));
      if (position < shape.first_query || position >= one.tokens) continue;
      ++one.sampled;
      plan.tokens.push_back({static_cast<int32_t>(s), position});
      if (select == nullptr) continue;
      for (int head = 0; head < select->list_heads; ++head) {
        const size_t row =
            static_cast<size_t>(head) * select->rows + row_base + (position - shape.first_query) / select->query_block;
        plan.lists.push_back({select->row_offsets[row], select->row_offsets[row + 1] - select->row_offsets[row]});
      }
    }
    plan.blocks += one.blocks;
    plan.scores += int64_t{one.sampled} * shape.query_heads * one.blocks;
    plan.ranks += int64_t{one.sampled} * shape.kv_heads * one.blocks;
    plan.results += int64_t{one.sampled} * shape.kv_heads * (1 + one.points);
    if (select != nullptr) row_base += static_cast<int32_t>((t.tokens + select->query_block - 1) / select->query_block);
    plan.sequences.push_back(one);
  }
  return plan;
}

}  // namespace sb::gpu
