#include <sched.h>

#include <atomic>

#include "attention/cpu/walk_plan.h"

// One task is a chunk of query tokens of one kv head: it walks the key tiles in ascending order, each against the tiles
// of the chunk that selected it. dQ of the chunk belongs to the task. dK and dV of a key tile are summed over the chunk
// in a local buffer and then added to the result, chunk after chunk from the last to the first: a task waits until the
// chunk before it has added its part. The cut into chunks depends on lengths only, so the sums have the same order for
// every number of threads. All chunks walk the keys in the same direction, hence waits are short; tasks are handed out
// in chunk order, hence whoever is waited for is running.

namespace sb {
namespace {

constexpr int kStackRows = 256;  // rows of scores kept until dK and dV take them
constexpr int64_t kChunks = 48;  // chunks of a long sequence
// At least, of a piece long enough: for two threads, as the other cores run other stages of a pipeline.
constexpr int64_t kChunksOfPiece = 2;
constexpr int64_t kMinChunk = 128, kMaxChunk = 1024;

// A piece is cut as its whole sequence is, which adds to dK and dV as seldom.
int64_t wanted_chunk(int64_t whole, int64_t queries) {
  return std::clamp(std::min((whole + kChunks - 1) / kChunks, queries / kChunksOfPiece), kMinChunk, kMaxChunk);
}

int64_t chunk_tokens(const SequenceWalk& walk) {
  return (wanted_chunk(walk.whole, walk.queries()) + walk.query_block - 1) / walk.query_block * walk.query_block;
}

// Chunks are counted from the first query block on.
int64_t chunk_base(const SequenceWalk& walk) {
  return walk.first_block() * walk.query_block;
}

int64_t chunk_count(const SequenceWalk& walk) {
  return (walk.length - chunk_base(walk) + chunk_tokens(walk) - 1) / chunk_tokens(walk);
}

struct BackwardLayout {
  int64_t chunk_rows, stack_rows, padded, slabs;
  BackwardLayout(const AttentionShape& shape, int64_t whole, int64_t queries)
      : chunk_rows((wanted_chunk(whole, queries) + kTileRows) * shape.group()),
        stack_rows(std::max<int64_t>(kStackRows, shape.heads)),
        padded(padded_depth(shape.head_dim)),
        slabs(slab_floats(chunk_rows, static_cast<int>(padded))) {}
};

// Buffers of one thread.
struct BackwardBuffers {
  float *q, *dout, *dq, *lse, *delta;  // of the chunk; list heads one after the other, then tokens, then row heads
  float *probability, *dscore;
  float *dk, *dv;  // of the key tile
  float *gathered_k, *gathered_v, *gathered_k_panels, *gathered_v_panels, *gathered_dk, *gathered_dv;
  int32_t* visible;

  static BackwardBuffers allocate(Arena& arena, const BackwardLayout& l) {
    const int64_t keys = kKeyTile * l.padded;
    const auto floats = [&](int64_t count) { return arena.allocate_array<float>(count); };
    BackwardBuffers b;
    b.q = floats(l.slabs);
    b.dout = floats(l.slabs);
    b.dq = floats(l.chunk_rows * l.padded);
    b.lse = floats(l.chunk_rows);
    b.delta = floats(l.chunk_rows);
    b.probability = floats(l.stack_rows * kScoreStride);
    b.dscore = floats(l.stack_rows * kScoreStride);
    for (float** buffer : {&b.dk, &b.dv, &b.gathered_k, &b.gathered_v, &b.gathered_k_panels, &b.gathered_v_panels,
                           &b.gathered_dk, &b.gathered_dv}) {
      *buffer = floats(keys + kPanelSlack);
    }
    b.visible = arena.allocate_array<int32_t>(l.stack_rows);
    return b;
  }
  static int64_t bytes(const BackwardLayout& l) {
    const auto floats = [](int64_t count) { return Arena::rounded(count * static_cast<int64_t>(sizeof(float))); };
    return 2 * floats(l.slabs) + floats(l.chunk_rows * l.padded) + 2 * floats(l.chunk_rows) +
           2 * floats(l.stack_rows * kScoreStride) + 8 * floats(kKeyTile * l.padded + kPanelSlack) +
           floats(l.stack_rows);
  }
};

// Whose turn it is to add to a key tile: how many chunks from the end the last one that did so was; 0: none yet.
using Turn = std::atomic<int32_t>;

void wait_for(const Turn& turn, int32_t value) {
  for (int i = 0; turn.load(std::memory_order_acquire) != value; ++i) {
    if (i < 4000) {
      __builtin_ia32_pause();
    } else {
      sched_yield();
    }
  }
}

struct BackwardOperands {
  const float *q, *k, *v, *out, *lse, *dout;
  float *dq, *dk, *dv;
  bool add;  // to dq, too
};

class BackwardTask {
 public:
  BackwardTask(const AttentionShape& shape, const BackwardOperands& operands, const BlockIndex* index,
               const TileKernels& kernels, const PackedKeys& packed, const BackwardLayout& layout, int64_t tokens,
               const SequenceWalk& walk, int kv_head, int64_t chunk, Turn* turns, const BackwardBuffers& buffers)
      : shape_(shape),
        x_(operands),
        index_(index),
        kernels_(kernels),
        packed_(packed),
        walk_(walk),
        b_(buffers),
        turns_(turns),
        tokens_(tokens),
        kv_head_(kv_head),
        lists_(walk.list_heads / shape.kv_heads),
        padded_(padded_depth(shape.head_dim)),
        slab_stride_(layout.chunk_rows * row_stride(padded_)),
        stack_rows_(static_cast<int>(layout.stack_rows)),
        chunk_(chunk),
        chunks_(chunk_count(walk)),
        begin_(std::max(walk.rows.first_query, chunk_base(walk) + chunk * chunk_tokens(walk))),
        end_(std::min(chunk_base(walk) + (chunk + 1) * chunk_tokens(walk), walk.length)) {}

