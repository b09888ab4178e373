#include "eval/cached_attention.h"

#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "core/memory_plan.h"
#include "device/blas.h"
#include "device/cuda.h"
#include "device/host_floats.h"
#include "eval/gpu/decode.h"

namespace sb {
namespace {

// Keys that a thread block of a GPU reads where nothing is selected.
constexpr int kDenseBlock = 128;
// Key blocks of a prompt whose statistics come to the host together.
constexpr int64_t kBlocksAtOnce = 64;

}  // namespace

CachedAttention::CachedAttention(const Options& options)
    : options_(options), slots_(static_cast<size_t>(options.sequences) * options.layers) {
  if (options_.selecting == nullptr) return;
  selector_.emplace(options_.selection);
  step_.emplace(options_.selection, options_.layers);
  learn(options_.learned);
}

void CachedAttention::learn(const LearnedSelection& learned) {
  if (!step_) return;
  options_.selecting->use(learned);
  step_->use(learned);
}

void CachedAttention::clear() {
  for (Slot& slot : slots_) {
    slot.tokens = slot.finished_blocks = 0;
    slot.tile_q.clear();
  }
}

void CachedAttention::make_room() {
  if (memory_) return;
  const AttentionShape& shape = options_.shape;
  const Shape rows{options_.capacity, shape.kv_heads, shape.head_dim};
  const int64_t bytes = 2 * std::ssize(slots_) * Arena::rounded(rows.elements() * dtype_bytes(options_.dtype));
  if (options_.device == DeviceKind::cuda) {
    MemoryPlan plan;
    plan.add(fmt::format("keys and values of {} sequences of {} tokens", options_.sequences, options_.capacity), bytes);
    plan.check_fits(std::max<int64_t>(cuda::device_info().free_bytes, 1), "Lower --max-tokens or --batch.");
  }
  memory_.emplace(make_arena("keys and values", bytes, options_.device));
  for (Slot& slot : slots_) {
    slot.k = memory_->allocate(options_.dtype, rows);
    slot.v = memory_->allocate(options_.dtype, rows);
    if (!selector_) continue;
    const SelectionConfig& config = selector_->config();
    slot.tile_q.reserve(int64_t{config.query_block} * shape.heads * shape.head_dim);
    slot.statistics.resize(BlockStatistics::floats(BlockScoring(config), shape, options_.capacity / config.block));
  }
  if (selector_ && options_.device == DeviceKind::cuda) lists_ = HostMemory(list_bytes(), options_.device);
}

int CachedAttention::block() const {
  return selector_ ? selector_->config().block : kDenseBlock;
}

int64_t CachedAttention::room() const {
  return (options_.capacity + block() - 1) / block();
}

int64_t CachedAttention::list_bytes() const {
  return int64_t{options_.sequences} * options_.shape.kv_heads * (room() + 1) * static_cast<int64_t>(sizeof(int32_t));
}

SequenceTiles CachedAttention::tiles(int64_t tokens) const {
  const SelectionConfig& config = selector_->config();
  return {tokens, config.block, config.query_block, config.sink_blocks, config.local_blocks, config.budget};
}

// Tokens [begin, end) of the operands.
void CachedAttention::append(const Exec& exec, Slot& slot, int layer, const AttentionOperands& operands, int64_t begin,
                             int64_t end) {
  const int64_t tokens = end - begin, before = slot.tokens;
  SB_CHECK(before + tokens <= options_.capacity, "{} + {} tokens in a cache of {}", before, tokens, options_.capacity);
  make_room();
  copy_tensor(exec, operands.k.rows(begin, end), slot.k.rows(before, before + tokens));
  copy_tensor(exec, operands.v.rows(begin, end), slot.v.rows(before, before + tokens));
  slot.tokens += tokens;
  if (!selector_) return;

  // Queries of the tile that the last token belongs to.
  const SelectionConfig& config = selector_->config();
  const int64_t tile_begin = (slot.tokens - 1) / config.query_block * config.query_block;
  if (tile_begin >= before) slot.tile_q.clear();
  const int64_t first_new = std::max(tile_begin, before) - before;
  const HostFloats queries(operands.q.rows(begin + first_new, end));
  slot.tile_q.insert(slot.tile_q.end(), queries.values().begin(), queries.values().end());
  finish_blocks(exec, slot, layer);
}

void CachedAttention::finish_blocks(const Exec& exec, Slot& slot, int layer) {
  const AttentionShape& shape = options_.shape;
  const BlockScoring scoring(selector_->config());
  const int64_t floats = scoring.block_floats(shape.head_dim), all = options_.capacity / scoring.block;
  slot.planes = step_->planes(layer, shape);
  while (slot.finished_blocks < slot.tokens / scoring.block) {
    const int64_t first = slot.finished_blocks;
    const int64_t blocks = std::min(slot.tokens / scoring.block - first, kBlocksAtOnce);
    const TensorView keys = slot.k.rows(first * scoring.block, (first + blocks) * scoring.block);
    std::vector<float> rows;  // [kv_heads, blocks, floats]
    if (options_.device == DeviceKind::cuda) {
      rows = cuda::block_statistics(exec, shape, scoring, keys, slot.planes);
    } else {
      rows.resize(static_cast<size_t>(shape.kv_heads * blocks * floats));
      BlockStatistics::fill(exec, shape, scoring, keys.f32(), keys.dim(0), rows.data(), slot.planes);
    }
    for (int head = 0; head < shape.kv_heads; ++head)
      std::copy_n(rows.data() + head * blocks * floats, blocks * floats,
                  slot.statistics.data() + (head * all + first) * floats);
    slot.finished_blocks += blocks;
  }
}

std::vector<std::pair<int64_t, int64_t>> CachedAttention::visible_keys(const Slot& slot, int layer, int kv_head) const {
  if (!selector_) return {{0, slot.tokens}};
  const SelectionConfig& config = selector_->config();
  SelectionRequest request;
  request.layer = layer;
  request.shape = options_.shape;
  request.tiles = tiles(slot.tokens);
  request.threshold = step_->threshold(layer, request.tiles);
  request.planes = slot.planes;
  const bool dense_layer =
      std::find(config.dense_layers.begin(), config.dense_layers.end(), layer) != config.dense_layers.end();
  if (dense_layer || slot.tokens <= config.dense_limit() || request.tiles.everything_fits()) return {{0, slot.tokens}};

  const int64_t token = slot.tokens - 1, tile = token / config.query_block;
  BlockScorer scorer(options_.shape, BlockScoring(config), slot.tile_q.data(), slot.statistics.data(),
                     options_.capacity / config.block, request.tiles.begin(tile), request.planes);
  std::vector<IndexEntry> entries;
  selector_->select_tile(request, kv_head, tile, scorer, entries);
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const IndexEntry& entry : entries) {
    if (entry.first > token - request.tiles.begin(tile)) continue;
    const int64_t begin = int64_t{entry.block} * config.block;
    const int64_t end = std::min<int64_t>(slot.tokens, begin + config.block);
    if (!ranges.empty() && ranges.back().second == begin) {
      ranges.back().second = end;
    } else {
      ranges.emplace_back(begin, end);
    }
  }
  return ranges;
}

