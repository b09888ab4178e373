#include "attention/gpu/plan_requests.h"

#include <algorithm>

#include "attention/most_sequences.h"

namespace sb::gpu {
namespace {

constexpr int kNoLayer = -1;

}  // namespace

bool hopper_takes(const CudaAttentionOptions& options, const AttentionShape& shape, DType dtype, int major) {
  const SelectionConfig& selection = options.attention.selection;
  const bool selects = selection.pattern != SelectionPattern::dense;
  const int query_block =
      selection.pattern == SelectionPattern::vertical_slash ? slash_query_block(selection) : selection.query_block;
  return !options.portable && major == 9 && dtype == DType::bf16 && (shape.head_dim == 64 || shape.head_dim == 128) &&
         (!selects || query_block % 2 == 0 ||
          (selection.block != 64 && selection.pattern != SelectionPattern::vertical_slash));
}

PlanRequest PlanRequests::of(int layer, const AttentionShape& shape, const PackedSequences& sequences,
                             DType dtype) const {
  PlanRequest request;
  request.shape = {sequences.tokens(), shape.heads, shape.kv_heads, shape.head_dim, shape.scale};
  request.precision = dtype == DType::f32 ? Precision::fp32 : Precision::bf16;
  request.hopper = hopper_takes(options_, shape, dtype, device_.major);
  request.cu_seqlens = sequences.cu_seqlens;
  request.selection = &selection();
  request.multiprocessors = device_.multiprocessors;
  request.batch_masses = kBatchMasses;
  request.coverage_rows = options_.attention.coverage_rows;
  request.piece = sequences.is_piece();
  request.shape.first_query = static_cast<int32_t>(sequences.piece.begin);
  for (int s = 0; s < sequences.sequences(); ++s) {
    const int64_t tokens = sequences.cu_seqlens[s + 1] - sequences.cu_seqlens[s];
    request.tiles.push_back(sequence_tiles(selection(), request.piece ? sequences.piece.length : tokens,
                                           sequences.budgets.empty() ? selection().budget : sequences.budgets[s]));
    request.dense.push_back(runs_dense(selection(), layer, request.tiles.back()));
  }
  return request;
}

// What a plan of any micro-batch of so many tokens may take. It grows with the longest sequence and with the number
// of sequences: no mixture needs more than the largest of both kinds together.
const PlanSize& PlanRequests::largest_plan(const AttentionShape& shape, int64_t max_tokens, DType dtype) const {
  PlanSize& known = largest_plan_;
  if (known.shape.heads == shape.heads && known.shape.kv_heads == shape.kv_heads &&
      known.shape.head_dim == shape.head_dim && known.max_tokens == max_tokens && known.dtype == dtype)
    return known;
  Staging staging;
  const auto built = [&](int64_t sequences, bool dense, int64_t budget) {
    std::vector<int32_t> cu_seqlens;
    for (int64_t s = 0; s <= sequences; ++s) cu_seqlens.push_back(static_cast<int32_t>(s * max_tokens / sequences));
    const std::vector<int32_t> budgets(static_cast<size_t>(sequences),
                                       static_cast<int32_t>(std::min(budget, max_tokens)));
    DevicePlan plan;
    PlanRequest request = of(kNoLayer, shape, {cu_seqlens, budgets}, dtype);
    for (int64_t s = 0; s < sequences; ++s)
      request.dense[s] = dense || request.tiles[s].tokens <= selection().dense_limit();
    plan.build(request, staging, nullptr);
    return std::pair(plan.bytes(), plan.uploaded_bytes());
  };
  const int64_t most = std::clamp<int64_t>(max_tokens, 1, most_packed_sequences(max_tokens));
  auto largest = built(1, true, selection().budget);
  const auto many = built(most, true, selection().budget);
  if (selection().pattern != SelectionPattern::dense) {
    // Tuned budgets may be lower than the configured one, and what that covers be selected from then.
    const int64_t lower = std::min(selection().budget, max_tokens / 4 + 1);
    const int64_t selecting = std::clamp<int64_t>(max_tokens / (selection().dense_limit() + 1), 1, most);
    for (const int64_t sequences : {int64_t{1}, selecting})
      for (const int64_t budget : {selection().budget, lower}) {
        const auto one = built(sequences, false, budget);
        largest = {std::max(largest.first, one.first), std::max(largest.second, one.second)};
      }
  }
  known = {shape, max_tokens, dtype, largest.first + many.first, largest.second + many.second};
  return known;
}

// The last piece of the longest sequence needs the most.
const PieceSize& PlanRequests::largest_piece(const AttentionShape& shape, const Attention::PieceLimits& limits) const {
  PieceSize& known = largest_piece_;
  if (known.shape.heads == shape.heads && known.shape.kv_heads == shape.kv_heads &&
      known.shape.head_dim == shape.head_dim && known.max_tokens == limits.max_tokens &&
      known.longest == limits.longest && known.dtype == limits.dtype)
    return known;
  known = {shape, limits.max_tokens, limits.longest, limits.dtype};
  const bool selects = selection().pattern != SelectionPattern::dense;
  const int64_t edge = selects ? std::max(selection().block, selection().query_block) : 1;
  const int64_t tokens = std::min(limits.max_tokens, limits.longest);
  const int64_t begin = (limits.longest - tokens + edge - 1) / edge * edge;
  Staging staging;
  const auto add = [&](bool dense, int64_t budget) {
    const int32_t cu_seqlens[] = {0, static_cast<int32_t>(tokens)};
    const int32_t budgets[] = {static_cast<int32_t>(std::min(budget, begin + tokens))};
    PackedSequences piece{cu_seqlens, budgets};
    piece.piece = {begin, begin + tokens, {}};
    DevicePlan plan;
    PlanRequest request = of(kNoLayer, shape, piece, limits.dtype);
    request.dense[0] = dense;
    plan.build(request, staging, nullptr);
    // Quotas of neighbouring query blocks differ by one.
    const int64_t rounding = dense ? 0 : 2 * 4 * 2 * int64_t{plan.select().rows} * plan.list_heads();
    // Other pieces may have more of the tokens that are measured, up to all of them.
    const int64_t measured = std::min<int64_t>(options_.attention.coverage_rows, limits.longest) *
                             (int64_t{sizeof(CoverageToken)} + plan.list_heads() * int64_t{sizeof(CoverageList)});
    known.device = std::max(known.device, plan.bytes() + measured);
    known.uploaded = std::max(known.uploaded, plan.uploaded_bytes() + measured);
    known.scratch = std::max(known.scratch, plan.piece_scratch_bytes());
    if (dense) return;
    known.lists = std::max(known.lists, plan.list_bytes() + rounding);
    if (selection().scores_blocks()) known.kept = std::max(known.kept, plan.kept_bytes());
  };
  add(true, selection().budget);
  if (!selects) return known;
  for (const int64_t budget : {selection().budget, std::min(selection().budget, limits.longest / 4 + 1),
                               std::max(selection().budget, options_.attention.largest_budget)})
    add(false, budget);
  return known;
}

}  // namespace sb::gpu