  void run() {
    load_rows();
    for (int64_t key = 0; key < std::min(end_, walk_.rows.keys); key += walk_.key_tile) run_keys(key);
    store_rows();
  }

 private:
  // Row of (list, token, row head 0) in the chunk's buffers.
  int64_t chunk_row(int list, int64_t token) const {
    return ((end_ - begin_) * list + token - begin_) * walk_.row_heads;
  }
  int head_of(int list, int row_head) const { return (kv_head_ * lists_ + list) * walk_.row_heads + row_head; }

  template <typename Body>
  void for_each_row(Body&& body) {
    for (int list = 0; list < lists_; ++list) {
      for (int64_t token = begin_; token < end_; ++token) {
        for (int i = 0; i < walk_.row_heads; ++i) {
          const int head = head_of(list, i);
          body(chunk_row(list, token) + i, (walk_.query_row(token) * shape_.heads + head) * shape_.head_dim,
               head * tokens_ + walk_.query_row(token));
        }
      }
    }
  }

  void load_rows() {
    const int stride = row_stride(padded_), depth = shape_.head_dim;
    for_each_row([&](int64_t row, int64_t source, int64_t statistic) {
      kernels_.pack_slab_row(x_.q + source, depth, padded_, shape_.scale, b_.q + row * stride, slab_stride_);
      kernels_.pack_slab_row(x_.dout + source, depth, padded_, 1.0f, b_.dout + row * stride, slab_stride_);
      b_.lse[row] = x_.lse[statistic];
      b_.delta[row] = kernels_.dot(x_.dout + source, x_.out + source, depth);
    });
    std::fill_n(b_.dq, (end_ - begin_) * lists_ * walk_.row_heads * padded_, 0.0f);
  }

  void store_rows() {
    for_each_row([&](int64_t row, int64_t target, int64_t) {
      float* dq = b_.dq + row * padded_;
      kernels_.scale_row(dq, shape_.head_dim, shape_.scale, x_.add ? dq : x_.dq + target);
      if (x_.add) kernels_.add_rows(dq, padded_, 1, shape_.head_dim, x_.dq + target, 0);
    });
  }

  void run_keys(int64_t key) {
    const int keys = static_cast<int>(std::min<int64_t>(walk_.key_tile, walk_.rows.keys - key));
    used_ = false;
    key_ = key;
    keys_ = keys;
    int64_t previous = chunks_;  // the chunk that adds to these keys before this one
    for (int list = 0; list < lists_; ++list) {
      if (walk_.listed == nullptr) {
        const int64_t first_tile = std::max(begin_, key / walk_.tile_tokens * walk_.tile_tokens) / walk_.tile_tokens;
        for (int64_t tile = first_tile; tile * walk_.tile_tokens < end_; ++tile) visit(list, tile, 0, key);
        previous = std::min(previous, chunk_ + 1);
      } else {
        previous = std::min(previous, visit_column(list, key));
      }
    }
    flush();
    if (walk_.listed != nullptr && index_->has_gathered_columns()) {
      for (int list = 0; list < lists_; ++list) visit_gathered(list, key);
      previous = chunk_ + 1;  // who gathers is not known from the columns: everybody takes a turn
      begin_sums();
    }
    if (used_) add_to_result(key, static_cast<int32_t>(chunks_ - previous));
  }

