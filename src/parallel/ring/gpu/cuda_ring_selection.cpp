#include "parallel/ring/gpu/cuda_ring_selection.h"

#include <algorithm>

#include "attention/gpu/cuda_attention.h"
#include "attention/most_sequences.h"
#include "attention/select/block_statistics.h"
#include "device/cuda.h"
#include "parallel/ring/gpu/cuda_ring_memory.h"
#include "parallel/ring/ring_kernels.h"

namespace sb {
namespace {

using gpu::CudaRingPlan;

constexpr int kNoLayer = -1;
constexpr int64_t kMostBlocks = 65536;  // of a sequence that is not dense

}  // namespace

CudaRingSelection::CudaRingSelection(Communicator& data, const RingAttention::Options& options)
    : data_(data),
      options_(options),
      multiprocessors_(cuda::device_info().multiprocessors),
      select_memory_(options.selection, options.layers) {}

gpu::RingPlanRequest CudaRingSelection::request_for(int layer, const AttentionShape& shape,
                                                    std::span<const int32_t> whole_cu_seqlens,
                                                    std::span<const int32_t> budgets, DType dtype) {
  const SelectionConfig& selection = options_.selection;
  if (!hopper_) hopper_ = cuda_attention_takes_hopper({.attention = {selection, options_.layers, 0}}, shape, dtype);
  gpu::RingPlanRequest request;
  request.placement = options_.placement;
  request.ranks = data_.size();
  request.rank = data_.rank();
  request.cu_seqlens = whole_cu_seqlens;
  request.shape = shape;
  request.precision = dtype == DType::f32 ? gpu::Precision::fp32 : gpu::Precision::bf16;
  request.hopper = *hopper_ && dtype == DType::bf16;
  request.selection = &selection;
  request.multiprocessors = multiprocessors_;
  request.batch_masses = kRingBatchMasses;
  request.coverage_rows = options_.coverage_rows;
  for (size_t s = 0; s + 1 < whole_cu_seqlens.size(); ++s) {
    const int64_t tokens = whole_cu_seqlens[s + 1] - whole_cu_seqlens[s];
    request.tiles.push_back(sequence_tiles(selection, tokens, budgets.empty() ? selection.budget : budgets[s]));
    request.dense.push_back(runs_dense(selection, layer, request.tiles.back()));
  }
  return request;
}

// What a plan of any micro-batch of so many tokens per rank may take. It grows with the longest sequence and with the
// number of sequences: no mixture needs more than the largest of both kinds together.
const CudaRingSelection::PlanSize& CudaRingSelection::largest_plan(const AttentionShape& shape, int64_t max_tokens,
                                                                   DType dtype) {
  PlanSize& known = largest_plan_;
  if (known.shape.heads == shape.heads && known.shape.kv_heads == shape.kv_heads &&
      known.shape.head_dim == shape.head_dim && known.max_tokens == max_tokens && known.dtype == dtype)
    return known;
  const int64_t whole = max_tokens * data_.size();
  gpu::Staging staging;
  const auto built = [&](const std::vector<int32_t>& cu_seqlens, bool dense, int64_t budget) {
    const std::vector<int32_t> budgets(cu_seqlens.size() - 1, static_cast<int32_t>(std::min(budget, whole)));
    gpu::RingPlanRequest request = request_for(kNoLayer, shape, cu_seqlens, budgets, dtype);
    for (size_t s = 0; s < request.dense.size(); ++s)
      request.dense[s] = dense || request.tiles[s].tokens <= options_.selection.dense_limit();
    CudaRingPlan plan;
    plan.build(request, staging, nullptr);
    return std::pair(plan.bytes(), plan.uploaded_bytes());
  };
  const auto of_length = [&](int64_t length) {
    std::vector<int32_t> cu_seqlens = {0};
    while (cu_seqlens.back() < whole)
      cu_seqlens.push_back(static_cast<int32_t>(std::min(whole, cu_seqlens.back() + length)));
    return cu_seqlens;
  };
  const int64_t budget = options_.selection.budget;
  auto largest = built(of_length(options_.longest_dense(whole)), true, budget);
  const auto many = built(of_length(64), true, budget);
  if (options_.selection.pattern != SelectionPattern::dense) {
    // Tuned budgets may be lower than the configured one, and what that covers be selected from then.
    const int64_t shortest =
        std::max(options_.selection.dense_limit() + 1, whole / most_packed_sequences(max_tokens) + 1);
    for (const int64_t length : {std::min(whole, kMostBlocks * options_.selection.block), std::min(whole, shortest)})
      for (const int64_t of : {budget, std::min(budget, whole / 4 + 1)}) {
        const auto one = built(of_length(length), false, of);
        largest = {std::max(largest.first, one.first), std::max(largest.second, one.second)};
      }
  }
  known = {shape, max_tokens, dtype, largest.first + many.first, largest.second + many.second};
  return known;
}

// Layers share a plan unless their budgets differ: then a state of every micro-batch in flight has its own.
size_t CudaRingSelection::different_plans(size_t states) const {
  constexpr size_t kInFlight = 8;
  return options_.largest_budget > 0 ? states : std::min(states, kInFlight);
}

void CudaRingSelection::reserve(const AttentionShape& shape, int64_t max_tokens, DType dtype, size_t states) {
  const PlanSize& size = largest_plan(shape, max_tokens, dtype);
  plans_.reserve(different_plans(states), size.device);
  staging_.reserve(size.uploaded);
  select_memory_.reserve(shape);
  if (options_.coverage_rows > 0 && data_.rank() == 0) coverage_.reserve();  // it reports for all
}

int64_t CudaRingSelection::reserved_bytes(const AttentionShape& shape, int64_t max_tokens, DType dtype, size_t states) {
  return static_cast<int64_t>(plans_.for_states(different_plans(states))) *
             largest_plan(shape, max_tokens, dtype).device +
         select_memory_.reserved_bytes(shape);
}

std::shared_ptr<CudaRingPlan> CudaRingSelection::plan_for(const Exec& exec, int layer, const AttentionShape& shape,
                                                          const PackedSequences& sequences, DType dtype) {
  const gpu::RingPlanRequest request = request_for(layer, shape, sequences.whole_cu_seqlens, sequences.budgets, dtype);
  if (std::shared_ptr<CudaRingPlan> known = plans_.find(request)) return known;
  std::shared_ptr<CudaRingPlan> plan = plans_.take();
  plan->build(request, staging_, exec.stream);
  for (const CudaRingPlan::Set& set : plan->sets()) {
    if (!set.dense) continue;
    const ArenaScope scope(*exec.scratch);
    gpu::SelectParams params;
    allocate_select(exec, *plan, set, params);
    gpu::portable_select(params, plan->precision(), exec.stream);
    cut(exec, *plan, set, params, plan->own_lists(set));
  }
  plans_.put(plan);
  return plan;
}

void CudaRingSelection::allocate_select(const Exec& exec, const CudaRingPlan& plan, const CudaRingPlan::Set& set,
                                        gpu::SelectParams& params) {
  plan.set(set, params);
  params.row_entries = exec.scratch->allocate_array<uint32_t>(set.plan.select.entries);
  params.map = exec.scratch->allocate_array<uint8_t>(set.plan.select.map_bytes);
  params.column_counts = exec.scratch->allocate_array<int32_t>(params.column_count);
  params.statistics_given = true;  // or not needed
}

void CudaRingSelection::select(const Exec& exec, int layer, const AttentionShape& shape,
                               const AttentionOperands& operands, const CudaRingPlan& plan,
                               gpu::DeviceBuffer& list_memory, LayerAttention& report) {
  const SelectionConfig& selection = options_.selection;
  const CudaRingPlan::Set* set = plan.sparse();
  const ArenaScope scope(*exec.scratch);
  gpu::SelectParams params;
  if (set != nullptr) {
    const CudaRingPlan::Lists lists = plan.lists_in(*set, list_memory.ensure("block index", set->list_bytes));
    allocate_select(exec, plan, *set, params);
    params.q = operands.q.raw();
    params.k = operands.k.raw();
    params.pattern = selection.pattern;
    params.lookahead = selection.order == SelectionOrder::lookahead;
    params.moments = selection.score == BlockScore::moments;
    params.coverage = static_cast<float>(selection.coverage);
    {
      const ArenaScope scoring(*exec.scratch);
      select_memory_.begin(exec, layer, shape, set->plan.select, params);
      gather_statistics(exec, plan, *set, params);
      params.masses = exec.scratch->allocate_array<uint16_t>(set->plan.select.slices * set->plan.select.masses);
      if (plan.hopper())
        gpu::hopper_select(params, exec.stream);
      else
        gpu::portable_select(params, plan.precision(), exec.stream);
      select_memory_.add_counts(layer, set->plan.select, plan.at<int32_t>(set->mass_classes), params, exec.stream);
    }
    cut(exec, plan, *set, params, lists);
  }
  report.causal_pairs += plan.causal_pairs();
  report.pairs += select_memory_.counts() ? plan.dense_pairs() : plan.pairs();
  select_memory_.observe(exec, layer, shape, operands, plan.samples(), plan.sample_count());
  if (options_.coverage_rows > 0 && select_memory_.ready(layer))
    measure(exec, layer, shape, operands, plan, params.row_entries);
}

// Statistics of all key blocks, from the ranks that have the keys.
void CudaRingSelection::gather_statistics(const Exec& exec, const CudaRingPlan& plan, const CudaRingPlan::Set& set,
                                          gpu::SelectParams& params) const {
  const gpu::SelectPlan& select = set.plan.select;
  const int64_t piece = set.plan.piece, rows = select.statistics_rows;
  if (piece == 0) return;
  const bool hopper = plan.hopper();
  // 32-bit words of a row: the Hopper kernels have row after row, the others channel after channel.
  const int64_t words = select.row_width / (hopper ? 2 : 1);
  auto* pieces = exec.scratch->allocate_array<uint32_t>(data_.size() * piece * words);
  gpu::SelectParams own = params;
  own.statistics = pieces + data_.rank() * piece * words;
  own.statistics_rows = static_cast<int32_t>(piece);
  own.column_count = 0;
  if (hopper)
    gpu::hopper_block_statistics(own, exec.stream);
  else
    gpu::portable_block_statistics(own, plan.precision(), exec.stream);
  data_.all_gather_async(pieces, piece * words * static_cast<int64_t>(sizeof(uint32_t)), CommType::u8).wait();
  // Behind them the Hopper kernels keep scores of long sequences.
  auto* statistics = static_cast<uint32_t*>(exec.scratch->allocate_bytes(
      hopper ? gpu::hopper_statistics_bytes(set.shape, select) : gpu::portable_statistics_bytes(set.shape, select)));
  gpu::PlaceStatistics place;
  place.pieces = pieces;
  place.to = statistics;
  place.places = plan.at<int32_t>(set.statistics);
  place.piece = piece;
  place.ranks = data_.size();
  place.words = static_cast<int32_t>(words);
  place.from_row = place.to_row = hopper ? words : 1;
  place.from_word = hopper ? 1 : piece;
  place.to_word = hopper ? 1 : rows;
  gpu::place_statistics(place, exec.stream);
  params.statistics = statistics;
}

void CudaRingSelection::cut(const Exec& exec, const CudaRingPlan& plan, const CudaRingPlan::Set& set,
                            const gpu::SelectParams& selected, const CudaRingPlan::Lists& lists) {
  gpu::RingCutParams params;
  plan.set(set, params);
  params.selected = selected.row_entries;
  params.map = selected.map;
  params.column_counts = selected.column_counts;
  params.row_entries = lists.row_entries;
  params.pass_begin = lists.pass_begin;
  params.column_offsets = lists.column_offsets;
  params.column_entries = lists.column_entries;
  gpu::cut_ring_lists(params, exec.stream);
}

// Sampled queries go to all ranks; each weighs the key blocks it holds, and judges the tokens whose lists it has.
void CudaRingSelection::measure(const Exec& exec, int layer, const AttentionShape& shape,
                                const AttentionOperands& operands, const CudaRingPlan& plan,
                                const uint32_t* row_entries) {
  if (plan.sampled() == 0) return;
  const SelectionConfig& selection = options_.selection;
  const ArenaScope scope(*exec.scratch);
  gpu::CoverageParams params;
  plan.set(params);
  const int64_t row = int64_t{params.shape.query_heads} * params.shape.head_dim * dtype_bytes(operands.q.dtype());
  void* sampled = exec.scratch->allocate_bytes(plan.sampled() * row);
  gpu::gather_rows(exec, {operands.q.raw(), row, sampled, row, plan.sampled_rows(), plan.sampled(), row});
  // One rank has each, the others zeros: their sums are the bits themselves.
  data_.all_reduce_async(sampled, plan.sampled() * row / 4, CommType::i32, ReduceOp::sum).wait();
  params.q = sampled;
  params.k = operands.k.raw();
  params.moments = selection.score != BlockScore::mean;
  params.block = selection.block;
  select_memory_.set_planes(exec, layer, shape, params);
  params.parts = gpu::judged_parts(selection);
  params.query_block = selection.query_block;
  params.sinks = selection.sink_blocks;
  params.local = selection.local_blocks;
  params.row_entries = row_entries;
  const auto zeros = [&](float* to, int64_t count) {
    cuda::zero(exec.stream, to, count * static_cast<int64_t>(sizeof(float)));
    return to;
  };
  const int64_t scores = 3 * plan.coverage().scores, results = plan.coverage().results;
  params.scores = zeros(exec.scratch->allocate_array<float>(scores), scores);
  params.ranks = exec.scratch->allocate_array<float>(3 * plan.coverage().ranks);
  params.results = zeros(exec.scratch->allocate_array<float>(results), results);
  gpu::measure_blocks(params, plan.precision(), exec.stream);
  data_.all_reduce_async(params.scores, scores, CommType::f32, ReduceOp::sum).wait();
  gpu::measure_tokens(params, plan.precision(), exec.stream);
  data_.all_reduce_async(params.results, results, CommType::f32, ReduceOp::sum).wait();
  if (data_.rank() == 0) coverage_.add(exec, layer, plan.coverage(), params.shape, params.results);
}

void CudaRingSelection::report(AttentionReport& report) {
  select_memory_.take_pairs(report);
  coverage_.take(report);
}

}  // namespace sb
