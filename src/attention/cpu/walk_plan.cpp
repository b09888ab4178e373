#include "attention/cpu/walk_plan.h"

#include "core/errors.h"

namespace sb {
namespace {

constexpr int64_t kPackKeys = 512;  // keys that one packing task takes: a multiple of every panel

}  // namespace

SequenceWalk::KeyRun SequenceWalk::key_run(int64_t key) const {
  if (pages.empty()) return {key_row(key), rows.keys - key};
  const auto next = std::upper_bound(pages.begin(), pages.end(), key,
                                     [](int64_t value, const KeyPage& page) { return value < page.begin; });
  const KeyPage& page = *(next - 1);
  return {page.row + key - page.begin, (next == pages.end() ? rows.keys : next->begin) - key};
}

QueryTile query_tile(const SequenceWalk& walk, int64_t tile) {
  const int64_t block = tile / walk.tiles_a_block;
  const int64_t first = block * walk.query_block, unclipped = first + tile % walk.tiles_a_block * walk.tile_tokens;
  const int64_t begin = std::max(unclipped, walk.rows.first_query);
  const int64_t end = std::min({unclipped + walk.tile_tokens, (block + 1) * walk.query_block, walk.length});
  return {begin, end, static_cast<int>(block), static_cast<int>(begin - first)};
}

std::vector<SequenceWalk> plan_walks(const AttentionShape& shape, const PackedSequences& sequences,
                                     const BlockIndex* index, std::span<const SequenceRows> rows) {
  std::vector<SequenceWalk> walks;
  for (int i = 0; i < sequences.sequences(); ++i) {
    SequenceWalk walk;
    walk.length = sequences.cu_seqlens[i + 1] - sequences.cu_seqlens[i];
    if (walk.length == 0) continue;
    if (sequences.is_piece()) {
      walk.length = sequences.piece_end();
      walk.rows = {walk.length, sequences.piece.begin, 0, 0};
      walk.pages = sequences.piece.pages;
    } else {
      walk.rows =
          rows.empty() ? SequenceRows{walk.length, 0, sequences.cu_seqlens[i], sequences.cu_seqlens[i]} : rows[i];
    }
    if (index != nullptr && !index->sequences()[i].dense) walk.listed = &index->sequences()[i];
    walk.list_heads = walk.listed ? index->shape().list_heads : shape.kv_heads;
    walk.row_heads = shape.heads / walk.list_heads;
    const int rows_wanted = walk.listed ? kTileRows : kDenseTileRows;
    walk.tile_tokens = std::max(1, rows_wanted / walk.row_heads);
    walk.query_block = walk.tile_tokens;
    int key_block = kKeyTile;
    if (walk.listed) {
      walk.query_block = index->shape().query_block;
      walk.tile_tokens = std::min(walk.tile_tokens, walk.query_block);
      key_block = index->shape().block;
    }
    walk.tiles_a_block = (walk.query_block + walk.tile_tokens - 1) / walk.tile_tokens;
    walk.key_tile = std::min(key_block, kKeyTile);
    walk.tiles_a_key_block = key_block / walk.key_tile;
    walks.push_back(walk);
  }
  std::stable_sort(walks.begin(), walks.end(),
                   [](const SequenceWalk& a, const SequenceWalk& b) { return a.length > b.length; });
  return walks;
}

Visibility visibility(const SequenceWalk& walk, const QueryTile& tile, int first, int64_t key, int keys,
                      int32_t* buffer) {
  const int heads = walk.row_heads, tokens = static_cast<int>(tile.end - tile.begin);
  const int64_t skipped = std::max<int64_t>({0, first - tile.offset, key - tile.begin});
  const int row_begin = static_cast<int>(std::min<int64_t>(skipped, tokens)) * heads;
  if (tile.begin + row_begin / heads >= key + keys - 1) return {row_begin, nullptr};
  for (int row = row_begin; row < tokens * heads; ++row) {
    buffer[row] = static_cast<int32_t>(std::min<int64_t>(keys, tile.begin + row / heads - key + 1));
  }
  return {row_begin, buffer};
}

void pack_keys(ThreadPool& pool, const TileKernels& kernels, const AttentionShape& shape,
               const std::vector<SequenceWalk>& walks, const PackedKeys& packed,
               std::span<const PackRequest> requests) {
  FlatTasks tasks;
  for (const SequenceWalk& walk : walks) {
    tasks.add(static_cast<int64_t>(requests.size()) * shape.kv_heads * ((walk.rows.keys + kPackKeys - 1) / kPackKeys));
  }
  const int padded = padded_depth(shape.head_dim);
  const int64_t stride = int64_t{shape.kv_heads} * shape.head_dim;
  pool.parallel_for(tasks.size(), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t flat = begin; flat < end; ++flat) {
      const auto [part, number] = tasks.at(flat);
      const SequenceWalk& walk = walks[part];
      const int64_t pieces = (walk.rows.keys + kPackKeys - 1) / kPackKeys;
      const PackRequest& request = requests[number / (pieces * shape.kv_heads)];
      const int head = static_cast<int>(number / pieces % shape.kv_heads);
      const int64_t key = number % pieces * kPackKeys, count = std::min(kPackKeys, walk.rows.keys - key);
      const auto pack = request.form == PackedForm::panels ? kernels.pack_panels : kernels.pack_rows;
      // Pages begin at multiples of every panel.
      for (int64_t at = key; at < key + count;) {
        const auto [row, run] = walk.key_run(at);
        const int64_t taken = std::min(run, key + count - at);
        const float* source = request.source + row * stride + int64_t{head} * shape.head_dim;
        pack(source, stride, taken, shape.head_dim, padded, request.target + packed.offset(walk, head, at));
        at += taken;
      }
    }
  });
}