  // The tiles of the chunk that selected the keys; returns the next later chunk that did, or the number of chunks.
  int64_t visit_column(int list, int64_t key) {
    const int key_block = static_cast<int>(key / (walk_.key_tile * walk_.tiles_a_key_block));
    const auto column = index_->column(BlockIndex::column_id(*walk_.listed, kv_head_ * lists_ + list, key_block));
    const uint32_t first_block = static_cast<uint32_t>(begin_ / walk_.query_block);
    const uint32_t end_block = static_cast<uint32_t>((end_ + walk_.query_block - 1) / walk_.query_block);
    auto entry = std::lower_bound(column.begin(), column.end(), first_block << 7);
    for (; entry != column.end() && BlockIndex::query_block_of(*entry) < static_cast<int>(end_block); ++entry) {
      const int64_t tile = int64_t{BlockIndex::query_block_of(*entry)} * walk_.tiles_a_block;
      for (int i = 0; i < walk_.tiles_a_block; ++i) visit(list, tile + i, BlockIndex::first_of(*entry), key);
    }
    if (entry == column.end()) return chunks_;
    return (int64_t{BlockIndex::query_block_of(*entry)} * walk_.query_block - chunk_base(walk_)) / chunk_tokens(walk_);
  }

  // The key tile takes part from here on.
  void begin_sums() {
    if (used_) return;
    const auto packed = [&](PackedForm form, float* buffer) {
      return packed_.tile(form, walk_, kv_head_, key_, keys_, buffer);
    };
    k_panels_ = packed(PackedForm::k_panels, b_.gathered_k_panels);
    v_panels_ = packed(PackedForm::v_panels, b_.gathered_v_panels);
    k_rows_ = packed(PackedForm::k_rows, b_.gathered_k);
    std::fill_n(b_.dk, int64_t{keys_} * padded_, 0.0f);
    std::fill_n(b_.dv, int64_t{keys_} * padded_, 0.0f);
    used_ = true;
  }

  void visit(int list, int64_t tile_number, int first, int64_t key) {
    const QueryTile tile = query_tile(walk_, tile_number);
    if (tile.begin >= tile.end) return;
    const Visibility seen = visibility(walk_, tile, first, key, keys_, b_.visible);
    const int rows = static_cast<int>(tile.end - tile.begin) * walk_.row_heads;
    if (seen.row_begin >= rows) return;
    const int most = seen.visible ? seen.visible[rows - 1] : keys_;
    if (segments_ == kMaxSegments || stacked_ + rows - seen.row_begin > stack_rows_ || most != stacked_keys_) flush();
    begin_sums();
    stacked_keys_ = most;
    run_tile(list, tile, seen, rows, keys_, k_panels_, v_panels_, k_rows_);
  }

  // Scores, their gradients and dQ of one tile; what dK and dV need of it is put on the stack.
  void run_tile(int list, const QueryTile& tile, const Visibility& seen, int rows, int keys, const float* k_panels,
                const float* v_panels, const float* k_rows) {
    const int64_t row = chunk_row(list, tile.begin), stride = row_stride(padded_);
    BackwardTile t{};
    t.pair = {padded_, rows, seen.row_begin, keys, seen.visible, b_.q + row * stride, slab_stride_, k_panels};
    t.dout = b_.dout + row * stride;
    t.v_panels = v_panels;
    t.k = k_rows;
    t.lse = b_.lse + row;
    t.delta = b_.delta + row;
    t.dq = b_.dq + row * padded_;
    t.probability = b_.probability + int64_t{stacked_ - seen.row_begin} * kScoreStride;
    t.dscore = b_.dscore + int64_t{stacked_ - seen.row_begin} * kScoreStride;
    kernels_.backward(t);
    const int64_t first_row = (row + seen.row_begin) * stride;
    segment_[segments_++] = {b_.probability + int64_t{stacked_} * kScoreStride,
                             b_.dscore + int64_t{stacked_} * kScoreStride, b_.dout + first_row, b_.q + first_row,
                             rows - seen.row_begin};
    stacked_ += rows - seen.row_begin;
  }

  void flush() { flush_into(b_.dk, b_.dv); }
  void flush_into(float* dk, float* dv) {
    if (segments_ > 0) {
      kernels_.key_gradients({padded_, stacked_keys_, segment_, segments_, slab_stride_, dk, dv});
    }
    segments_ = stacked_ = 0;
  }

