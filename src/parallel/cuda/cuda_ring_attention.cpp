#include "parallel/cuda/cuda_ring_attention.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>

#include "attention/cuda/cuda_attention.h"
#include "core/errors.h"
#include "device/cuda.h"
#include "device/memory.h"
#include "parallel/cuda/ring_kernels.h"

namespace sb {
namespace {

constexpr float kNothing = -std::numeric_limits<float>::infinity();

// Numbers of rows on the device.
class DeviceRows {
 public:
  void assign(const std::vector<int32_t>& rows) {
    const auto bytes = static_cast<int64_t>(rows.size() * sizeof(int32_t));
    if (bytes > bytes_) memory_ = cuda::allocate("ring rows", bytes_ = bytes + bytes / 4);
    count_ = std::ssize(rows);
    if (bytes > 0) cuda::copy_and_wait(rows.data(), memory_.get(), bytes);
  }
  const int32_t* data() const { return static_cast<const int32_t*>(memory_.get()); }
  int64_t count() const { return count_; }

 private:
  std::shared_ptr<void> memory_;
  int64_t bytes_ = 0, count_ = 0;
};

// A call of the kernels, ready for the device: a token of its made-up sequences is a row of keys, of queries, of both
// (own keys) or of nothing (padding).
struct DevicePass {
  DeviceRows keys, queries;
  std::vector<int32_t> cu_seqlens;
  std::unique_ptr<AttentionState> lists;
  int64_t tokens() const { return cu_seqlens.back(); }
};

class CudaRingState final : public AttentionState {
 public:
  std::optional<ContextLayout> layout;
  BlockIndex index;
  bool built = false;  // what follows, from the index
  DeviceRows given;
  int64_t piece = 0;
  std::vector<std::vector<DevicePass>> passes;  // [ranks + 1]: of every chunk, then of the copies
};

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

class CudaRingAttention final : public ChoosingAttention {
 public:
  CudaRingAttention(Communicator& host, Communicator& data, const RingAttention::Options& options)
      : host_(host),
        data_(data),
        options_(options),
        selection_(options.selection),
        travel_(data, options.node_size == 0 ? data.size() : options.node_size),
        kernels_(make_cuda_attention({.attention = {options.selection, options.layers, 0}})) {
    report_.layers.resize(options.layers);
  }

  std::unique_ptr<AttentionState> make_state() const override { return std::make_unique<CudaRingState>(); }
  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& operands, AttentionState& state, bool replay) override;
  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& operands, const AttentionGradients& gradients, AttentionState& state) override;
  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const override;
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override;
  AttentionReport take_report() override {
    AttentionReport taken = std::move(report_);
    report_ = {};
    report_.layers.resize(options_.layers);
    return taken;
  }
  Selector::Thresholds thresholds() const override { return selection_.selector().thresholds(); }
  void set_thresholds(Selector::Thresholds thresholds) override {
    selection_.selector().set_thresholds(std::move(thresholds));
  }

 private:
  class Call;
  void choose(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
              const AttentionOperands& operands, CudaRingState& state);
  void build(const Exec& exec, const AttentionShape& shape, DType dtype, CudaRingState& state);

  Communicator &host_, &data_;
  const RingAttention::Options options_;
  RingSelection selection_;
  RingTravel travel_;
  std::unique_ptr<ChoosingAttention> kernels_;
  std::unique_ptr<Arena> host_scratch_;
  AttentionReport report_;
};

// What forward and backward of one call have in common.
class CudaRingAttention::Call {
 public:
  Call(CudaRingAttention& ring, const Exec& exec, int layer, const AttentionShape& shape,
       const AttentionOperands& operands, CudaRingState& state)
      : ring_(ring),
        exec_(exec),
        layer_(layer),
        shape_(shape),
        x_(operands),
        state_(state),
        dtype_(operands.q.dtype()),
        key_width_(int64_t{shape.kv_heads} * shape.head_dim),
        query_width_(int64_t{shape.heads} * shape.head_dim) {
    for (int r = 0; r < state.layout->ranks(); ++r)
      chunk_elements_.push_back(state.layout->local_cu_seqlens(r).back() * key_width_);
  }

