#include "parallel/ring/ring_attention.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "attention/cpu/block_sparse.h"
#include "attention/piece_operands.h"
#include "core/errors.h"
#include "device/memory.h"

namespace sb {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

}  // namespace

class RingAttention::State final : public AttentionState {
 public:
  std::optional<ContextLayout> layout;
  int64_t first_query = 0;  // of a piece, in its sequence
  BlockIndex index;
  std::vector<int32_t> columns;  // gathered ones that every rank has copies of, tokens of the micro-batch
  bool columns_known = false;    // `columns` are those of the index
};

// What forward and backward of one call have in common.
class RingAttention::Call {
 public:
  // `operands`: keys and values in order.
  Call(RingAttention& ring, const Exec& exec, const AttentionShape& shape, const AttentionOperands& operands,
       State& state)
      : ring_(ring),
        exec_(exec),
        shape_(shape),
        x_(operands),
        state_(state),
        key_width_(int64_t{shape.kv_heads} * shape.head_dim) {
    for (int r = 0; r < state.layout->ranks(); ++r)
      chunk_elements_.push_back(state.layout->local_cu_seqlens(r).back() * key_width_);
  }

  // Which gathered columns of the index have copies. Collective.
  void find_columns() {
    const std::vector<uint8_t> wanted = wanted_columns(ring_.group_, *state_.layout, state_.index);
    const ReplicatedKeys keys =
        replicated_keys(*state_.layout, state_.index, ring_.options_.selection.sink_blocks, wanted);
    state_.columns.clear();
    for (size_t token = 0; token < wanted.size(); ++token)
      if (wanted[token] != 0 && keys.copy[token] >= 0) state_.columns.push_back(static_cast<int32_t>(token));
    state_.columns_known = true;
  }

  // Makes the calls of the kernels.
  void plan() {
    std::vector<uint8_t> wanted(state_.columns.empty() ? 0 : state_.layout->cu_seqlens().back());
    for (const int32_t token : state_.columns) wanted[token] = 1;
    const int sinks = ring_.options_.selection.sink_blocks, rank = ring_.group_.rank();
    ReplicatedKeys keys = replicated_keys(*state_.layout, state_.index, sinks, wanted);
    ring_.plan_.build(*state_.layout, rank, shape_.kv_heads, state_.index, keys, sinks, *exec_.pool,
                      state_.first_query);
    given_ = std::move(keys.given[rank]);
    piece_ = keys.piece;
  }

  void forward() {
    zero_tensor(exec_, x_.out);
    std::fill_n(x_.lse.f32(), x_.lse.elements(), kNothing);
    if (piece_ > 0) {
      const ArenaScope scope(*exec_.scratch);
      const AttentionOperands copies = gathered_copies();
      if (const RingPass* pass = ring_.plan_.copies())
        block_sparse_merge_forward(exec_, shape_, pass->index, pass->rows(), copies);
    }
    ring_.travel_.forward(exec_, x_.k.dtype(), {x_.k.raw(), x_.v.raw()}, chunk_elements_,
                          [&](int chunk, const RingData& data) {
                            for (const RingPass& pass : ring_.plan_.passes(chunk))
                              block_sparse_merge_forward(exec_, shape_, pass.index, pass.rows(), with(chunk, data));
                          });
  }

  // Adds to dk and dv.
  void backward(const AttentionGradients& g) {
    zero_tensor(exec_, g.dq);
    if (piece_ > 0) {
      const ArenaScope scope(*exec_.scratch);
      const AttentionOperands copies = gathered_copies();
      AttentionGradients h{g.dout, g.dq, exec_.scratch->allocate(DType::f32, copies.k.shape()),
                           exec_.scratch->allocate(DType::f32, copies.v.shape())};
      for (const TensorView& gradient : {h.dk, h.dv}) zero_tensor(exec_, gradient);
      if (const RingPass* pass = ring_.plan_.copies())
        block_sparse_add_backward(exec_, shape_, pass->index, pass->rows(), copies, h);
      return_copies(h, g);
    }
    ring_.travel_.backward(
        exec_, x_.k.dtype(), {x_.k.raw(), x_.v.raw()}, chunk_elements_,
        [&](int chunk, const RingData& data, const RingGradients& sum) {
          const Shape shape = keys_of(chunk);
          const AttentionGradients h{g.dout, g.dq, TensorView(sum.keys, shape), TensorView(sum.values, shape)};
          for (const RingPass& pass : ring_.plan_.passes(chunk))
            block_sparse_add_backward(exec_, shape_, pass.index, pass.rows(), with(chunk, data), h);
        },
        {g.dk.f32(), g.dv.f32()});
  }