  // The gathered columns of the chunk's rows that lie in these keys. Few of a key tile are: they are brought together,
  // row by row of the index, and their gradients spread again.
  void visit_gathered(int list, int64_t key) {
    for (int64_t tile_number = begin_ / walk_.query_block * walk_.tiles_a_block;; ++tile_number) {
      const QueryTile tile = query_tile(walk_, tile_number);
      if (tile.block * int64_t{walk_.query_block} >= end_) break;
      if (tile.begin >= tile.end) continue;
      const auto row = index_->row(BlockIndex::row_id(*walk_.listed, kv_head_ * lists_ + list, tile.block));
      const auto from = std::lower_bound(row.columns.begin(), row.columns.end(), key);
      const auto to = std::lower_bound(from, row.columns.end(), std::min(key + keys_, tile.end));
      const int count = static_cast<int>(to - from);
      if (count == 0) continue;
      gather({from, to});
      const int rows = static_cast<int>(tile.end - tile.begin) * walk_.row_heads;
      int seen = 0;
      for (int i = 0; i < rows; ++i) {
        while (seen < count && from[seen] <= tile.begin + i / walk_.row_heads) ++seen;
        b_.visible[i] = seen;
      }
      begin_sums();
      std::fill_n(b_.gathered_dk, int64_t{count} * padded_, 0.0f);
      std::fill_n(b_.gathered_dv, int64_t{count} * padded_, 0.0f);
      stacked_keys_ = count;
      run_tile(list, tile, {0, b_.visible}, rows, count, b_.gathered_k_panels, b_.gathered_v_panels, b_.gathered_k);
      flush_into(b_.gathered_dk, b_.gathered_dv);
      for (int i = 0; i < count; ++i) {
        const int64_t target = (from[i] - key) * padded_;
        kernels_.add_rows(b_.gathered_dk + int64_t{i} * padded_, padded_, 1, padded_, b_.dk + target, padded_);
        kernels_.add_rows(b_.gathered_dv + int64_t{i} * padded_, padded_, 1, padded_, b_.dv + target, padded_);
      }
    }
  }

  void gather(std::span<const int32_t> columns) {
    const int count = static_cast<int>(columns.size());
    for (int i = 0; i < count; ++i) {
      const int64_t source = (walk_.key_row(columns[i]) * shape_.kv_heads + kv_head_) * shape_.head_dim;
      kernels_.pack_rows(x_.k + source, 0, 1, shape_.head_dim, padded_, b_.gathered_k + int64_t{i} * padded_);
      kernels_.pack_rows(x_.v + source, 0, 1, shape_.head_dim, padded_, b_.gathered_v + int64_t{i} * padded_);
    }
    kernels_.pack_panels(b_.gathered_k, padded_, count, padded_, padded_, b_.gathered_k_panels);
    kernels_.pack_panels(b_.gathered_v, padded_, count, padded_, padded_, b_.gathered_v_panels);
  }

  void add_to_result(int64_t key, int32_t previous) {
    Turn& turn = turns_[key / walk_.key_tile];
    wait_for(turn, previous);
    const int64_t stride = int64_t{shape_.kv_heads} * shape_.head_dim;
    const int64_t target = walk_.key_row(key) * stride + int64_t{kv_head_} * shape_.head_dim;
    kernels_.add_rows(b_.dk, padded_, keys_, shape_.head_dim, x_.dk + target, stride);
    kernels_.add_rows(b_.dv, padded_, keys_, shape_.head_dim, x_.dv + target, stride);
    turn.store(static_cast<int32_t>(chunks_ - chunk_), std::memory_order_release);
  }