  void forward() {
    const ArenaScope scope(*exec_.scratch);
    sum_ = allocate(DType::f32, x_.out.shape());
    zero_tensor(exec_, sum_);
    gpu::fill(exec_, x_.lse.f32(), x_.lse.elements(), kNothing);
    if (state_.piece > 0) {
      const ArenaScope copies_scope(*exec_.scratch);
      const Keys copies = gathered_copies();
      for (const DevicePass& pass : state_.passes.back()) forward_pass(pass, copies);
    }
    ring_.travel_.forward(exec_, dtype_, {x_.k.raw(), x_.v.raw()}, chunk_elements_,
                          [&](int chunk, const RingData& data) {
                            for (const DevicePass& pass : state_.passes[static_cast<size_t>(chunk)])
                              forward_pass(pass, {data.keys, data.values, key_width_});
                          });
    gpu::convert_floats(exec_, sum_.f32(), x_.out.raw(), dtype_, x_.out.elements());
  }

  void backward(const AttentionGradients& g) {
    g_ = &g;
    const ArenaScope scope(*exec_.scratch);
    sum_ = allocate(DType::f32, x_.q.shape());
    const TensorView dk = allocate(DType::f32, x_.k.shape()), dv = allocate(DType::f32, x_.v.shape());
    for (const TensorView& gradient : {sum_, dk, dv}) zero_tensor(exec_, gradient);
    if (state_.piece > 0) {
      const ArenaScope copies_scope(*exec_.scratch);
      const Keys copies = gathered_copies();
      const TensorView pieces = allocate(DType::f32, {pieces_elements()});
      zero_tensor(exec_, pieces);
      for (const DevicePass& pass : state_.passes.back())
        backward_pass(pass, copies, pieces.f32(), pieces.f32() + key_width_, 2 * key_width_);
      return_copies(pieces, dk, dv);
    }
    ring_.travel_.backward(
        exec_, dtype_, {x_.k.raw(), x_.v.raw()}, chunk_elements_,
        [&](int chunk, const RingData& data, const RingGradients& sum) {
          for (const DevicePass& pass : state_.passes[static_cast<size_t>(chunk)])
            backward_pass(pass, {data.keys, data.values, key_width_}, sum.keys, sum.values, key_width_);
        },
        {dk.f32(), dv.f32()});
    gpu::convert_floats(exec_, sum_.f32(), g.dq.raw(), g.dq.dtype(), g.dq.elements());
    gpu::convert_floats(exec_, dk.f32(), g.dk.raw(), g.dk.dtype(), g.dk.elements());
    gpu::convert_floats(exec_, dv.f32(), g.dv.raw(), g.dv.dtype(), g.dv.elements());
  }

 private:
  // Keys and values that lie together; the distance between rows in elements.
  struct Keys {
    const void *keys, *values;
    int64_t stride;
  };

  TensorView allocate(DType dtype, Shape shape) const { return exec_.scratch->allocate(dtype, shape); }
  int64_t bytes(int64_t elements) const { return elements * dtype_bytes(dtype_); }

  TensorView gather(const void* from, int64_t stride, Shape shape, const DeviceRows& rows) const {
    const TensorView to = allocate(dtype_, shape);
    const int64_t width = shape.elements() / shape[0];
    gpu::gather_rows(exec_, {from, bytes(stride), to.raw(), bytes(width), rows.data(), rows.count(), bytes(width)});
    return to;
  }

  AttentionOperands assemble(const DevicePass& pass, const Keys& keys) const {
    const Shape query_shape = {pass.tokens(), shape_.heads, shape_.head_dim};
    const Shape key_shape = {pass.tokens(), shape_.kv_heads, shape_.head_dim};
    AttentionOperands y;
    y.q = gather(x_.q.raw(), query_width_, query_shape, pass.queries);
    y.k = gather(keys.keys, keys.stride, key_shape, pass.keys);
    y.v = gather(keys.values, keys.stride, key_shape, pass.keys);
    y.lse = allocate(DType::f32, {shape_.heads, pass.tokens()});
    return y;
  }

  void forward_pass(const DevicePass& pass, const Keys& keys) const {
    const ArenaScope scope(*exec_.scratch);
    AttentionOperands y = assemble(pass, keys);
    y.out = allocate(dtype_, y.q.shape());
    ring_.kernels_->forward(exec_, layer_, shape_, {pass.cu_seqlens, {}}, y, *pass.lists, /*replay=*/true);
    gpu::merge_rows(exec_, {y.out.raw(), dtype_, y.lse.f32(), sum_.f32(), x_.lse.f32(), pass.queries.data(),
                            pass.tokens(), x_.q.dim(0), shape_.heads, shape_.head_dim});
  }