 private:
  Shape keys_of(int chunk) const { return {chunk_elements_[chunk] / key_width_, shape_.kv_heads, shape_.head_dim}; }

  // This rank's queries and a chunk's keys.
  AttentionOperands with(int chunk, const RingData& data) const {
    AttentionOperands y = x_;
    y.k = TensorView(static_cast<const float*>(data.keys), keys_of(chunk));
    y.v = TensorView(static_cast<const float*>(data.values), keys_of(chunk));
    return y;
  }

  // [rank · piece + number][key, value][kv_heads · d]
  std::span<float> allocate_pieces() const {
    const int64_t count = ring_.group_.size() * piece_ * 2 * key_width_;
    return {exec_.scratch->allocate_array<float>(count), static_cast<size_t>(count)};
  }
  std::span<const int32_t> copies_of_keys() const {
    const RingPass* pass = ring_.plan_.copies();
    return pass ? std::span<const int32_t>(pass->copies) : std::span<const int32_t>();
  }

  // Copies the keys and values that every rank wants: this rank's queries and those keys, in the order of the pass.
  AttentionOperands gathered_copies() const {
    const std::span<const int32_t> places = copies_of_keys();
    AttentionOperands y = x_;
    const Shape shape = {std::ssize(places), shape_.kv_heads, shape_.head_dim};
    y.k = exec_.scratch->allocate(DType::f32, shape);
    y.v = exec_.scratch->allocate(DType::f32, shape);
    const ArenaScope scope(*exec_.scratch);
    const std::span<float> pieces = allocate_pieces();
    const int64_t piece = piece_ * 2 * key_width_;
    float* own = pieces.data() + ring_.group_.rank() * piece;
    std::fill_n(own, piece, 0.0f);
    for (const int32_t token : given_) {
      std::memcpy(own, x_.k.f32() + token * key_width_, key_width_ * sizeof(float));
      std::memcpy(own + key_width_, x_.v.f32() + token * key_width_, key_width_ * sizeof(float));
      own += 2 * key_width_;
    }
    ring_.group_.all_gather(pieces, piece);
    exec_.pool->parallel_slices(std::ssize(places), [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        float *k = y.k.f32() + i * key_width_, *v = y.v.f32() + i * key_width_;
        if (places[i] < 0) {  // padding, never looked at
          std::fill_n(k, key_width_, 0.0f);
          std::fill_n(v, key_width_, 0.0f);
          continue;
        }
        const float* source = pieces.data() + places[i] * 2 * key_width_;
        std::memcpy(k, source, key_width_ * sizeof(float));
        std::memcpy(v, source + key_width_, key_width_ * sizeof(float));
      }
    });
    return y;
  }

  // Gradients of copies go back to the tokens they were taken from.
  void return_copies(const AttentionGradients& copies, const AttentionGradients& own) const {
    const ArenaScope scope(*exec_.scratch);
    const std::span<const int32_t> places = copies_of_keys();
    const std::span<float> pieces = allocate_pieces();
    std::fill(pieces.begin(), pieces.end(), 0.0f);
    for (size_t i = 0; i < places.size(); ++i) {
      if (places[i] < 0) continue;
      float* target = pieces.data() + places[i] * 2 * key_width_;
      const int64_t row = static_cast<int64_t>(i) * key_width_;
      std::memcpy(target, copies.dk.f32() + row, key_width_ * sizeof(float));
      std::memcpy(target + key_width_, copies.dv.f32() + row, key_width_ * sizeof(float));
    }
    const int64_t piece = piece_ * 2 * key_width_;
    ring_.group_.reduce_scatter(pieces, piece);
    const float* sum = pieces.data() + ring_.group_.rank() * piece;
    for (const int32_t token : given_) {
      for (int64_t c = 0; c < key_width_; ++c) own.dk.f32()[token * key_width_ + c] += sum[c];
      for (int64_t c = 0; c < key_width_; ++c) own.dv.f32()[token * key_width_ + c] += sum[key_width_ + c];
      sum += 2 * key_width_;
    }
  }

  RingAttention& ring_;
  const Exec& exec_;
  const AttentionShape& shape_;
  const AttentionOperands& x_;
  State& state_;
  const int64_t key_width_;
  std::vector<int64_t> chunk_elements_;  // of the keys of every rank
  // Copies of keys: which of its tokens this rank gives, and how many any rank gives at most.
  std::vector<int32_t> given_;
  int64_t piece_ = 0;
};

