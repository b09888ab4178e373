#include "eval/cached_attention.h"

#include <algorithm>
#include <cmath>

#include "core/errors.h"
#include "device/blas.h"
#include "eval/host_floats.h"

namespace sb {

CachedAttention::CachedAttention(const Options& options)
    : options_(options), slots_(static_cast<size_t>(options.sequences) * options.layers) {
  if (options_.choosing == nullptr) return;
  selector_.emplace(options_.selection);
  step_.emplace(options_.selection, options_.layers);
  learn(options_.learned);
}

void CachedAttention::learn(const LearnedSelection& learned) {
  if (!step_) return;
  options_.choosing->use(learned);
  step_->use(learned);
}

void CachedAttention::clear() {
  for (Slot& slot : slots_) {
    slot.tokens = slot.finished_blocks = 0;
    slot.tile_q.clear();
  }
}

// With a cache's first prompt: whoever only scores never needs it.
void CachedAttention::make_room(Slot& slot) const {
  const AttentionShape& shape = options_.shape;
  slot.k.resize(options_.capacity * shape.kv_heads * shape.head_dim);
  slot.v.resize(slot.k.size());
  if (!selector_) return;
  const SelectionConfig& config = selector_->config();
  slot.tile_q.reserve(int64_t{config.query_block} * shape.heads * shape.head_dim);
  slot.statistics.resize(BlockStatistics::floats(BlockScoring(config), shape, options_.capacity / config.block));
}

SequenceTiles CachedAttention::tiles(int64_t tokens) const {
  const SelectionConfig& config = selector_->config();
  return {tokens, config.block, config.query_block, config.sink_blocks, config.local_blocks, config.budget};
}

// Tokens [begin, end) of the operands.
void CachedAttention::append(const Exec& exec, Slot& slot, int layer, const AttentionOperands& operands, int64_t begin,
                             int64_t end) {
  const AttentionShape& shape = options_.shape;
  const int64_t row = int64_t{shape.kv_heads} * shape.head_dim, tokens = end - begin, before = slot.tokens;
  SB_CHECK(before + tokens <= options_.capacity, "{} + {} tokens in a cache of {}", before, tokens, options_.capacity);
  if (slot.k.empty()) make_room(slot);
  std::ranges::copy(HostFloats(operands.k.rows(begin, end)).values(), slot.k.data() + before * row);
  std::ranges::copy(HostFloats(operands.v.rows(begin, end)).values(), slot.v.data() + before * row);
  slot.tokens += tokens;
  if (!selector_) return;

  // Queries of the tile that the last token belongs to.
  const SelectionConfig& config = selector_->config();
  const int64_t tile_begin = (slot.tokens - 1) / config.query_block * config.query_block;
  if (tile_begin >= before) slot.tile_q.clear();
  const int64_t first_new = std::max(tile_begin, before) - before;
  const HostFloats queries(operands.q.rows(begin + first_new, end));
  slot.tile_q.insert(slot.tile_q.end(), queries.values().begin(), queries.values().end());

  const BlockScoring scoring(config);
  const int64_t floats = scoring.block_floats(shape.head_dim);
  const int64_t room = options_.capacity / config.block;
  std::vector<float> rows(shape.kv_heads * floats);
  slot.planes = step_->planes(layer, shape);
  for (; (slot.finished_blocks + 1) * config.block <= slot.tokens; ++slot.finished_blocks) {
    BlockStatistics::fill(exec, shape, scoring, slot.k.data() + slot.finished_blocks * config.block * row, config.block,
                          rows.data(), slot.planes);
    for (int head = 0; head < shape.kv_heads; ++head) {
      std::copy_n(rows.data() + head * floats, floats,
                  slot.statistics.data() + (head * room + slot.finished_blocks) * floats);
    }
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
  selector_->choose_tile(request, kv_head, tile, scorer, entries);
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
           .b = slot.k.data() + begin * stride + int64_t{kv_head} * d,
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
           .b = slot.v.data() + begin * stride + int64_t{kv_head} * d,
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

  const Exec host = {.pool = exec.pool};
  for (int s = 0; s < sequences.sequences(); ++s) {
    Slot& cache = slot(caches_[s], layer);
    const int64_t begin = sequences.cu_seqlens[s], end = sequences.cu_seqlens[s + 1];
    SB_CHECK((cache.tokens == 0) == prompts && (prompts || end - begin == 1),
             "a micro-batch holds prompts, or one new token of each sequence");
    append(host, cache, layer, operands, begin, end);
  }
  if (prompts) return;
  const int64_t query_row = int64_t{shape.heads} * shape.head_dim;
  const HostFloats q(operands.q), out(operands.out);
  host.pool->parallel_for(int64_t{sequences.sequences()} * shape.kv_heads, 1, [&](int64_t item, int64_t, int) {
    const int64_t s = item / shape.kv_heads;
    attend(slot(caches_[s], layer), layer, static_cast<int>(item % shape.kv_heads), q.data() + s * query_row,
           out.data() + s * query_row);
  });
  out.store();
}

void CachedAttention::backward(const Exec&, int, const AttentionShape&, const PackedSequences&,
                               const AttentionOperands&, const AttentionGradients&, AttentionState&) {
  throw InternalError("generation has no backward");
}

int64_t CachedAttention::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  return options_.prefill->scratch_bytes(shape, max_tokens, threads);
}

int64_t CachedAttention::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  return options_.prefill->state_bytes(shape, max_tokens);
}

}  // namespace sb
