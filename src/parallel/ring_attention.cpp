#include "parallel/ring_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "attention/block_sparse.h"
#include "core/errors.h"

namespace sb {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

}  // namespace

class RingAttention::State final : public AttentionState {
 public:
  std::optional<ContextLayout> layout;
  BlockIndex index;
  ReplicatedKeys replicated;
  RingPlan plan;
  std::vector<float> copies;  // of replicated keys: [rank · piece + number][key, value][kv_heads · d]
};

// What forward and backward of one call have in common.
class RingAttention::Call {
 public:
  Call(RingAttention& ring, const Exec& exec, const AttentionShape& shape, const AttentionOperands& operands,
       State& state)
      : ring_(ring),
        exec_(exec),
        shape_(shape),
        x_(operands),
        state_(state),
        tokens_(operands.q.dim(0)),
        query_width_(int64_t{shape.heads} * shape.head_dim),
        key_width_(int64_t{shape.kv_heads} * shape.head_dim) {
    const ContextLayout& layout = *state.layout;
    for (int r = 0; r < layout.ranks(); ++r) {
      chunk_tokens_.push_back(layout.local_cu_seqlens(r).back());
      chunk_floats_.push_back(2 * chunk_tokens_.back() * key_width_);
    }
    ring.own_.resize(2 * tokens_ * key_width_);
    copy(x_.k.f32(), ring.own_.data(), tokens_ * key_width_);
    copy(x_.v.f32(), ring.own_.data() + tokens_ * key_width_, tokens_ * key_width_);
  }

  // Which tokens somebody's rows have as gathered columns.
  std::vector<uint8_t> wanted_columns() const {
    const BlockIndex& index = state_.index;
    std::vector<uint8_t> wanted;
    if (ring_.group_.all_reduce(static_cast<int32_t>(index.has_gathered_columns()), ReduceOp::max) == 0) return wanted;
    wanted.resize(state_.layout->cu_seqlens().back());
    for (int64_t id = 0; id < index.rows(); ++id) {
      const BlockIndex::Row row = index.row(id);
      if (row.columns.empty()) continue;
      const int64_t begin = index.place_of(id).sequence->token_begin;
      for (const int32_t column : row.columns) wanted[begin + column] = 1;
    }
    ring_.group_.all_reduce(std::span<uint8_t>(wanted), ReduceOp::max);
    return wanted;
  }

  void gather_copies() {
    const ReplicatedKeys& keys = state_.replicated;
    const int64_t piece = keys.piece * 2 * key_width_;
    state_.copies.assign(piece * ring_.group_.size(), 0.0f);
    if (piece == 0) return;
    float* own = state_.copies.data() + ring_.group_.rank() * piece;
    for (const int32_t token : keys.given[ring_.group_.rank()]) {
      std::memcpy(own, x_.k.f32() + token * key_width_, key_width_ * sizeof(float));
      std::memcpy(own + key_width_, x_.v.f32() + token * key_width_, key_width_ * sizeof(float));
      own += 2 * key_width_;
    }
    ring_.group_.all_gather(std::span<float>(state_.copies), piece);
  }

  void forward() {
    std::fill_n(x_.out.f32(), x_.out.elements(), 0.0f);
    std::fill_n(x_.lse.f32(), x_.lse.elements(), kNothing);
    ring_.travel_.forward(ring_.own_.data(), chunk_floats_, [&](int chunk, const float* data) {
      for (const RingPass& pass : state_.plan.passes(chunk)) forward_pass(pass, chunk, data);
    });
  }

  void backward(const AttentionGradients& gradients) {
    g_ = &gradients;
    std::fill_n(gradients.dq.f32(), gradients.dq.elements(), 0.0f);
    copies_gradient_.assign(state_.copies.size(), 0.0f);
    ring_.own_gradient_.resize(ring_.own_.size());
    ring_.travel_.backward(
        ring_.own_.data(), chunk_floats_,
        [&](int chunk, const float* data, float* gradient) {
          std::fill_n(gradient, chunk_floats_[chunk], 0.0f);
          for (const RingPass& pass : state_.plan.passes(chunk)) backward_pass(pass, chunk, data, gradient);
        },
        ring_.own_gradient_.data());
    copy(ring_.own_gradient_.data(), gradients.dk.f32(), tokens_ * key_width_);
    copy(ring_.own_gradient_.data() + tokens_ * key_width_, gradients.dv.f32(), tokens_ * key_width_);
    return_copies();
  }

