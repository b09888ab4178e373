#include "parallel/ring/gpu/cuda_ring_attention.h"

#include <algorithm>
#include <numeric>

#include "attention/gpu/cuda_attention.h"
#include "attention/piece_operands.h"
#include "core/errors.h"
#include "device/cuda.h"
#include "device/float16.h"
#include "device/memory.h"
#include "parallel/ring/gpu/cuda_ring_call.h"
#include "parallel/ring/gpu/cuda_ring_memory.h"
#include "parallel/ring/gpu/cuda_ring_selection.h"

namespace sb {
namespace {

// A copy, when the stream has come so far; other streams (transfers) are not waited for.
std::vector<float> host_floats(const Exec& exec, const TensorView& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.elements()));
  if (values.empty()) return values;
  std::vector<uint16_t> bits(tensor.dtype() == DType::f32 ? 0 : values.size());
  download(exec, tensor, bits.empty() ? static_cast<void*>(values.data()) : bits.data());
  cuda::synchronize(exec.stream);
  for (size_t i = 0; i < bits.size(); ++i) values[i] = f32_from_bf16(bits[i]);
  return values;
}

class CudaRingAttention final : public SelectingAttention {
 public:
  CudaRingAttention(Communicator& host, Communicator& data, const RingAttention::Options& options)
      : host_(host),
        data_(data),
        options_(options),
        selection_(options.selection, options.layers),
        travel_(data, options.node_size == 0 ? data.size() : options.node_size),
        kernels_(make_cuda_attention(
            {.attention = {options.selection, options.layers, 0}, .deterministic = options.deterministic})),
        memory_{options_, data.size(),    cuda::device_info().multiprocessors,
                travel_,  kernels_.get(), options.lists_on_device} {
    SB_CHECK(!options.lists_on_device || ring_selects_on_device(options.selection),
             "a pattern whose pairs are selected on the host");
    report_.layers.resize(options.layers);
    DeviceLines lines = travel_.lines();
    lines.collectives = options.selection.pattern != SelectionPattern::dense;
    connect_group(data, DeviceKind::cuda, lines);
    if (memory_.on_device) device_selection_ = std::make_unique<CudaRingSelection>(data, options);
  }

  std::unique_ptr<AttentionState> make_state() const override { return std::make_unique<CudaRingState>(); }
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override;
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients, AttentionState& state) override;
  void reserve(const AttentionShape& shape, int64_t max_tokens, DType dtype,
               std::span<const std::unique_ptr<AttentionState>> states) override {
    if (!device_selection_) return;
    const int64_t bytes = state_bytes(shape, max_tokens);
    for (const auto& state : states) static_cast<CudaRingState&>(*state).lists.reserve("block index", bytes);
    device_selection_->reserve(shape, max_tokens, dtype, states.size());
  }
  int64_t reserved_bytes(const AttentionShape& shape, int64_t max_tokens, DType dtype, int64_t states) const override {
    return device_selection_ ? device_selection_->reserved_bytes(shape, max_tokens, dtype, static_cast<size_t>(states))
                             : 0;
  }
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override {
    return memory_.scratch_bytes(shape, max_tokens, threads);
  }
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override {
    return memory_.state_bytes(shape, max_tokens);
  }
  std::string refuses_pieces() const override {
    if (device_selection_)
      return "pairs of pieces that GPUs share are selected on the host, and parallel.ring_lists is device";
    return refuses_ring_pieces(options_);
  }
  PieceBytes piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int) const override {
    return memory_.piece_bytes(shape, limits);
  }
  AttentionReport take_report() override {
    if (device_selection_) device_selection_->report(report_);
    AttentionReport taken = std::move(report_);
    report_ = {};
    report_.layers.resize(options_.layers);
    return taken;
  }
  void use(const LearnedSelection& learned) override {
    if (device_selection_)
      device_selection_->use(learned);
    else
      selection_.step().use(learned);
  }
  SelectionObservations take_observations() override {
    return device_selection_ ? device_selection_->take_observations() : selection_.step().take_observations();
  }

 private:
  void select_on_host(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                      const AttentionOperands& operands, CudaRingState& state);
  void select_piece_on_host(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& piece,
                            const AttentionOperands& operands, const AttentionOperands& seen, CudaRingState& state);
  void build(const Exec& exec, const AttentionShape& shape, DType dtype, CudaRingState& state);
  // What an index is made in on the host.
  Exec on_host(const Exec& exec, int64_t scratch);

  Communicator &host_, &data_;
  const RingAttention::Options options_;
  RingSelection selection_;
  RingTravel travel_;
  std::unique_ptr<SelectingAttention> kernels_;
  const CudaRingMemory memory_;
  std::unique_ptr<CudaRingSelection> device_selection_;  // null: pairs are selected on the host
  std::unique_ptr<Arena> host_scratch_;
  AttentionReport report_;
};