  void backward_pass(const DevicePass& pass, const Keys& keys, float* dk, float* dv, int64_t stride) const {
    const ArenaScope scope(*exec_.scratch);
    AttentionOperands y = assemble(pass, keys);
    y.out = gather(x_.out.raw(), query_width_, y.q.shape(), pass.queries);
    gpu::gather_lse(exec_, x_.lse.f32(), x_.q.dim(0), y.lse.f32(), pass.queries.data(), pass.tokens(), shape_.heads);
    AttentionGradients h;
    h.dout = gather(g_->dout.raw(), query_width_, y.q.shape(), pass.queries);
    h.dq = allocate(dtype_, y.q.shape());
    h.dk = allocate(dtype_, y.k.shape());
    h.dv = allocate(dtype_, y.k.shape());
    ring_.kernels_->backward(exec_, layer_, shape_, {pass.cu_seqlens, {}}, y, h, *pass.lists);
    const int64_t tokens = pass.tokens();
    gpu::add_rows(
        exec_, {h.dq.raw(), dtype_, query_width_, sum_.f32(), query_width_, pass.queries.data(), tokens, query_width_});
    gpu::add_rows(exec_, {h.dk.raw(), dtype_, key_width_, dk, stride, pass.keys.data(), tokens, key_width_});
    gpu::add_rows(exec_, {h.dv.raw(), dtype_, key_width_, dv, stride, pass.keys.data(), tokens, key_width_});
  }

  // [rank · piece + number][key, value][kv_heads · d]
  int64_t piece_elements() const { return state_.piece * 2 * key_width_; }
  int64_t pieces_elements() const { return ring_.data_.size() * piece_elements(); }

  Keys gathered_copies() const {
    const TensorView pieces = allocate(dtype_, {pieces_elements()});
    zero_tensor(exec_, pieces);
    char* own = static_cast<char*>(pieces.raw()) + bytes(ring_.data_.rank() * piece_elements());
    for (const bool values : {false, true})
      gpu::gather_rows(exec_,
                       {values ? x_.v.raw() : x_.k.raw(), bytes(key_width_), own + (values ? bytes(key_width_) : 0),
                        bytes(2 * key_width_), state_.given.data(), state_.given.count(), bytes(key_width_)});
    ring_.data_.all_gather_async(pieces.raw(), bytes(piece_elements()), CommType::u8).wait();
    return {pieces.raw(), static_cast<const char*>(pieces.raw()) + bytes(key_width_), 2 * key_width_};
  }

  // Gradients of copies go back to the tokens they were taken from.
  void return_copies(const TensorView& pieces, const TensorView& dk, const TensorView& dv) const {
    ring_.data_.reduce_scatter_async(pieces.raw(), piece_elements(), CommType::f32, ReduceOp::sum).wait();
    const float* own = pieces.f32() + ring_.data_.rank() * piece_elements();
    for (const bool values : {false, true})
      gpu::add_rows(exec_, {own + (values ? key_width_ : 0), DType::f32, 2 * key_width_, (values ? dv : dk).f32(),
                            key_width_, state_.given.data(), state_.given.count(), key_width_});
  }

  CudaRingAttention& ring_;
  const Exec& exec_;
  const int layer_;
  const AttentionShape& shape_;
  const AttentionOperands& x_;
  const AttentionGradients* g_ = nullptr;
  CudaRingState& state_;
  const DType dtype_;
  const int64_t key_width_, query_width_;
  std::vector<int64_t> chunk_elements_;  // of the keys of every rank
  TensorView sum_;                       // in fp32: the output, or the gradient of the queries
};

void CudaRingAttention::choose(const Exec& exec, int layer, const AttentionShape& shape,
                               const PackedSequences& sequences, const AttentionOperands& operands,
                               CudaRingState& state) {
  const bool selects = options_.selection.pattern != SelectionPattern::dense;
  std::vector<float> q, k;
  int64_t scratch = 0;
  if (selects) {
    q = host_floats(operands.q);
    k = host_floats(operands.k);
    int64_t most = 0;
    for (int r = 0; r < state.layout->ranks(); ++r)
      most = std::max<int64_t>(most, state.layout->local_cu_seqlens(r).back());
    scratch = selection_.scratch_bytes(shape, most, host_.size());
  }
  if (!host_scratch_ || host_scratch_->capacity() < scratch)
    host_scratch_ = std::make_unique<Arena>("choices of a ring", scratch);
  const Exec on_host{.device = DeviceKind::cpu, .pool = exec.pool, .scratch = host_scratch_.get()};
  selection_.choose(on_host, host_, layer, shape, *state.layout, sequences.budgets, q.data(), k.data(), state.index);
}