 private:
  void copy(const float* source, float* target, int64_t count) const {
    exec_.pool->parallel_slices(count, [&](int64_t begin, int64_t end, int) {
      std::memcpy(target + begin, source + begin, (end - begin) * sizeof(float));
    });
  }
  void add(const float* source, float* target, int64_t count) const {
    exec_.pool->parallel_slices(count, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) target[i] += source[i];
    });
  }

  // The operands of a pass, put together from the chunk, the copies and what this rank holds. Rows that are not written
  // belong to queries without keys and keys that nobody chose.
  AttentionOperands assemble(const RingPass& pass, int chunk, const float* data) const {
    const int64_t tokens = pass.tokens();
    Arena& scratch = *exec_.scratch;
    const Shape queries = {tokens, shape_.heads, shape_.head_dim}, keys = {tokens, shape_.kv_heads, shape_.head_dim};
    AttentionOperands y;
    y.q = scratch.allocate(DType::f32, queries);
    y.k = scratch.allocate(DType::f32, keys);
    y.v = scratch.allocate(DType::f32, keys);
    y.out = scratch.allocate(DType::f32, queries);
    y.lse = scratch.allocate(DType::f32, {shape_.heads, tokens});
    for (const RingPass::Part& part : pass.parts) {
      const int64_t own = part.begin + part.keys;
      copy(x_.q.f32() + part.query_source * query_width_, y.q.f32() + own * query_width_, part.queries * query_width_);
      float *k = y.k.f32() + part.begin * key_width_, *v = y.v.f32() + part.begin * key_width_;
      if (pass.own) {
        for (int64_t i = 0; i < part.keys; ++i) {
          const int32_t place = pass.copies[part.key_source + i];
          if (place < 0) continue;
          const float* source = state_.copies.data() + place * 2 * key_width_;
          std::memcpy(k + i * key_width_, source, key_width_ * sizeof(float));
          std::memcpy(v + i * key_width_, source + key_width_, key_width_ * sizeof(float));
        }
        copy(x_.k.f32() + part.query_source * key_width_, y.k.f32() + own * key_width_, part.queries * key_width_);
        copy(x_.v.f32() + part.query_source * key_width_, y.v.f32() + own * key_width_, part.queries * key_width_);
      } else {
        copy(data + part.key_source * key_width_, k, part.keys * key_width_);
        copy(data + (chunk_tokens_[chunk] + part.key_source) * key_width_, v, part.keys * key_width_);
      }
    }
    return y;
  }

  void forward_pass(const RingPass& pass, int chunk, const float* data) const {
    const ArenaScope scope(*exec_.scratch);
    const AttentionOperands y = assemble(pass, chunk, data);
    block_sparse_forward(exec_, shape_, pass.index, y);
    const int64_t tokens = pass.tokens();
    for (const RingPass::Part& part : pass.parts)
      exec_.pool->parallel_slices(part.queries, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) merge(y, tokens, part.begin + part.keys + i, part.query_source + i);
      });
  }

  // Adds a token's partial result: both are means under the softmax of their own keys.
  void merge(const AttentionOperands& y, int64_t pass_tokens, int64_t from, int64_t to) const {
    for (int head = 0; head < shape_.heads; ++head) {
      const float more = y.lse.f32()[head * pass_tokens + from];
      if (more == kNothing) continue;
      float& lse = x_.lse.f32()[head * tokens_ + to];
      float* out = x_.out.f32() + to * query_width_ + int64_t{head} * shape_.head_dim;
      const float* part = y.out.f32() + from * query_width_ + int64_t{head} * shape_.head_dim;
      const float top = std::max(lse, more), have = std::exp(lse - top), add = std::exp(more - top);
      const float sum = have + add, keep = have / sum, take = add / sum;
      for (int c = 0; c < shape_.head_dim; ++c) out[c] = keep * out[c] + take * part[c];
      lse = top + std::log(sum);
    }
  }

  void backward_pass(const RingPass& pass, int chunk, const float* data, float* gradient) {
    const ArenaScope scope(*exec_.scratch);
    const AttentionOperands y = assemble(pass, chunk, data);
    const int64_t tokens = pass.tokens();
    Arena& scratch = *exec_.scratch;
    AttentionGradients h;
    h.dout = scratch.allocate(DType::f32, y.q.shape());
    h.dq = scratch.allocate(DType::f32, y.q.shape());
    h.dk = scratch.allocate(DType::f32, y.k.shape());
    h.dv = scratch.allocate(DType::f32, y.k.shape());
    for (const RingPass::Part& part : pass.parts) {
      const int64_t own = part.begin + part.keys, from = part.query_source, count = part.queries;
      copy(x_.out.f32() + from * query_width_, y.out.f32() + own * query_width_, count * query_width_);
      copy(g_->dout.f32() + from * query_width_, h.dout.f32() + own * query_width_, count * query_width_);
      for (int head = 0; head < shape_.heads; ++head)
        std::memcpy(y.lse.f32() + head * tokens + own, x_.lse.f32() + head * tokens_ + from, count * sizeof(float));
    }
    block_sparse_backward(exec_, shape_, pass.index, y, h);
    float *dk = gradient, *dv = gradient + chunk_tokens_[chunk] * key_width_;
    for (const RingPass::Part& part : pass.parts) {
      const int64_t own = part.begin + part.keys, to = part.query_source;
      add(h.dq.f32() + own * query_width_, g_->dq.f32() + to * query_width_, part.queries * query_width_);
      const float *more_k = h.dk.f32() + part.begin * key_width_, *more_v = h.dv.f32() + part.begin * key_width_;
      if (pass.own) {
        for (int64_t i = 0; i < part.keys; ++i) {
          const int32_t place = pass.copies[part.key_source + i];
          if (place < 0) continue;
          float* target = copies_gradient_.data() + place * 2 * key_width_;
          for (int64_t c = 0; c < key_width_; ++c) target[c] += more_k[i * key_width_ + c];
          for (int64_t c = 0; c < key_width_; ++c) target[key_width_ + c] += more_v[i * key_width_ + c];
        }
        add(h.dk.f32() + own * key_width_, dk + to * key_width_, part.queries * key_width_);
        add(h.dv.f32() + own * key_width_, dv + to * key_width_, part.queries * key_width_);
      } else {
        add(more_k, dk + part.key_source * key_width_, part.keys * key_width_);
        add(more_v, dv + part.key_source * key_width_, part.keys * key_width_);
      }
    }
  }

  // Gradients of copies go back to the tokens they were taken from.
  void return_copies() {
    const ReplicatedKeys& keys = state_.replicated;
    if (keys.piece == 0) return;
    const int rank = ring_.group_.rank();
    const int64_t piece = keys.piece * 2 * key_width_;
    ring_.group_.reduce_scatter(std::span<float>(copies_gradient_), piece);
    const float* sum = copies_gradient_.data() + rank * piece;
    for (const int32_t token : keys.given[rank]) {
      for (int64_t c = 0; c < key_width_; ++c) g_->dk.f32()[token * key_width_ + c] += sum[c];
      for (int64_t c = 0; c < key_width_; ++c) g_->dv.f32()[token * key_width_ + c] += sum[key_width_ + c];
      sum += 2 * key_width_;
    }
  }

  RingAttention& ring_;
  const Exec& exec_;
  const AttentionShape& shape_;
  const AttentionOperands& x_;
  const AttentionGradients* g_ = nullptr;
  State& state_;
  const int64_t tokens_, query_width_, key_width_;
  std::vector<int64_t> chunk_tokens_, chunk_floats_;
  std::vector<float> copies_gradient_;
};