RingAttention::RingAttention(Communicator& group, const Options& options)
    : group_(group),
      options_(options),
      selection_(options.selection, options.layers),
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
  static_cast<State&>(state).columns_known = false;
  return static_cast<State&>(state).index;
}

int64_t RingAttention::bytes(const AttentionState& any_state) {
  const State& state = static_cast<const State&>(any_state);
  return state.index.bytes() + std::ssize(state.columns) * static_cast<int64_t>(sizeof(int32_t));
}

void RingAttention::forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                            const AttentionOperands& operands, AttentionState& any_state, bool replay) {
  State& state = static_cast<State&>(any_state);
  SB_CHECK(!sequences.whole_cu_seqlens.empty(), "ring attention needs the lengths of the whole sequences");
  const bool piece = sequences.is_piece();
  const int32_t up_to_piece[] = {0, static_cast<int32_t>(sequences.piece_end())};
  state.layout.emplace(layout(piece ? std::span<const int32_t>(up_to_piece) : sequences.whole_cu_seqlens));
  state.first_query = piece ? sequences.piece.begin : 0;
  const std::vector<int32_t> local = state.layout->local_cu_seqlens(group_.rank());
  SB_CHECK(piece ? sequences.piece.pages.back().begin + sequences.tokens() == local.back()
                 : std::ranges::equal(local, sequences.cu_seqlens),
           "the micro-batch is not shared out as the ring's layout says");
  if (!replay) {
    if (piece)
      select_piece(exec, layer, shape, sequences, operands, state);
    else
      select(exec, layer, shape, sequences, operands, state);
    state.columns.clear();
    state.columns_known = options_.selection.pattern != SelectionPattern::vertical_slash;
  }
  const ArenaScope scope(*exec.scratch);
  const AttentionOperands seen = keys_in_order(exec, sequences, operands);
  Call call(*this, exec, shape, seen, state);
  if (!state.columns_known) call.find_columns();
  call.plan();
  call.forward();
  if (replay || sequences.again) return;
  count_ring_pairs(*state.layout, group_.rank(), state.index, report_.layers[layer], state.first_query);
  if (options_.coverage_rows > 0 && selection_.step().ready(layer)) measure(exec, layer, shape, sequences, seen, state);
}

void RingAttention::select(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                           const AttentionOperands& operands, State& state) {
  selection_.select(exec, group_, layer, shape, *state.layout, sequences.budgets, operands.q.f32(), operands.k.f32(),
                    state.index);
}

void RingAttention::select_piece(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& piece,
                                 const AttentionOperands& operands, State& state) {
  const int64_t row = piece.piece.pages.back().row;
  const float* k = operands.k.rows(row, row + piece.tokens()).f32();
  if (keeps_statistics() && selection_.step().ready(layer))
    selection_.append_statistics(exec, group_, layer, shape, *state.layout, piece.piece, k);
  selection_.select_piece(exec, group_.rank(), layer, shape, *state.layout, piece, operands.q.f32(), k, state.index);
}

// The sample of a sequence in pieces is reported with its last one.
void RingAttention::measure(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                            const AttentionOperands& seen, const State& state) {
  const ContextLayout& layout = *state.layout;
  std::vector<CoverageSample> samples;
  if (sequences.is_piece())
    samples = {selection_.measure_piece(exec, group_, layer, shape, layout, sequences, seen.q.f32(), seen.k.f32(),
                                        state.index, options_.coverage_rows)};
  else
    samples = selection_.measure(exec, group_, layer, shape, layout, sequences.budgets, seen.q.f32(), seen.k.f32(),
                                 state.index, options_.coverage_rows);
  if (!sequences.is_piece() || sequences.piece_end() == sequences.piece.length)
    add_ring_coverage(layout, group_.rank(), layer, samples, report_);
}