// Where the device does not select: from copies of queries and keys, as ranks on CPUs do.
void CudaRingAttention::select_on_host(const Exec& exec, int layer, const AttentionShape& shape,
                                       const PackedSequences& sequences, const AttentionOperands& operands,
                                       CudaRingState& state) {
  std::vector<float> q, k;
  if (options_.selection.pattern != SelectionPattern::dense) {
    q = host_floats(exec, operands.q);
    k = host_floats(exec, operands.k);
  }
  int64_t most = 0;
  for (int r = 0; r < state.layout->ranks(); ++r)
    most = std::max<int64_t>(most, state.layout->local_cu_seqlens(r).back());
  const Exec host = on_host(exec, selection_.scratch_bytes(shape, most, host_.size()));
  selection_.select(host, host_, layer, shape, *state.layout, sequences.budgets, q.data(), k.data(), state.index);
  if (options_.coverage_rows == 0 || !selection_.step().ready(layer)) return;
  add_ring_coverage(*state.layout, host_.rank(), layer,
                    selection_.measure(host, host_, layer, shape, *state.layout, sequences.budgets, q.data(), k.data(),
                                       state.index, options_.coverage_rows),
                    report_);
}

Exec CudaRingAttention::on_host(const Exec& exec, int64_t scratch) {
  if (!host_scratch_ || host_scratch_->capacity() < scratch)
    host_scratch_ = std::make_unique<Arena>("selections of a ring", scratch);
  return {.device = DeviceKind::cpu, .pool = exec.pool, .scratch = host_scratch_.get()};
}

// The same for a piece. `seen`: all keys that this rank holds up to its end. Statistics of keys stay on the host.
void CudaRingAttention::select_piece_on_host(const Exec& exec, int layer, const AttentionShape& shape,
                                             const PackedSequences& piece, const AttentionOperands& operands,
                                             const AttentionOperands& seen, CudaRingState& state) {
  const ContextLayout& layout = *state.layout;
  const bool dense = options_.selection.pattern == SelectionPattern::dense;
  const bool ready = !dense && selection_.step().ready(layer), measures = options_.coverage_rows > 0;
  std::vector<float> q, k;
  if (!dense) {
    q = host_floats(exec, operands.q);
    k = host_floats(exec, own_keys(piece, operands).k);
  }
  int64_t most = 0;
  for (int r = 0; r < layout.ranks(); ++r) {
    int64_t tokens = 0;
    for (const int32_t b : layout.held_from(r, 0, piece.piece.begin)) tokens += layout.block_length(0, b);
    most = std::max(most, tokens);
  }
  const Exec host = on_host(exec, selection_.append_scratch_bytes(shape, most, host_.size()));
  if (ready && (options_.selection.scores_blocks() || measures))
    selection_.append_statistics(host, host_, layer, shape, layout, piece.piece, k.data());
  selection_.select_piece(host, host_.rank(), layer, shape, layout, piece, q.data(), k.data(), state.index);
  if (!ready || !measures || piece.again) return;
  const std::vector<float> keys = host_floats(exec, seen.k);
  const CoverageSample& sample = selection_.measure_piece(host, host_, layer, shape, layout, piece, q.data(),
                                                          keys.data(), state.index, options_.coverage_rows);
  if (piece.piece_end() == piece.piece.length) add_ring_coverage(layout, host_.rank(), layer, {sample}, report_);
}