RingAttention::RingAttention(Communicator& group, const Options& options)
    : group_(group),
      options_(options),
      selection_(options.selection),
      travel_(group, options.node_size == 0 ? group.size() : options.node_size) {
  report_.layers.resize(options.layers);
}

RingAttention::~RingAttention() = default;

ContextLayout RingAttention::layout(std::span<const int32_t> whole_cu_seqlens) const {
  return {options_.placement, group_.size(), options_.selection.block, whole_cu_seqlens};
}

std::unique_ptr<AttentionState> RingAttention::make_state() const {
  return std::make_unique<State>();
}

BlockIndex& RingAttention::index(AttentionState& state) {
  return static_cast<State&>(state).index;
}

void RingAttention::forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                            const AttentionOperands& operands, AttentionState& any_state, bool replay) {
  State& state = static_cast<State&>(any_state);
  SB_CHECK(!sequences.whole_cu_seqlens.empty(), "ring attention needs the lengths of the whole sequences");
  state.layout.emplace(layout(sequences.whole_cu_seqlens));
  SB_CHECK(std::ranges::equal(state.layout->local_cu_seqlens(group_.rank()), sequences.cu_seqlens),
           "the micro-batch is not shared out as the ring's layout says");
  if (!replay)
    selection_.choose(exec, group_, layer, shape, *state.layout, sequences.budgets, operands.q.f32(), operands.k.f32(),
                      state.index);
  const int sinks = options_.selection.sink_blocks;
  Call call(*this, exec, shape, operands, state);
  state.replicated = replicated_keys(*state.layout, state.index, sinks, call.wanted_columns());
  state.plan.build(*state.layout, group_.rank(), shape.kv_heads, state.index, state.replicated, sinks, *exec.pool);
  call.gather_copies();
  call.forward();
  if (!replay) count_pairs(layer, state);
}

