#include <algorithm>
#include <cmath>

#include "attention/select/selector.h"
#include "attention/select/vertical_slash.h"
#include "device/blas.h"

namespace sb {
namespace {

// Attention of the last `rows` queries of one head over the whole sequence, [rows, tokens].
std::vector<float> last_queries(const SelectionRequest& request, int rows, int head) {
  const AttentionShape& shape = request.shape;
  const int64_t tokens = request.tiles.tokens;
  std::vector<float> map(rows * tokens);
  sgemm({.transpose_b = true,
         .m = rows,
         .n = tokens,
         .k = shape.head_dim,
         .a = request.q + ((tokens - rows) * shape.heads + head) * shape.head_dim,
         .lda = int64_t{shape.heads} * shape.head_dim,
         .b = request.k + int64_t{head / shape.group()} * shape.head_dim,
         .ldb = int64_t{shape.kv_heads} * shape.head_dim,
         .c = map.data(),
         .ldc = tokens});
  for (int r = 0; r < rows; ++r) {
    float* row = map.data() + r * tokens;
    const int64_t keys = tokens - rows + r + 1;
    const float top = *std::max_element(row, row + keys);
    double sum = 0;
    for (int64_t m = 0; m < keys; ++m) {
      row[m] = std::exp(shape.scale * (row[m] - top));
      sum += row[m];
    }
    for (int64_t m = 0; m < keys; ++m) row[m] = static_cast<float>(row[m] / sum);
    std::fill(row + keys, row + tokens, 0.0f);
  }
  return map;
}

}  // namespace

void Selector::select_vertical_slash(const Exec& exec, const SelectionRequest& request,
                                     BlockIndexBuilder& builder) const {
  const SequenceTiles& tiles = request.tiles;
  const VerticalSlashLimits limits = vertical_slash_limits(config_, tiles.budget);
  exec.pool->parallel_for(request.shape.heads, 1, [&](int64_t head, int64_t, int thread) {
    const int estimation_rows = static_cast<int>(std::min<int64_t>(kEstimationQueries, tiles.tokens));
    const std::vector<float> map = last_queries(request, estimation_rows, static_cast<int>(head));
    const VerticalSlash found = find_vertical_slash(map.data(), estimation_rows, tiles.tokens, tiles.block, limits);

    std::vector<uint8_t> listed;
    std::vector<IndexEntry> row;
    std::vector<int32_t> columns;
    for (int64_t tile = 0; tile < tiles.tiles(); ++tile) {
      vertical_slash_row(tiles, found, tile, listed, row, columns);
      builder.set_row(thread, BlockIndex::row_id(request.place, static_cast<int>(head), static_cast<int>(tile)), row,
                      columns);
    }
  });
}

}  // namespace sb