// The newest token of the slot under one kv head: `q` and `out` are its rows [heads, d].
void CachedAttention::attend(const Slot& slot, int layer, int kv_head, const float* q, float* out) const {
  const AttentionShape& shape = options_.shape;
  const int group = shape.group(), d = shape.head_dim;
  const int64_t stride = int64_t{shape.kv_heads} * d;
  const auto ranges = visible_keys(slot, layer, kv_head);
  int64_t keys = 0;
  for (const auto& [begin, end] : ranges) keys += end - begin;

  std::vector<float> scores(group * keys);
  int64_t at = 0;
  for (const auto& [begin, end] : ranges) {
    sgemm({.transpose_b = true,
           .m = group,
           .n = end - begin,
           .k = d,
           .a = q + int64_t{kv_head} * group * d,
           .lda = d,
           .b = slot.k.f32() + begin * stride + int64_t{kv_head} * d,
           .ldb = stride,
           .c = scores.data() + at,
           .ldc = keys});
    at += end - begin;
  }
  for (int h = 0; h < group; ++h) {
    float* row = scores.data() + h * keys;
    const float top = *std::max_element(row, row + keys);
    double sum = 0;
    for (int64_t i = 0; i < keys; ++i) {
      row[i] = std::exp(shape.scale * (row[i] - top));
      sum += row[i];
    }
    for (int64_t i = 0; i < keys; ++i) row[i] = static_cast<float>(row[i] / sum);
  }
  at = 0;
  for (const auto& [begin, end] : ranges) {
    sgemm({.m = group,
           .n = d,
           .k = end - begin,
           .a = scores.data() + at,
           .lda = keys,
           .b = slot.v.f32() + begin * stride + int64_t{kv_head} * d,
           .ldb = stride,
           .beta = at == 0 ? 0.0f : 1.0f,
           .c = out + int64_t{kv_head} * group * d,
           .ldc = d});
    at += end - begin;
  }
}