// A pass of a piece: its queries, all of this rank's, behind the keys.
void set_piece(const Exec& exec, const RingPass& from, DevicePass& to) {
  SB_CHECK(from.parts.size() == 1, "a piece comes by itself, not with {} sequences", from.parts.size());
  const RingPass::Part& part = from.parts.front();
  to.first_query = static_cast<int32_t>(part.keys + part.before);
  to.cu_seqlens = {0, static_cast<int32_t>(part.queries)};
  std::vector<int32_t> queries(static_cast<size_t>(part.queries));
  std::iota(queries.begin(), queries.end(), 0);
  to.queries.assign(exec, queries);
  // Where they lie the kernels may read and add to whole items, which end behind keys that are not a multiple of them:
  // such keys are copied, padded.
  std::vector<int32_t> keys = from.copies;
  if (from.source == RingPass::Keys::chunk && part.keys % gpu::kBlock != 0) {
    keys.resize(static_cast<size_t>(part.keys));
    std::iota(keys.begin(), keys.end(), 0);
  }
  keys.resize((keys.size() + gpu::kBlock - 1) / gpu::kBlock * gpu::kBlock, -1);
  to.keys.assign(exec, keys);
  to.pages = {KeyPage{0, 0}, KeyPage{*to.first_query, *to.first_query}};
}

void CudaRingAttention::build(const Exec& exec, const AttentionShape& shape, DType dtype, CudaRingState& state) {
  const ContextLayout& layout = *state.layout;
  const int rank = host_.rank(), sinks = options_.selection.sink_blocks;
  // Lists that were given may hold single columns whatever the pattern.
  const bool columns = state.given_lists || options_.selection.pattern == SelectionPattern::vertical_slash;
  const ReplicatedKeys replicated = replicated_keys(
      layout, state.index, sinks, columns ? wanted_columns(host_, layout, state.index) : std::vector<uint8_t>());
  RingPlan plan;
  plan.build(layout, rank, shape.kv_heads, state.index, replicated, sinks, *exec.pool, state.first_query.value_or(0));
  state.given.assign(exec, replicated.given[static_cast<size_t>(rank)]);
  state.piece = replicated.piece;
  state.passes.resize(static_cast<size_t>(layout.ranks()) + 1);
  for (int chunk = 0; chunk <= layout.ranks(); ++chunk) {
    std::vector<DevicePass>& passes = state.passes[static_cast<size_t>(chunk)];
    const std::span<const RingPass> planned =
        chunk < layout.ranks() ? plan.passes(chunk) : std::span(plan.copies(), plan.copies() == nullptr ? 0 : 1);
    passes.resize(planned.size());
    for (size_t i = 0; i < planned.size(); ++i) {
      const RingPass& from = planned[i];
      DevicePass& to = passes[i];
      to.first_query.reset();
      if (!to.lists) to.lists = kernels_->make_state();
      if (state.first_query) {
        set_piece(exec, from, to);
        write_block_index(from.index, *kernels_, exec, shape, dtype, *to.lists, to.first_query);
        continue;
      }
      std::vector<int32_t> keys(static_cast<size_t>(from.tokens()), -1), queries(keys);
      to.cu_seqlens = {0};
      for (const RingPass::Part& part : from.parts) {
        for (int64_t token = 0; token < part.keys; ++token) {
          const int64_t place = part.key_source + token;
          keys[static_cast<size_t>(part.begin + token)] = from.source == RingPass::Keys::copies
                                                              ? from.copies[static_cast<size_t>(place)]
                                                              : static_cast<int32_t>(place);
        }
        for (int64_t token = 0; token < part.queries; ++token) {
          const auto at = static_cast<size_t>(part.begin + part.keys + token);
          queries[at] = static_cast<int32_t>(part.query_source + token);
          if (from.source == RingPass::Keys::own) keys[at] = queries[at];
        }
        to.cu_seqlens.push_back(static_cast<int32_t>(part.begin + part.keys + part.queries));
      }
      to.keys.assign(exec, keys);
      to.queries.assign(exec, queries);
      write_block_index(from.index, *kernels_, exec, shape, dtype, *to.lists);
    }
  }
  state.built = true;
}