void RingAttention::backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                             const AttentionOperands& operands, const AttentionGradients& gradients,
                             AttentionState& state) {
  const ArenaScope scope(*exec.scratch);
  const AttentionOperands seen = keys_in_order(exec, sequences, operands);
  Call call(*this, exec, shape, seen, static_cast<State&>(state));
  call.plan();
  if (!sequences.is_piece())
    for (const TensorView& gradient : {gradients.dk, gradients.dv}) zero_tensor(exec, gradient);
  call.backward(gradients);
}

AttentionReport RingAttention::take_report() {
  AttentionReport taken = std::move(report_);
  report_ = {};
  report_.layers.resize(options_.layers);
  return taken;
}

// Tokens that have copies on all ranks: never more than a rank holds itself. Only sequences longer than the limit of
// dense ones have any.
int64_t RingAttention::copies_limit(const AttentionShape& shape, int64_t max_tokens) const {
  const SelectionConfig& selection = options_.selection;
  if (selection.pattern == SelectionPattern::dense || group_.size() == 1) return 0;
  if (selection.pattern == SelectionPattern::vertical_slash) return max_tokens;
  const int64_t sequences = max_tokens * group_.size() / (selection.dense_limit() + 1);
  return std::min(max_tokens, sequences * group_.size() * selection.sink_blocks * selection.block);
}

int64_t RingAttention::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  return std::max(passes_scratch_bytes(shape, max_tokens, max_tokens, copies_limit(shape, max_tokens), threads),
                  selection_.scratch_bytes(shape, max_tokens, group_.size()));
}

int64_t RingAttention::passes_scratch_bytes(const AttentionShape& shape, int64_t queries, int64_t keys, int64_t copies,
                                            int threads) const {
  const int64_t key_width = int64_t{shape.kv_heads} * shape.head_dim;
  const auto bytes = [&](int64_t tokens) { return Arena::rounded(tokens * key_width * int64_t{sizeof(float)}); };
  const BlockSparseScratch chunk = block_sparse_scratch(shape, queries, keys, threads);
  const int64_t ring = std::max(travel_.forward_scratch_bytes(DType::f32, keys * key_width) + chunk.forward,
                                travel_.backward_scratch_bytes(DType::f32, keys * key_width) + chunk.backward);
  // Before the ring: keys and values of the copies, their gradients, and the kernels' or the exchange's memory.
  const BlockSparseScratch copied = block_sparse_scratch(shape, queries, copies, threads);
  return std::max(ring, copies == 0 ? 0 : 4 * bytes(copies) + std::max(copied.backward, bytes(2 * copies)));
}

int64_t RingAttention::Options::longest_dense(int64_t whole_tokens) const {
  if (selection.pattern == SelectionPattern::dense || !selection.dense_layers.empty() || any_dense) return whole_tokens;
  // What a budget covers runs dense, too, and so does a first look.
  const int64_t first_look = selection.judges_by_planes() ? kFirstLookTokens : 0;
  return std::min(whole_tokens, std::max({selection.dense_limit(), selection.budget, largest_budget, first_look}));
}

RingAttention::Lists RingAttention::Options::selected_lists(const AttentionShape& shape, int64_t whole_tokens) const {
  const int64_t blocks = whole_tokens / selection.block + 1;
  if (selection.pattern == SelectionPattern::dense) return {};
  // Twice the budget: a list holds what any token of the query block selected.
  const int64_t budget = std::max(selection.budget, largest_budget);
  const int64_t list =
      std::min(blocks, 2 * budget / selection.block + selection.sink_blocks + selection.local_blocks + 2);
  const bool by_head = selection.lists_per_query_head();
  const int64_t columns = by_head ? std::min(whole_tokens, 2 * selection.vertical_cap * budget / selection.budget) : 0;
  return {selection.query_block, by_head ? shape.heads : shape.kv_heads, list, columns};
}

// By chunk, sequences that are computed whole have lists, too.
RingAttention::Lists RingAttention::dense_lists(const AttentionShape& shape, int64_t whole_tokens) const {
  const SelectionConfig& selection = options_.selection;
  const int64_t list = options_.longest_dense(whole_tokens) / selection.block + 1;
  return {std::min(selection.block, kDenseQueryBlock), shape.kv_heads, list, 0};
}