namespace {

void check_piece(const PackedSequences& sequences, const AttentionOperands& operands, const BlockIndex* index,
                 std::span<const SequenceRows> rows) {
  const SequencePiece& piece = sequences.piece;
  const int64_t end = sequences.piece_end();
  SB_CHECK(rows.empty() && sequences.sequences() == 1 && 0 <= piece.begin && end <= piece.length,
           "tokens {} to {} of a sequence of {}", piece.begin, end, piece.length);
  SB_CHECK(!piece.pages.empty() && piece.pages.front().begin == 0 && piece.pages.back().begin == piece.begin,
           "the pages of keys do not go from 0 to {}", piece.begin);
  for (size_t i = 0; i < piece.pages.size(); ++i) {
    const auto [begin, row] = piece.pages[i];
    const int64_t keys = (i + 1 < piece.pages.size() ? piece.pages[i + 1].begin : end) - begin;
    SB_CHECK(begin % 64 == 0 && keys > 0 && 0 <= row && row + keys <= operands.k.dim(0),
             "keys {} to {} in row {} of {}", begin, begin + keys, row, operands.k.dim(0));
  }
  if (index == nullptr) return;
  const BlockIndex::Sequence& listed = index->sequences().front();
  SB_CHECK(index->sequences().size() == 1 && listed.length == end &&
               (listed.dense || piece.begin % index->shape().query_block == 0) && !index->has_gathered_columns(),
           "lists of {} tokens for a piece from {} to {}", listed.length, piece.begin, end);
}

}  // namespace

void check_operands(const Exec& exec, const AttentionShape& shape, const PackedSequences& sequences,
                    const AttentionOperands& operands, const BlockIndex* index, std::span<const SequenceRows> rows) {
  SB_CHECK(exec.device == DeviceKind::cpu && exec.pool != nullptr && exec.scratch != nullptr,
           "attention on the CPU needs a pool and scratch memory");
  SB_CHECK(shape.heads > 0 && shape.kv_heads > 0 && shape.heads % shape.kv_heads == 0, "{} heads on {} kv heads",
           shape.heads, shape.kv_heads);
  SB_CHECK(shape.head_dim >= 1 && shape.head_dim <= kMaxHeadDim, "head_dim {}: 1 … {}", shape.head_dim, kMaxHeadDim);
  SB_CHECK(!sequences.cu_seqlens.empty() && sequences.cu_seqlens[0] == 0, "cu_seqlens must begin with 0");
  int64_t query_rows = sequences.tokens(), key_rows = query_rows;
  if (sequences.is_piece()) {
    check_piece(sequences, operands, index, rows);
    key_rows = operands.k.dim(0);
  }
  if (!rows.empty()) {
    SB_CHECK(index != nullptr && std::ssize(rows) == sequences.sequences(), "{} places of sequences for {}",
             rows.size(), sequences.sequences());
    query_rows = operands.q.dim(0);
    key_rows = operands.k.dim(0);
    for (int i = 0; i < sequences.sequences(); ++i) {
      const SequenceRows& r = rows[i];
      const int64_t length = index->sequences()[i].length;
      SB_CHECK(!index->sequences()[i].dense && 0 <= r.first_query && r.first_query <= length &&
                   r.first_query % index->shape().query_block == 0 && 0 <= r.keys && r.keys <= length,
               "sequence {} of {} tokens with {} keys and queries from {} on", i, length, r.keys, r.first_query);
      SB_CHECK(0 <= r.key_row && r.key_row + r.keys <= key_rows && 0 <= r.query_row &&
                   r.query_row + length - r.first_query <= query_rows,
               "sequence {} lies outside of {} queries and {} keys", i, query_rows, key_rows);
    }
  }
  const Shape queries = {query_rows, shape.heads, shape.head_dim}, keys = {key_rows, shape.kv_heads, shape.head_dim};
  SB_CHECK(operands.q.shape() == queries && operands.out.shape() == queries, "q {}, out {}",
           operands.q.shape().to_string(), operands.out.shape().to_string());
  SB_CHECK(operands.k.shape() == keys && operands.v.shape() == keys, "k {}, v {}", operands.k.shape().to_string(),
           operands.v.shape().to_string());
  SB_CHECK(operands.lse.shape() == Shape({shape.heads, query_rows}), "lse {}", operands.lse.shape().to_string());
  if (index == nullptr) return;
  SB_CHECK(index->shape().list_heads == shape.kv_heads || index->shape().list_heads == shape.heads,
           "an index of {} list heads for {}:{} heads", index->shape().list_heads, shape.heads, shape.kv_heads);
}

int64_t cpu_attention_scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) {
  return cpu_piece_scratch_bytes(shape, max_tokens, max_tokens, threads);
}

int64_t cpu_piece_scratch_bytes(const AttentionShape& shape, int64_t queries, int64_t keys, int threads) {
  return std::max(cpu_forward_scratch_bytes(shape, keys, threads),
                  cpu_backward_scratch_bytes(shape, queries, keys, threads));
}

}  // namespace sb