void RingAttention::backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                             const AttentionOperands& operands, const AttentionGradients& gradients,
                             AttentionState& state) {
  Call(*this, exec, shape, operands, static_cast<State&>(state)).backward(gradients);
}

void RingAttention::count_pairs(int layer, const State& state) {
  const ContextLayout& layout = *state.layout;
  LayerAttention& report = report_.layers[layer];
  const RingWork work = count_ring_work(layout, state.index, 0);
  for (int w = 0; w < layout.ranks(); ++w) {
    if (w != group_.rank()) continue;
    report.pairs += work.outside[w];
    for (int t = 0; t < layout.ranks(); ++t) report.pairs += work.at(w, t);
  }
  for (int s = 0; s < layout.sequences(); ++s)
    for (const int32_t b : layout.held(group_.rank(), s)) {
      const int64_t begin = int64_t{b} * layout.block(), end = begin + layout.block_length(s, b);
      report.causal_pairs += state.index.shape().list_heads * (end * (end + 1) - begin * (begin + 1)) / 2;
    }
}

AttentionReport RingAttention::take_report() {
  AttentionReport taken = std::move(report_);
  report_ = {};
  report_.layers.resize(options_.layers);
  return taken;
}

// Only sequences that are not dense have copies: those longer than the limit.
int64_t RingAttention::replicated_limit(const AttentionShape& shape, int64_t max_tokens) const {
  const SelectionConfig& selection = options_.selection;
  const int64_t all = max_tokens * group_.size();
  if (selection.pattern == SelectionPattern::dense || group_.size() == 1) return 0;
  int64_t each = int64_t{selection.sink_blocks} * selection.block;
  if (selection.pattern == SelectionPattern::vertical_slash)
    each += 2 * selection.vertical_cap * shape.heads + selection.block;
  return std::min(all + selection.block, all / (selection.dense_limit() + 1) * each);
}

int64_t RingAttention::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  // A pass has the own tokens and a chunk's, or the own tokens and copies; padded to blocks.
  const int64_t tokens = 2 * max_tokens + replicated_limit(shape, max_tokens) + options_.selection.block;
  const auto bytes = [&](int64_t floats) { return Arena::rounded(floats * static_cast<int64_t>(sizeof(float))); };
  const int64_t queries = bytes(tokens * shape.heads * shape.head_dim);
  const int64_t keys = bytes(tokens * shape.kv_heads * shape.head_dim);
  return 4 * queries + 4 * keys + bytes(tokens * shape.heads) + block_sparse_scratch_bytes(shape, tokens, threads);
}

int64_t RingAttention::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  const SelectionConfig& selection = options_.selection;
  const int64_t all = max_tokens * group_.size(), copies = replicated_limit(shape, max_tokens);
  // Lists of dense sequences are those of blocks; the others' as in one process, once whole and once by chunk.
  const int64_t blocks = (all + selection.block - 1) / selection.block;
  int64_t list = blocks, query_block = std::min(selection.block, kDenseQueryBlock);
  if (selection.pattern != SelectionPattern::dense) {
    list =
        std::min(blocks, 2 * selection.budget / selection.block + selection.sink_blocks + selection.local_blocks + 2);
    query_block = selection.query_block;
  }
  const int lists = selection.lists_per_query_head() ? shape.heads : shape.kv_heads;
  const int64_t rows = (max_tokens + query_block - 1) / query_block * lists;
  int64_t bytes = rows * (2 * list * 7 + 24 * (1 + group_.size())) + all * static_cast<int64_t>(sizeof(int32_t));
  bytes += copies * 2 * shape.kv_heads * shape.head_dim * static_cast<int64_t>(sizeof(float));
  if (selection.pattern == SelectionPattern::vertical_slash)
    bytes += 2 * rows * std::min(all, 2 * selection.vertical_cap) * static_cast<int64_t>(sizeof(int32_t));
  return bytes;
}

}  // namespace sb
