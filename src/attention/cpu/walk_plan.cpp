#include "attention/cpu/walk_plan.h"

#include "core/errors.h"

namespace sb {
namespace {

constexpr int64_t kPackKeys = 512;  // keys that one packing task takes: a multiple of every panel

}  // namespace

SequenceWalk::Page SequenceWalk::page_of(int64_t key) const {
  if (pages.empty()) return {0, rows.key_row, rows.keys};
  const auto next = std::upper_bound(pages.begin(), pages.end(), key,
                                     [](int64_t value, const KeyPage& page) { return value < page.begin; });
  const KeyPage& page = *(next - 1);
  return {page.begin, page.row, (next == pages.end() ? rows.keys : next->begin) - page.begin};
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
    walk.whole = sequences.is_piece() ? sequences.piece.length : walk.queries();
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

// Pages begin at multiples of every panel.
const float* PackedKeys::tile(PackedForm form, const SequenceWalk& walk, int kv_head, int64_t key, int keys,
                              float* buffer) const {
  const SequenceWalk::Page first = walk.page_of(key);
  if (key + keys <= first.begin + first.keys) return at(form, first, kv_head, key - first.begin);
  for (int64_t next = key; next < key + keys;) {
    const SequenceWalk::Page page = walk.page_of(next);
    const int64_t end = std::min(key + keys, page.begin + page.keys);
    std::copy_n(at(form, page, kv_head, next - page.begin), (end - next) * head_floats_,
                buffer + (next - key) * head_floats_);
    next = end;
  }
  return buffer;
}

PackedKeys packed_keys(const Exec& exec, const AttentionShape& shape, const PackedSequences& sequences,
                       const AttentionOperands& operands, std::span<const PackedForm> forms) {
  if (sequences.is_piece()) return {shape, kPageForms, operands.packed.f32()};
  const int64_t floats = PackedKeys::floats(shape, forms, operands.k.dim(0));
  return {shape, forms, exec.scratch->allocate_array<float>(floats)};
}

void pack_keys(ThreadPool& pool, const TileKernels& kernels, const AttentionShape& shape,
               const std::vector<SequenceWalk>& walks, const AttentionOperands& operands, const PackedKeys& packed) {
  const auto parts = [](const SequenceWalk& walk) { return (walk.last_page().keys + kPackKeys - 1) / kPackKeys; };
  FlatTasks tasks;
  for (const SequenceWalk& walk : walks) tasks.add(std::ssize(packed.forms()) * shape.kv_heads * parts(walk));
  const int padded = padded_depth(shape.head_dim);
  const int64_t stride = int64_t{shape.kv_heads} * shape.head_dim;
  pool.parallel_for(tasks.size(), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t flat = begin; flat < end; ++flat) {
      const auto [walk, number] = tasks.at(flat);
      const SequenceWalk::Page page = walks[walk].last_page();
      const int64_t count = parts(walks[walk]);
      const PackedForm form = packed.forms()[number / (count * shape.kv_heads)];
      const int head = static_cast<int>(number / count % shape.kv_heads);
      const int64_t key = number % count * kPackKeys;
      const bool of_keys = form == PackedForm::k_panels || form == PackedForm::k_rows;
      const bool in_panels = form == PackedForm::k_panels || form == PackedForm::v_panels;
      const float* rows = (of_keys ? operands.k : operands.v).f32() + (page.row + key) * stride;
      const auto pack = in_panels ? kernels.pack_panels : kernels.pack_rows;
      pack(rows + int64_t{head} * shape.head_dim, stride, std::min(kPackKeys, page.keys - key), shape.head_dim, padded,
           packed.at(form, page, head, key));
    }
  });
}

namespace {

void check_piece(const AttentionShape& shape, const PackedSequences& sequences, const AttentionOperands& operands,
                 const BlockIndex* index, std::span<const SequenceRows> rows) {
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
  const Shape packed = {operands.k.dim(0), PackedKeys::row_floats(shape, kPageForms)};
  SB_CHECK(operands.packed.shape() == packed, "packed keys and values {}, not {}", operands.packed.shape().to_string(),
           packed.to_string());
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
    check_piece(shape, sequences, operands, index, rows);
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
  return std::max(cpu_forward_scratch_bytes(shape, max_tokens, threads),
                  cpu_backward_scratch_bytes(shape, max_tokens, max_tokens, threads));
}

int64_t cpu_page_bytes(const AttentionShape& shape) {
  return PackedKeys::row_floats(shape, kPageForms) * static_cast<int64_t>(sizeof(float));
}

}  // namespace sb
