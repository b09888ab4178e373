#include "parallel/ring/gpu/cuda_ring_call.h"

#include <limits>

#include "core/errors.h"
#include "device/memory.h"
#include "parallel/ring/ring_kernels.h"

namespace sb {
namespace {

using gpu::CudaRingPlan;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

PackedSequences piece_of(const DevicePass& pass) {
  PackedSequences sequences{pass.cu_seqlens, {}};
  sequences.piece = {*pass.first_query, *pass.first_query + pass.tokens(), pass.pages};
  return sequences;
}

}  // namespace

CudaRingCall::CudaRingCall(const Ring& ring, const Exec& exec, int layer, const AttentionShape& shape,
                           const AttentionOperands& operands, const CudaRingState& state)
    : ring_(ring),
      exec_(exec),
      layer_(layer),
      shape_(shape),
      x_(operands),
      state_(state),
      dtype_(operands.q.dtype()),
      key_width_(int64_t{shape.kv_heads} * shape.head_dim),
      query_width_(int64_t{shape.heads} * shape.head_dim) {
  for (int r = 0; r < state.shared().ranks(); ++r)
    chunk_elements_.push_back(state.shared().local_cu_seqlens(r).back() * key_width_);
}

void CudaRingCall::forward() {
  const ArenaScope scope(*exec_.scratch);
  sum_ = allocate(DType::f32, x_.out.shape());
  zero_tensor(exec_, sum_);
  gpu::fill(exec_, x_.lse.f32(), x_.lse.elements(), kNothing);
  if (piece() > 0) {
    const ArenaScope copies_scope(*exec_.scratch);
    const Keys copies = gathered_copies();
    each_pass(ring_.data.size(), [&](const PassRun& pass) { forward_pass(pass, copies); });
  }
  ring_.travel.forward(exec_, dtype_, {x_.k.raw(), x_.v.raw()}, chunk_elements_, [&](int chunk, const RingData& data) {
    each_pass(chunk, [&](const PassRun& pass) { forward_pass(pass, {data.keys, data.values, key_width_}); });
  });
  gpu::convert_floats(exec_, sum_.f32(), x_.out.raw(), dtype_, x_.out.elements());
}

void CudaRingCall::backward(const AttentionGradients& g) {
  g_ = &g;
  const ArenaScope scope(*exec_.scratch);
  sum_ = allocate(DType::f32, x_.q.shape());
  zero_tensor(exec_, sum_);
  // Those of a piece are sums already.
  const bool piece_sums = state_.first_query.has_value();
  const TensorView dk = piece_sums ? g.dk : allocate(DType::f32, x_.k.shape()),
                   dv = piece_sums ? g.dv : allocate(DType::f32, x_.v.shape());
  if (!piece_sums)
    for (const TensorView& gradient : {dk, dv}) zero_tensor(exec_, gradient);
  if (piece() > 0) {
    const ArenaScope copies_scope(*exec_.scratch);
    const Keys copies = gathered_copies();
    const TensorView pieces = allocate(DType::f32, {pieces_elements()});
    zero_tensor(exec_, pieces);
    each_pass(ring_.data.size(), [&](const PassRun& pass) {
      backward_pass(pass, copies, pieces.f32(), pieces.f32() + key_width_, 2 * key_width_);
    });
    return_copies(pieces, dk, dv);
  }
  ring_.travel.backward(exec_, dtype_, {x_.k.raw(), x_.v.raw()}, chunk_elements_,
                        [&](int chunk, const RingData& data, const RingGradients& sum) {
                          each_pass(chunk, [&](const PassRun& pass) {
                            backward_pass(pass, {data.keys, data.values, key_width_}, sum.keys, sum.values, key_width_);
                          });
                        },
                        {dk.f32(), dv.f32()});
  gpu::convert_floats(exec_, sum_.f32(), g.dq.raw(), g.dq.dtype(), g.dq.elements());
  if (piece_sums) return;
  gpu::convert_floats(exec_, dk.f32(), g.dk.raw(), g.dk.dtype(), g.dk.elements());
  gpu::convert_floats(exec_, dv.f32(), g.dv.raw(), g.dv.dtype(), g.dv.elements());
}

// Calls body with every pass over a chunk, or (one more than chunks) over the copies.
template <typename Body>
void CudaRingCall::each_pass(int chunk, const Body& body) const {
  if (!state_.plan) {
    for (const DevicePass& pass : state_.passes[static_cast<size_t>(chunk)])
      body(PassRun{pass.keys.data(), pass.queries.data(), pass.tokens(), &pass});
    return;
  }
  const CudaRingPlan& plan = *state_.plan;
  for (const CudaRingPlan::Set& set : plan.sets()) {
    const CudaRingPlan::Set::Pass& pass = set.passes[static_cast<size_t>(chunk)];
    if (pass.tokens == 0) continue;
    body(PassRun{plan.at<int32_t>(pass.keys), plan.at<int32_t>(pass.queries), pass.tokens, nullptr, &set, chunk});
  }
}

TensorView CudaRingCall::gather(const void* from, int64_t stride, Shape shape, const int32_t* rows) const {
  const TensorView to = allocate(dtype_, shape);
  const int64_t width = shape.elements() / shape[0];
  gpu::gather_rows(exec_, {from, bytes(stride), to.raw(), bytes(width), rows, shape[0], bytes(width)});
  return to;
}

AttentionOperands CudaRingCall::assemble(const PassRun& pass, const Keys& keys) const {
  const Shape query_shape = {pass.tokens, shape_.heads, shape_.head_dim};
  const Shape key_shape = {pass.tokens, shape_.kv_heads, shape_.head_dim};
  AttentionOperands y;
  y.q = gather(x_.q.raw(), query_width_, query_shape, pass.queries);
  y.k = gather(keys.keys, keys.stride, key_shape, pass.keys);
  y.v = gather(keys.values, keys.stride, key_shape, pass.keys);
  y.lse = allocate(DType::f32, {shape_.heads, pass.tokens});
  return y;
}

// Keys before the queries. Behind them the kernels expect the queries' own, which against keys of others are in no
// list: those rows are named and never touched.
AttentionOperands CudaRingCall::piece_operands(const PassRun& pass, const Keys& keys) const {
  const int64_t before = *pass.given->first_query;
  const Shape seen{before + pass.tokens, shape_.kv_heads, shape_.head_dim};
  const auto where = [&](const void* from) {
    if (const int64_t rows = pass.given->keys.count(); rows > 0)
      from = gather(from, keys.stride, {rows, shape_.kv_heads, shape_.head_dim}, pass.keys).raw();
    return TensorView(const_cast<void*>(from), dtype_, seen, DeviceKind::cuda);
  };
  AttentionOperands y = x_;
  y.k = where(keys.keys);
  y.v = where(keys.values);
  return y;
}

void CudaRingCall::forward_piece(const PassRun& pass, const Keys& keys) const {
  const ArenaScope scope(*exec_.scratch);
  AttentionOperands y = piece_operands(pass, keys);
  y.lse = allocate(DType::f32, x_.lse.shape());
  y.out = allocate(dtype_, x_.out.shape());
  ring_.kernels.forward(exec_, layer_, shape_, piece_of(*pass.given), y, *pass.given->lists, /*replay=*/true);
  gpu::merge_rows(exec_, {y.out.raw(), dtype_, y.lse.f32(), sum_.f32(), x_.lse.f32(), pass.queries, pass.tokens,
                          x_.q.dim(0), shape_.heads, shape_.head_dim});
}

// The kernels add to the sums of the keys where they lie.
void CudaRingCall::backward_piece(const PassRun& pass, const Keys& keys, float* dk, float* dv, int64_t stride) const {
  const ArenaScope scope(*exec_.scratch);
  const AttentionOperands y = piece_operands(pass, keys);
  const int64_t gathered = pass.given->keys.count();
  const auto sums = [&](float* to) {
    if (gathered > 0) {
      const TensorView own = allocate(DType::f32, {gathered, shape_.kv_heads, shape_.head_dim});
      zero_tensor(exec_, own);
      to = own.f32();
    }
    return TensorView(to, DType::f32, y.k.shape(), DeviceKind::cuda);
  };
  const AttentionGradients h{g_->dout, allocate(dtype_, x_.q.shape()), sums(dk), sums(dv)};
  ring_.kernels.backward(exec_, layer_, shape_, piece_of(*pass.given), y, h, *pass.given->lists);
  gpu::add_rows(exec_,
                {h.dq.raw(), dtype_, query_width_, sum_.f32(), query_width_, pass.queries, pass.tokens, query_width_});
  if (gathered == 0) return;
  gpu::add_rows(exec_, {h.dk.raw(), DType::f32, key_width_, dk, stride, pass.keys, gathered, key_width_});
  gpu::add_rows(exec_, {h.dv.raw(), DType::f32, key_width_, dv, stride, pass.keys, gathered, key_width_});
}

void CudaRingCall::forward_pass(const PassRun& pass, const Keys& keys) const {
  if (state_.first_query) return forward_piece(pass, keys);
  const ArenaScope scope(*exec_.scratch);
  AttentionOperands y = assemble(pass, keys);
  y.out = allocate(dtype_, y.q.shape());
  if (pass.given)
    ring_.kernels.forward(exec_, layer_, shape_, {pass.given->cu_seqlens, {}}, y, *pass.given->lists,
                          /*replay=*/true);
  else
    run_forward(pass, y);
  gpu::merge_rows(exec_, {y.out.raw(), dtype_, y.lse.f32(), sum_.f32(), x_.lse.f32(), pass.queries, pass.tokens,
                          x_.q.dim(0), shape_.heads, shape_.head_dim});
}

void CudaRingCall::backward_pass(const PassRun& pass, const Keys& keys, float* dk, float* dv, int64_t stride) const {
  if (state_.first_query) return backward_piece(pass, keys, dk, dv, stride);
  const ArenaScope scope(*exec_.scratch);
  AttentionOperands y = assemble(pass, keys);
  y.out = gather(x_.out.raw(), query_width_, y.q.shape(), pass.queries);
  gpu::gather_lse(exec_, x_.lse.f32(), x_.q.dim(0), y.lse.f32(), pass.queries, pass.tokens, shape_.heads);
  AttentionGradients h;
  h.dout = gather(g_->dout.raw(), query_width_, y.q.shape(), pass.queries);
  h.dq = allocate(dtype_, y.q.shape());
  h.dk = allocate(dtype_, y.k.shape());
  h.dv = allocate(dtype_, y.k.shape());
  if (pass.given)
    ring_.kernels.backward(exec_, layer_, shape_, {pass.given->cu_seqlens, {}}, y, h, *pass.given->lists);
  else
    run_backward(pass, y, h);
  const int64_t tokens = pass.tokens;
  gpu::add_rows(exec_,
                {h.dq.raw(), dtype_, query_width_, sum_.f32(), query_width_, pass.queries, tokens, query_width_});
  gpu::add_rows(exec_, {h.dk.raw(), dtype_, key_width_, dk, stride, pass.keys, tokens, key_width_});
  gpu::add_rows(exec_, {h.dv.raw(), dtype_, key_width_, dv, stride, pass.keys, tokens, key_width_});
}

// The tiles of the pass's queries, with their lists.
const gpu::ForwardItem* CudaRingCall::items_of(const PassRun& run) const {
  const CudaRingPlan::Set::Pass& pass = run.set->passes[static_cast<size_t>(run.number)];
  auto* items = array<gpu::ForwardItem>(pass.item_count);
  gpu::set_ring_items(state_.plan->at<gpu::ForwardItem>(pass.items), pass.item_count,
                      state_.lists_of(*run.set).pass_begin, ring_.data.size() + 1, run.number, items, exec_.stream);
  return items;
}

template <typename Params>
void CudaRingCall::set_common(const PassRun& run, const AttentionOperands& y, Params& params) const {
  params.shape = run.set->shape;
  params.shape.tokens = run.tokens;
  params.tiling = run.set->passes[static_cast<size_t>(run.number)].work.tiling;
  params.q = y.q.raw();
  params.k = y.k.raw();
  params.v = y.v.raw();
  params.o = y.out.raw();
  params.lse = y.lse.f32();
  params.row_entries = state_.lists_of(*run.set).row_entries;
  params.counter = array<int32_t>(4);
}

void CudaRingCall::run_forward(const PassRun& run, const AttentionOperands& y) const {
  const CudaRingPlan& plan = *state_.plan;
  gpu::ForwardParams params;
  set_common(run, y, params);
  params.items = items_of(run);
  params.item_count = run.set->passes[static_cast<size_t>(run.number)].item_count;
  if (plan.hopper())
    gpu::hopper_forward(params, exec_.stream);
  else
    gpu::portable_forward(params, plan.precision(), exec_.stream);
}

void CudaRingCall::run_backward(const PassRun& run, const AttentionOperands& y, const AttentionGradients& h) const {
  const CudaRingPlan& plan = *state_.plan;
  const CudaRingPlan::Set::Pass& pass = run.set->passes[static_cast<size_t>(run.number)];
  const CudaRingPlan::Lists lists = state_.lists_of(*run.set);
  gpu::BackwardParams params;
  set_common(run, y, params);
  params.d_o = h.dout.raw();
  params.dq = h.dq.raw();
  params.dk = h.dk.raw();
  params.dv = h.dv.raw();
  params.cu_seqlens = plan.at<int32_t>(pass.cu_seqlens);
  params.cu_subtiles = plan.at<int32_t>(pass.cu_subtiles);
  params.sequences = pass.sequences;
  params.limits = pass.work.limits;
  params.columns = pass.work.columns;
  params.row_items = items_of(run);
  params.row_item_count = pass.item_count;
  params.column_offsets = lists.column_offsets + pass.first_column;
  params.column_entries = lists.column_entries;

  gpu::BackwardWorkParams work;
  work.shape = params.shape;
  work.tiling = params.tiling;
  work.places = plan.at<gpu::BackwardItem>(pass.places);
  work.head_places = pass.work.head_places;
  work.column_offsets = params.column_offsets;
  work.columns = params.columns;
  work.workers = pass.work.workers;
  work.items = array<gpu::BackwardItem>(params.limits.items);
  work.splits = array<gpu::SplitColumn>(params.limits.splits);
  work.counts = array<gpu::WorkCounts>(1);
  gpu::make_backward_work(work, exec_.stream);
  params.items = work.items;
  params.splits = work.splits;
  params.counts = work.counts;

  const int64_t causal = run.set->dense ? plan.dense_pairs() : plan.causal_pairs() - plan.dense_pairs();
  const bool summed = plan.hopper() && !ring_.deterministic &&
                      !gpu::quicker_in_two_kernels(params.shape, params.tiling,
                                                   {.entries = run.set->plan.select.entries, .causal = causal});
  params.statistics = floats(gpu::statistics_size(params.shape, params.tiling));
  if (summed) params.dq_sum = floats(gpu::dq_sum_size(params.shape, params.tiling));
  params.partials = floats(gpu::partials_size(params.shape, params.limits.slots));
  if (!plan.hopper())
    gpu::portable_backward(params, plan.precision(), exec_.stream);
  else if (summed)
    gpu::hopper_backward(params, exec_.stream);
  else
    gpu::hopper_backward_deterministic(params, exec_.stream);
}

CudaRingCall::Keys CudaRingCall::gathered_copies() const {
  const TensorView pieces = allocate(dtype_, {pieces_elements()});
  zero_tensor(exec_, pieces);
  char* own = static_cast<char*>(pieces.raw()) + bytes(ring_.data.rank() * piece_elements());
  for (const bool values : {false, true})
    gpu::gather_rows(exec_,
                     {values ? x_.v.raw() : x_.k.raw(), bytes(key_width_), own + (values ? bytes(key_width_) : 0),
                      bytes(2 * key_width_), given(), given_count(), bytes(key_width_)});
  ring_.data.all_gather_async(pieces.raw(), bytes(piece_elements()), CommType::u8).wait();
  return {pieces.raw(), static_cast<const char*>(pieces.raw()) + bytes(key_width_), 2 * key_width_};
}

// Gradients of copies go back to the tokens they were taken from.
void CudaRingCall::return_copies(const TensorView& pieces, const TensorView& dk, const TensorView& dv) const {
  ring_.data.reduce_scatter_async(pieces.raw(), piece_elements(), CommType::f32, ReduceOp::sum).wait();
  const float* own = pieces.f32() + ring_.data.rank() * piece_elements();
  for (const bool values : {false, true})
    gpu::add_rows(exec_, {own + (values ? key_width_ : 0), DType::f32, 2 * key_width_, (values ? dv : dk).f32(),
                          key_width_, given(), given_count(), key_width_});
}

}  // namespace sb