void CudaRingAttention::forward(const Exec& exec, int layer, const AttentionShape& shape,
                                const PackedSequences& sequences, const AttentionOperands& operands,
                                AttentionState& any_state, bool replay) {
  auto& state = static_cast<CudaRingState&>(any_state);
  SB_CHECK(!sequences.whole_cu_seqlens.empty(), "ring attention needs the lengths of the whole sequences");
  const bool piece = sequences.is_piece();
  const bool on_device = replay ? state.plan != nullptr : device_selection_ != nullptr;
  SB_CHECK(!piece || !on_device, "{}", refuses_pieces());
  state.first_query.reset();
  if (piece) state.first_query = sequences.piece.begin;
  if (!on_device) {
    state.plan.reset();
    const int32_t up_to_piece[] = {0, static_cast<int32_t>(sequences.piece_end())};
    state.layout.emplace(options_.placement, host_.size(), options_.selection.block,
                         piece ? std::span<const int32_t>(up_to_piece) : sequences.whole_cu_seqlens);
  } else if (!replay) {
    state.plan = device_selection_->plan_for(exec, layer, shape, sequences, operands.q.dtype());
  }
  const std::vector<int32_t> local = state.shared().local_cu_seqlens(host_.rank());
  SB_CHECK(piece ? sequences.piece.pages.back().begin + sequences.tokens() == local.back()
                 : std::ranges::equal(local, sequences.cu_seqlens),
           "the micro-batch is not shared out as the ring's layout says");
  const ArenaScope scope(*exec.scratch);
  const AttentionOperands seen = keys_in_order(exec, sequences, operands);
  if (!replay) {
    state.given_lists = false;
    if (on_device)
      device_selection_->select(exec, layer, shape, operands, *state.plan, state.lists,
                                report_.layers[static_cast<size_t>(layer)]);
    else if (piece)
      select_piece_on_host(exec, layer, shape, sequences, operands, seen, state);
    else
      select_on_host(exec, layer, shape, sequences, operands, state);
  }
  if (!on_device && (!replay || !state.built)) build(exec, shape, operands.q.dtype(), state);
  CudaRingCall({data_, travel_, *kernels_, options_.deterministic}, exec, layer, shape, seen, state).forward();
  if (!replay && !on_device && !sequences.again)
    count_ring_pairs(*state.layout, host_.rank(), state.index, report_.layers[static_cast<size_t>(layer)],
                     state.first_query.value_or(0));
}

void CudaRingAttention::backward(const Exec& exec, int layer, const AttentionShape& shape,
                                 const PackedSequences& sequences, const AttentionOperands& operands,
                                 const AttentionGradients& gradients, AttentionState& state) {
  const ArenaScope scope(*exec.scratch);
  const AttentionOperands seen = keys_in_order(exec, sequences, operands);
  CudaRingCall({data_, travel_, *kernels_, options_.deterministic}, exec, layer, shape, seen,
               static_cast<CudaRingState&>(state))
      .backward(gradients);
}

}  // namespace

std::unique_ptr<SelectingAttention> make_cuda_ring_attention(Communicator& host, Communicator& data,
                                                             const RingAttention::Options& options) {
  cuda::require_device();
  return std::make_unique<CudaRingAttention>(host, data, options);
}

BlockIndex read_ring_index(const AttentionState& state, ThreadPool& pool) {
  const auto& kept = static_cast<const CudaRingState&>(state);
  return kept.plan ? kept.plan->read_index(kept.lists.data(), pool) : kept.index;
}

void write_ring_index(BlockIndex index, AttentionState& state) {
  auto& kept = static_cast<CudaRingState&>(state);
  kept.plan.reset();
  kept.index = std::move(index);
  kept.given_lists = true;
  kept.built = false;
}

}  // namespace sb