void CachedAttention::forward(const Exec& exec, int layer, const AttentionShape& shape,
                              const PackedSequences& sequences, const AttentionOperands& operands,
                              AttentionState& state, bool replay) {
  SB_CHECK(!replay && (caches_.empty() || std::ssize(caches_) == sequences.sequences()),
           "{} sequences, {} caches in use", sequences.sequences(), caches_.size());
  const bool prompts = caches_.empty() || slot(caches_.front(), layer).tokens == 0;
  if (prompts) options_.prefill->forward(exec, layer, shape, sequences, operands, state, false);
  if (caches_.empty()) return;

  for (int s = 0; s < sequences.sequences(); ++s) {
    Slot& cache = slot(caches_[s], layer);
    const int64_t begin = sequences.cu_seqlens[s], end = sequences.cu_seqlens[s + 1];
    SB_CHECK((cache.tokens == 0) == prompts && (prompts || end - begin == 1),
             "a micro-batch holds prompts, or one new token of each sequence");
    append(exec, cache, layer, operands, begin, end);
  }
  if (prompts) return;
  if (options_.device == DeviceKind::cuda)
    attend_on_gpu(exec, layer, operands);
  else
    attend_on_host(exec, layer, operands);
}

void CachedAttention::attend_on_host(const Exec& exec, int layer, const AttentionOperands& operands) const {
  const AttentionShape& shape = options_.shape;
  const int64_t row = int64_t{shape.heads} * shape.head_dim;
  exec.pool->parallel_for(std::ssize(caches_) * shape.kv_heads, 1, [&](int64_t item, int64_t, int) {
    const int64_t s = item / shape.kv_heads;
    attend(slot(caches_[s], layer), layer, static_cast<int>(item % shape.kv_heads), operands.q.f32() + s * row,
           operands.out.f32() + s * row);
  });
}

void CachedAttention::attend_on_gpu(const Exec& exec, int layer, const AttentionOperands& operands) {
  const ArenaScope scope(*exec.scratch);
  const int32_t* lists = selector_ ? send_lists(exec, layer) : nullptr;
  for (int64_t s = 0; s < std::ssize(caches_); ++s) {
    const Slot& cache = slot(caches_[s], layer);
    cuda::DecodeParams params;
    params.shape = options_.shape;
    params.q = operands.q.rows(s, s + 1);
    params.out = operands.out.rows(s, s + 1);
    params.k = cache.k;
    params.v = cache.v;
    params.tokens = cache.tokens;
    params.block = block();
    params.room = room();
    params.lists = lists == nullptr ? nullptr : lists + s * options_.shape.kv_heads * (room() + 1);
    cuda::decode_attention(exec, params);
  }
}

// append() waited for the queries of this layer, and with them for the lists of the layer before.
const int32_t* CachedAttention::send_lists(const Exec& exec, int layer) {
  auto* lists = static_cast<int32_t*>(lists_.data());
  const int kv_heads = options_.shape.kv_heads;
  const int64_t each = room() + 1, count = std::ssize(caches_) * kv_heads;
  exec.pool->parallel_for(count, 1, [&](int64_t item, int64_t, int) {
    int32_t* list = lists + item * each;
    int32_t blocks = 0;
    for (const auto& [begin, end] : visible_keys(slot(caches_[item / kv_heads], layer), layer, item % kv_heads))
      for (int64_t key = begin; key < end; key += block()) list[++blocks] = static_cast<int32_t>(key / block());
    list[0] = blocks;
  });
  auto* sent = exec.scratch->allocate_array<int32_t>(count * each);
  cuda::copy(exec.stream, lists, sent, count * each * static_cast<int64_t>(sizeof(int32_t)));
  return sent;
}

void CachedAttention::backward(const Exec&, int, const AttentionShape&, const PackedSequences&,
                               const AttentionOperands&, const AttentionGradients&, AttentionState&) {
  throw InternalError("generation has no backward");
}

int64_t CachedAttention::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  const int64_t prompts = options_.prefill->scratch_bytes(shape, max_tokens, threads);
  if (options_.device != DeviceKind::cuda) return prompts;
  int64_t new_tokens = cuda::decode_scratch_bytes(shape, room()), statistics = 0;
  if (selector_) {
    new_tokens += Arena::rounded(list_bytes());
    statistics = cuda::block_statistics_scratch_bytes(shape, BlockScoring(selector_->config()), kBlocksAtOnce);
  }
  return std::max({prompts, new_tokens, statistics});
}

int64_t CachedAttention::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  return options_.prefill->state_bytes(shape, max_tokens);
}

}  // namespace sb