void CudaRingAttention::build(const Exec& exec, const AttentionShape& shape, DType dtype, CudaRingState& state) {
  const ContextLayout& layout = *state.layout;
  const int rank = host_.rank(), sinks = options_.selection.sink_blocks;
  const ReplicatedKeys replicated =
      replicated_keys(layout, state.index, sinks, wanted_columns(host_, layout, state.index));
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
  state.layout.emplace(options_.placement, host_.size(), options_.selection.block, sequences.whole_cu_seqlens);
  SB_CHECK(std::ranges::equal(state.layout->local_cu_seqlens(host_.rank()), sequences.cu_seqlens),
           "the micro-batch is not shared out as the ring's layout says");
  if (!replay) choose(exec, layer, shape, sequences, operands, state);
  if (!replay || !state.built) build(exec, shape, operands.q.dtype(), state);
  Call(*this, exec, layer, shape, operands, state).forward();
  if (!replay) count_ring_pairs(*state.layout, host_.rank(), state.index, report_.layers[static_cast<size_t>(layer)]);
}

void CudaRingAttention::backward(const Exec& exec, int layer, const AttentionShape& shape,
                                 const PackedSequences& sequences, const AttentionOperands& operands,
                                 const AttentionGradients& gradients, AttentionState& state) {
  Call(*this, exec, layer, shape, operands, static_cast<CudaRingState&>(state)).backward(gradients);
}

int64_t CudaRingAttention::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  const int64_t key_width = int64_t{shape.kv_heads} * shape.head_dim,
                query_width = int64_t{shape.heads} * shape.head_dim;
  // Bounds for fp32; bf16 takes less.
  const auto floats = [](int64_t elements) { return Arena::rounded(elements * int64_t{sizeof(float)}); };
  // A pass has a chunk's keys, or as many copies, and the own tokens.
  const int64_t tokens = 2 * max_tokens + options_.selection.block;
  const int64_t pass = 4 * floats(tokens * query_width) + 4 * floats(tokens * key_width) +
                       floats(tokens * shape.heads) + kernels_->scratch_bytes(shape, tokens, threads);
  const bool copies = options_.selection.pattern != SelectionPattern::dense && data_.size() > 1;
  const int64_t pieces = copies ? 2 * floats(data_.size() * 2 * max_tokens * key_width) : 0;
  const int64_t sums = floats(max_tokens * query_width) + 2 * floats(max_tokens * key_width);
  return sums + pass + std::max(pieces, travel_.backward_scratch_bytes(DType::f32, max_tokens * key_width));
}

int64_t CudaRingAttention::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  const SelectionConfig& selection = options_.selection;
  const int64_t all = max_tokens * data_.size(), blocks = (all + selection.block - 1) / selection.block;
  int64_t list = blocks, query_block = std::min(selection.block, kDenseQueryBlock);
  if (selection.pattern != SelectionPattern::dense) {
    list =
        std::min(blocks, 2 * selection.budget / selection.block + selection.sink_blocks + selection.local_blocks + 2);
    query_block = selection.query_block;
  }
  const int lists = selection.lists_per_query_head() ? shape.heads : shape.kv_heads;
  const int64_t rows = (max_tokens + query_block - 1) / query_block * lists;
  // Lists by rows and by columns; of every pass its rows and the order of its work.
  const int64_t passes = data_.size() + 1;
  return rows * list * 8 + passes * (2 * max_tokens * 8 + 2 * (blocks / data_.size() + 1) * lists * 64 + rows * 64);
}

}  // namespace

std::unique_ptr<ChoosingAttention> make_cuda_ring_attention(Communicator& host, Communicator& data,
                                                            const RingAttention::Options& options) {
  cuda::require_device();
  return std::make_unique<CudaRingAttention>(host, data, options);
}

BlockIndex& cuda_ring_index(AttentionState& state) {
  auto& kept = static_cast<CudaRingState&>(state);
  kept.built = false;  // the caller may change it
  return kept.index;
}

}  // namespace sb
