#include "parallel/ring/gpu/cuda_ring_attention.h"

#include <algorithm>
#include <bit>

#include "attention/gpu/cuda_attention.h"
#include "core/errors.h"
#include "device/cuda.h"
#include "device/memory.h"
#include "parallel/ring/gpu/cuda_ring_call.h"
#include "parallel/ring/gpu/cuda_ring_memory.h"
#include "parallel/ring/gpu/cuda_ring_selection.h"

namespace sb {
namespace {

std::vector<float> host_floats(const TensorView& tensor) {
  const HostCopy copy(tensor);
  std::vector<float> values(static_cast<size_t>(tensor.elements()));
  if (tensor.dtype() == DType::f32) {
    std::copy_n(copy.view().f32(), values.size(), values.begin());
    return values;
  }
  const auto* bits = static_cast<const uint16_t*>(copy.view().raw());
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::bit_cast<float>(static_cast<uint32_t>(bits[i]) << 16);
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
    return "GPUs that share sequences (parallel.cp) compute whole ones only; use device: cpu or parallel.cp: 1";
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
  void build(const Exec& exec, const AttentionShape& shape, DType dtype, CudaRingState& state);

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
    q = host_floats(operands.q);
    k = host_floats(operands.k);
  }
  int64_t most = 0;
  for (int r = 0; r < state.layout->ranks(); ++r)
    most = std::max<int64_t>(most, state.layout->local_cu_seqlens(r).back());
  const int64_t scratch = selection_.scratch_bytes(shape, most, host_.size());
  if (!host_scratch_ || host_scratch_->capacity() < scratch)
    host_scratch_ = std::make_unique<Arena>("selections of a ring", scratch);
  const Exec on_host{.device = DeviceKind::cpu, .pool = exec.pool, .scratch = host_scratch_.get()};
  selection_.select(on_host, host_, layer, shape, *state.layout, sequences.budgets, q.data(), k.data(), state.index);
  if (options_.coverage_rows == 0 || !selection_.step().ready(layer)) return;
  add_ring_coverage(*state.layout, host_.rank(), layer,
                    selection_.measure(on_host, host_, layer, shape, *state.layout, sequences.budgets, q.data(),
                                       k.data(), state.index, options_.coverage_rows),
                    report_);
}

void CudaRingAttention::build(const Exec& exec, const AttentionShape& shape, DType dtype, CudaRingState& state) {
  const ContextLayout& layout = *state.layout;
  const int rank = host_.rank(), sinks = options_.selection.sink_blocks;
  // Lists that were given may hold single columns whatever the pattern.
  const bool columns = state.given_lists || options_.selection.pattern == SelectionPattern::vertical_slash;
  const ReplicatedKeys replicated = replicated_keys(
      layout, state.index, sinks, columns ? wanted_columns(host_, layout, state.index) : std::vector<uint8_t>());
  RingPlan plan;
  plan.build(layout, rank, shape.kv_heads, state.index, replicated, sinks, *exec.pool);
  state.given.assign(replicated.given[static_cast<size_t>(rank)]);
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
      to.keys.assign(keys);
      to.queries.assign(queries);
      if (!to.lists) to.lists = kernels_->make_state();
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
  const bool on_device = replay ? state.plan != nullptr : device_selection_ != nullptr;
  if (!on_device) {
    state.plan.reset();
    state.layout.emplace(options_.placement, host_.size(), options_.selection.block, sequences.whole_cu_seqlens);
  } else if (!replay) {
    state.plan = device_selection_->plan_for(exec, layer, shape, sequences, operands.q.dtype());
  }
  SB_CHECK(std::ranges::equal(state.shared().local_cu_seqlens(host_.rank()), sequences.cu_seqlens),
           "the micro-batch is not shared out as the ring's layout says");
  if (!replay) {
    state.given_lists = false;
    if (on_device)
      device_selection_->select(exec, layer, shape, operands, *state.plan, state.lists,
                                report_.layers[static_cast<size_t>(layer)]);
    else
      select_on_host(exec, layer, shape, sequences, operands, state);
  }
  if (!on_device && (!replay || !state.built)) build(exec, shape, operands.q.dtype(), state);
  CudaRingCall({data_, travel_, *kernels_, options_.deterministic}, exec, layer, shape, operands, state).forward();
  if (!replay && !on_device)
    count_ring_pairs(*state.layout, host_.rank(), state.index, report_.layers[static_cast<size_t>(layer)]);
}

void CudaRingAttention::backward(const Exec& exec, int layer, const AttentionShape& shape,
                                 const PackedSequences& sequences, const AttentionOperands& operands,
                                 const AttentionGradients& gradients, AttentionState& state) {
  CudaRingCall({data_, travel_, *kernels_, options_.deterministic}, exec, layer, shape, operands,
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