  const AttentionShape& shape_;
  const BackwardOperands& x_;
  const BlockIndex* index_;
  const TileKernels& kernels_;
  const PackedKeys& packed_;
  const SequenceWalk& walk_;
  const BackwardBuffers& b_;
  Turn* turns_;  // of the key tiles of this (sequence, kv head)
  int64_t tokens_;
  int kv_head_, lists_, padded_;
  int64_t slab_stride_;
  int stack_rows_;
  int64_t chunk_, chunks_, begin_, end_;
  // The key tile at hand.
  bool used_ = false;  // dk and dv hold something
  int64_t key_ = 0;
  int keys_ = 0;
  const float *k_panels_ = nullptr, *v_panels_ = nullptr, *k_rows_ = nullptr;
  RowSegment segment_[kMaxSegments];
  int segments_ = 0, stacked_ = 0, stacked_keys_ = 0;
};

void clear(ThreadPool& pool, float* data, int64_t count) {
  pool.parallel_slices(count, [&](int64_t begin, int64_t end, int) { std::fill(data + begin, data + end, 0.0f); });
}

// Scratch besides packed keys and values.
int64_t task_bytes(const AttentionShape& shape, int64_t whole, int64_t queries, int64_t keys, int threads) {
  // A sequence has at least one key tile, so there are at most as many as tokens.
  const int64_t turns = Arena::rounded(keys * shape.kv_heads * static_cast<int64_t>(sizeof(Turn)));
  return turns + threads * BackwardBuffers::bytes(BackwardLayout(shape, whole, queries));
}

}  // namespace

int64_t cpu_backward_scratch_bytes(const AttentionShape& shape, int64_t queries, int64_t keys, int threads) {
  return Arena::rounded(PackedKeys::floats(shape, kBackwardForms, keys) * static_cast<int64_t>(sizeof(float))) +
         task_bytes(shape, queries, queries, keys, threads);
}

int64_t cpu_piece_scratch_bytes(const AttentionShape& shape, int64_t queries, int64_t keys, int threads) {
  return std::max(cpu_forward_scratch_bytes(shape, 0, threads), task_bytes(shape, keys, queries, keys, threads));
}

void cpu_attention_backward(const Exec& exec, const AttentionShape& shape, const PackedSequences& sequences,
                            const AttentionOperands& operands, const AttentionGradients& gradients,
                            const BlockIndex* index, std::span<const SequenceRows> rows) {
  check_operands(exec, shape, sequences, operands, index, rows);
  const int64_t keys = sequences.is_piece() ? sequences.piece_end() : operands.k.dim(0);
  const Shape of_keys = {keys, shape.kv_heads, shape.head_dim};
  SB_CHECK(gradients.dout.shape() == operands.q.shape() && gradients.dq.shape() == operands.q.shape() &&
               gradients.dk.shape() == of_keys && gradients.dv.shape() == of_keys,
           "gradients of other shapes than the operands");
  const std::vector<SequenceWalk> walks = plan_walks(shape, sequences, index, rows);
  const TileKernels& kernels = tile_kernels(cpu_isa());
  const int64_t queries = operands.q.dim(0);
  const BackwardLayout layout(shape, sequences.is_piece() ? sequences.piece.length : queries, queries);
  const ArenaScope scope(*exec.scratch);
  const PackedKeys packed = packed_keys(exec, shape, sequences, operands, kBackwardForms);
  std::vector<BackwardBuffers> buffers;
  for (int i = 0; i < exec.pool->threads(); ++i) buffers.push_back(BackwardBuffers::allocate(*exec.scratch, layout));

  FlatTasks tasks;
  std::vector<int64_t> turn_begin = {0};
  for (const SequenceWalk& walk : walks) {
    tasks.add(chunk_count(walk) * shape.kv_heads);
    turn_begin.push_back(turn_begin.back() + walk.key_tiles() * shape.kv_heads);
  }
  Turn* turns = exec.scratch->allocate_array<Turn>(turn_begin.back());
  for (int64_t i = 0; i < turn_begin.back(); ++i) new (turns + i) Turn(0);

  if (!sequences.is_piece()) pack_keys(*exec.pool, kernels, shape, walks, operands, packed);
  if (rows.empty() && !sequences.is_piece()) {
    clear(*exec.pool, gradients.dk.f32(), gradients.dk.elements());
    clear(*exec.pool, gradients.dv.f32(), gradients.dv.elements());
  }

  const BackwardOperands x = {operands.q.f32(),   operands.k.f32(),     operands.v.f32(),   operands.out.f32(),
                              operands.lse.f32(), gradients.dout.f32(), gradients.dq.f32(), gradients.dk.f32(),
                              gradients.dv.f32(), !rows.empty()};
  // Not the pool's own hand-out: waiting is safe only if tasks are begun in ascending order.
  std::atomic<int64_t> next{0};
  exec.pool->parallel_for(exec.pool->threads(), 1, [&](int64_t, int64_t, int thread) {
    for (int64_t flat; (flat = next.fetch_add(1, std::memory_order_relaxed)) < tasks.size();) {
      const auto [part, number] = tasks.at(flat);
      const SequenceWalk& walk = walks[part];
      const int kv_head = static_cast<int>(number % shape.kv_heads);
      BackwardTask(shape, x, index, kernels, packed, layout, queries, walk, kv_head,
                   chunk_count(walk) - 1 - number / shape.kv_heads,
                   turns + turn_begin[part] + kv_head * walk.key_tiles(), buffers[thread])
          .run();
    }
  });
}

}  // namespace sb
