#include <cmath>
#include <limits>

#include "attention/cpu/walk_plan.h"

namespace sb {
namespace {

// Buffers of one thread.
struct ForwardBuffers {
  float *q, *out, *maximum, *sum, *scores;
  int32_t* visible;
  // Gathered columns, or a tile of several pages: K and V rows of up to kKeyTile tokens, K once more in panels.
  float *gathered_k, *gathered_v, *gathered_panels;

  static int rows(const AttentionShape& shape) { return std::max(kTileRows, shape.heads); }

  static ForwardBuffers allocate(Arena& arena, const AttentionShape& shape) {
    const int64_t rows = ForwardBuffers::rows(shape), padded = padded_depth(shape.head_dim);
    ForwardBuffers b;
    b.q = arena.allocate_array<float>(slab_floats(rows, static_cast<int>(padded)));
    b.out = arena.allocate_array<float>(rows * padded);
    b.maximum = arena.allocate_array<float>(rows);
    b.sum = arena.allocate_array<float>(rows);
    b.scores = arena.allocate_array<float>(kScoreFloats);
    b.visible = arena.allocate_array<int32_t>(rows);
    b.gathered_k = arena.allocate_array<float>(kKeyTile * padded);
    b.gathered_v = arena.allocate_array<float>(kKeyTile * padded);
    b.gathered_panels = arena.allocate_array<float>(kKeyTile * padded + kPanelSlack);
    return b;
  }
  static int64_t bytes(const AttentionShape& shape) {
    const int64_t rows = ForwardBuffers::rows(shape), padded = padded_depth(shape.head_dim);
    int64_t bytes = 0;
    for (const int64_t count :
         {slab_floats(rows, static_cast<int>(padded)), rows * padded, rows, rows, int64_t{kScoreFloats}, rows,
          kKeyTile * padded, kKeyTile * padded, kKeyTile * padded + kPanelSlack}) {
      bytes += Arena::rounded(count * static_cast<int64_t>(sizeof(float)));
    }
    return bytes;
  }
};

class ForwardWalk {
 public:
  ForwardWalk(const AttentionShape& shape, const AttentionOperands& operands, const BlockIndex* index,
              const TileKernels& kernels, const PackedKeys& packed, bool merge)
      : shape_(shape),
        index_(index),
        kernels_(kernels),
        packed_(packed),
        q_(operands.q.f32()),
        k_(operands.k.f32()),
        v_(operands.v.f32()),
        out_(operands.out.f32()),
        lse_(operands.lse.f32()),
        tokens_(operands.q.dim(0)),
        merge_(merge),
        padded_(padded_depth(shape.head_dim)) {}

  void run(const SequenceWalk& walk, int list_head, int64_t tile_number, const ForwardBuffers& b) const {
    const QueryTile tile = query_tile(walk, tile_number);
    if (tile.begin >= tile.end) return;
    const int kv_head = list_head / (walk.list_heads / shape_.kv_heads);
    const BlockIndex::Row row =
        walk.listed ? index_->row(BlockIndex::row_id(*walk.listed, list_head, tile.block)) : BlockIndex::Row{};
    if (merge_ && row.blocks.empty() && row.columns.empty()) return;
    ForwardTile t = begin_tile(walk, list_head, tile, b);
    if (walk.listed == nullptr) {
      for (int64_t key = 0; key < tile.end; key += walk.key_tile) visit_keys(walk, tile, kv_head, 0, key, b, t);
    } else {
      for (size_t i = 0; i < row.blocks.size(); ++i) {
        for (int part = 0; part < walk.tiles_a_key_block; ++part) {
          const int64_t key = (int64_t{row.blocks[i]} * walk.tiles_a_key_block + part) * walk.key_tile;
          if (key < tile.end) visit_keys(walk, tile, kv_head, row.first[i], key, b, t);
        }
      }
      visit_gathered(walk, tile, kv_head, row.columns, b, t);
    }
    end_tile(walk, list_head, tile, b);
  }

 private:
  int64_t row_offset(const SequenceWalk& walk, int list_head, int64_t token) const {
    return (walk.query_row(token) * shape_.heads + int64_t{list_head} * walk.row_heads) * shape_.head_dim;
  }

  ForwardTile begin_tile(const SequenceWalk& walk, int list_head, const QueryTile& tile,
                         const ForwardBuffers& b) const {
    ForwardTile t{};
    t.pair.padded = padded_;
    t.pair.rows = static_cast<int>(tile.end - tile.begin) * walk.row_heads;
    t.pair.q = b.q;
    t.pair.q_slab_stride = int64_t{ForwardBuffers::rows(shape_)} * row_stride(padded_);
    t.maximum = b.maximum;
    t.sum = b.sum;
    t.out = b.out;
    t.scores = b.scores;
    for (int row = 0; row < t.pair.rows; ++row) {
      const float* q = q_ + row_offset(walk, list_head, tile.begin + row / walk.row_heads) +
                       int64_t{row % walk.row_heads} * shape_.head_dim;
      kernels_.pack_slab_row(q, shape_.head_dim, padded_, shape_.scale, b.q + int64_t{row} * row_stride(padded_),
                             t.pair.q_slab_stride);
    }
    std::fill_n(b.maximum, t.pair.rows, -std::numeric_limits<float>::infinity());
    std::fill_n(b.sum, t.pair.rows, 0.0f);
    std::fill_n(b.out, int64_t{t.pair.rows} * padded_, 0.0f);
    return t;
  }