int64_t RingAttention::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  const int64_t all = max_tokens * group_.size(), blocks = all / options_.selection.block + 1;
  const Lists lists = options_.selected_lists(shape, all);
  // The layout, which columns have copies, the lists, and where those of all rows and columns begin.
  return (3 * blocks + copies_limit(shape, max_tokens)) * static_cast<int64_t>(sizeof(int32_t)) +
         lists.rows(max_tokens) * lists.row_bytes() + 8 * lists.rows(all) + 4 * lists.heads * blocks;
}

// A row by chunk is one of the chunk's tokens or of this rank's. While they are made, rows wait in another form.
int64_t RingAttention::planned_bytes(const Lists& selected, const Lists& dense, int64_t queries, int64_t rows) const {
  const int64_t tokens = 2 * rows * (group_.size() + 1), blocks = tokens / options_.selection.block + 1;
  int64_t most = 0;
  for (const Lists& lists : {selected, dense})
    most = std::max(most, lists.rows(queries) * lists.row_bytes() +
                              lists.staged_bytes(lists.rows(tokens), lists.rows(queries), group_.size() + 1) +
                              8 * lists.rows(tokens) + 4 * lists.heads * blocks);
  return most;
}

int64_t RingAttention::call_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  const int64_t all = max_tokens * group_.size();
  const Lists selected = options_.selected_lists(shape, all);
  int64_t most = planned_bytes(selected, dense_lists(shape, all), max_tokens, max_tokens) +
                 copies_limit(shape, max_tokens) * static_cast<int64_t>(sizeof(int32_t));
  most = std::max(most, selection_.select_bytes(shape, max_tokens, group_.size()));
  // Coverage comes when the lists have done their work; what selected them keeps its memory.
  return selected.staged_bytes(selected.rows(all), selected.rows(max_tokens), threads) +
         std::max(most, selection_.measure_bytes(shape, max_tokens, group_.size(), options_.coverage_rows));
}

std::string RingAttention::refuses_pieces() const {
  return refuses_ring_pieces(options_);
}

std::string refuses_ring_pieces(const RingAttention::Options& options) {
  if (options.placement == ContextPlacement::zigzag)
    return "with parallel.placement zigzag the length of a piece, and not of its sequence, says where a block lies "
           "(triangular goes with pieces)";
  return why_not_in_pieces(options.selection);
}

// A rank's queries of the piece against all it and the others hold of the sequence.
PieceBytes RingAttention::piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int threads) const {
  const SelectionConfig& selection = options_.selection;
  const int64_t key_width = int64_t{shape.kv_heads} * shape.head_dim, ranks = group_.size(), longest = limits.longest;
  const int64_t held = ContextLayout::most_sequence_tokens(group_.size(), selection.block, longest);
  const int64_t queries = limits.max_tokens, blocks = longest / selection.block + 1;
  const int64_t copies = selection.pattern == SelectionPattern::dense || ranks == 1
                             ? 0
                             : std::min(held, ranks * selection.sink_blocks * selection.block);
  const auto bytes = [&](int64_t tokens) { return Arena::rounded(tokens * key_width * int64_t{sizeof(float)}); };
  const Lists selected = options_.selected_lists(shape, longest);
  PieceBytes piece;
  piece.scratch = 2 * bytes(held) + passes_scratch_bytes(shape, queries, held, copies, threads);
  if (keeps_statistics()) {
    piece.scratch = std::max(piece.scratch, selection_.append_scratch_bytes(shape, queries, group_.size()));
    piece.layer = selection_.kept_bytes(shape, longest);
  }
  piece.state = 3 * blocks * static_cast<int64_t>(sizeof(int32_t)) + selected.rows(queries) * selected.row_bytes() +
                8 * selected.rows(longest) + 4 * selected.heads * blocks;
  piece.call = selected.staged_bytes(selected.rows(longest), selected.rows(queries), threads) +
               std::max(planned_bytes(selected, dense_lists(shape, longest), queries, held) +
                            copies * static_cast<int64_t>(sizeof(int32_t)),
                        selection_.measure_bytes(shape, held, group_.size(), options_.coverage_rows));
  return piece;
}

}  // namespace sb