  void visit_keys(const SequenceWalk& walk, const QueryTile& tile, int kv_head, int first, int64_t key,
                  const ForwardBuffers& b, ForwardTile& t) const {
    t.pair.keys = static_cast<int>(std::min<int64_t>(walk.key_tile, walk.rows.keys - key));
    const Visibility seen = visibility(walk, tile, first, key, t.pair.keys, b.visible);
    if (seen.row_begin >= t.pair.rows) return;
    t.pair.row_begin = seen.row_begin;
    t.pair.visible = seen.visible;
    t.pair.k_panels = packed_.tile(PackedForm::k_panels, walk, kv_head, key, t.pair.keys, b.gathered_panels);
    t.v = packed_.tile(PackedForm::v_rows, walk, kv_head, key, t.pair.keys, b.gathered_v);
    kernels_.forward(t);
  }

  void visit_gathered(const SequenceWalk& walk, const QueryTile& tile, int kv_head, std::span<const int32_t> columns,
                      const ForwardBuffers& b, ForwardTile& t) const {
    for (size_t begin = 0; begin < columns.size(); begin += kKeyTile) {
      const auto part = columns.subspan(begin, std::min<size_t>(kKeyTile, columns.size() - begin));
      t.pair.keys = static_cast<int>(part.size());
      for (size_t i = 0; i < part.size(); ++i) {
        const int64_t source = (walk.key_row(part[i]) * shape_.kv_heads + kv_head) * int64_t{shape_.head_dim};
        kernels_.pack_rows(k_ + source, 0, 1, shape_.head_dim, padded_, b.gathered_k + i * padded_);
        kernels_.pack_rows(v_ + source, 0, 1, shape_.head_dim, padded_, b.gathered_v + i * padded_);
      }
      kernels_.pack_panels(b.gathered_k, padded_, t.pair.keys, padded_, padded_, b.gathered_panels);
      size_t seen = 0;
      for (int row = 0; row < t.pair.rows; ++row) {
        while (seen < part.size() && part[seen] <= tile.begin + row / walk.row_heads) ++seen;
        b.visible[row] = static_cast<int32_t>(seen);
      }
      t.pair.row_begin = 0;
      t.pair.visible = b.visible;
      t.pair.k_panels = b.gathered_panels;
      t.v = b.gathered_v;
      kernels_.forward(t);
    }
  }

  void end_tile(const SequenceWalk& walk, int list_head, const QueryTile& tile, const ForwardBuffers& b) const {
    const int rows = static_cast<int>(tile.end - tile.begin) * walk.row_heads;
    for (int row = 0; row < rows; ++row) {
      const int64_t token = tile.begin + row / walk.row_heads;
      const int head = row % walk.row_heads;
      const bool empty = b.sum[row] == 0.0f;  // nothing seen
      float* sums = b.out + int64_t{row} * padded_;
      float* out = out_ + row_offset(walk, list_head, token) + int64_t{head} * shape_.head_dim;
      float& lse = lse_[(int64_t{list_head} * walk.row_heads + head) * tokens_ + walk.query_row(token)];
      if (merge_) {
        if (!empty) merge_row(sums, b.maximum[row], b.sum[row], out, lse);
        continue;
      }
      kernels_.scale_row(sums, shape_.head_dim, empty ? 0.0f : 1.0f / b.sum[row], out);
      lse = empty ? -std::numeric_limits<float>::infinity() : b.maximum[row] + std::log(b.sum[row]);
    }
  }

  // Both are means under the softmax of their own keys.
  void merge_row(const float* sums, float maximum, float sum, float* out, float& lse) const {
    const float more = maximum + std::log(sum), top = std::max(lse, more);
    const float have = std::exp(lse - top), add = std::exp(more - top), all = have + add;
    const float keep = have / all, take = add / all / sum;
    for (int c = 0; c < shape_.head_dim; ++c) out[c] = keep * out[c] + take * sums[c];
    lse = top + std::log(all);
  }

  const AttentionShape& shape_;
  const BlockIndex* index_;
  const TileKernels& kernels_;
  const PackedKeys& packed_;
  const float *q_, *k_, *v_;
  float *out_, *lse_;
  int64_t tokens_;  // rows of lse
  bool merge_;
  int padded_;
};

}  // namespace

int64_t cpu_forward_scratch_bytes(const AttentionShape& shape, int64_t keys, int threads) {
  return Arena::rounded(PackedKeys::floats(shape, kForwardForms, keys) * static_cast<int64_t>(sizeof(float))) +
         threads * ForwardBuffers::bytes(shape);
}

void cpu_attention_forward(const Exec& exec, const AttentionShape& shape, const PackedSequences& sequences,
                           const AttentionOperands& operands, const BlockIndex* index,
                           std::span<const SequenceRows> rows) {
  check_operands(exec, shape, sequences, operands, index, rows);
  const std::vector<SequenceWalk> walks = plan_walks(shape, sequences, index, rows);
  const TileKernels& kernels = tile_kernels(cpu_isa());
  const ArenaScope scope(*exec.scratch);
  const PackedKeys packed = packed_keys(exec, shape, sequences, operands, kForwardForms);
  pack_keys(*exec.pool, kernels, shape, walks, operands, packed);
  std::vector<ForwardBuffers> buffers;
  for (int i = 0; i < exec.pool->threads(); ++i) buffers.push_back(ForwardBuffers::allocate(*exec.scratch, shape));

  FlatTasks tasks;
  for (const SequenceWalk& walk : walks) tasks.add(walk.list_heads * walk.query_tiles());
  const ForwardWalk forward(shape, operands, index, kernels, packed, !rows.empty());
  exec.pool->parallel_for(tasks.size(), 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t flat = begin; flat < end; ++flat) {
      const auto [part, number] = tasks.at(flat);
      const int64_t tiles = walks[part].query_tiles();
      // Last tiles first: they are the longest.
      forward.run(walks[part], static_cast<int>(number / tiles), walks[part].first_tile() + tiles - 1 - number % tiles,
                  buffers[thread]);
    }
  });
}

}  // namespace sb
