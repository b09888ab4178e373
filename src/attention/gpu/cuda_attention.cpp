#include "attention/gpu/cuda_attention.h"

#include <algorithm>

#include "attention/gpu/attention_memory.h"
#include "attention/gpu/plan/coverage_log.h"
#include "attention/gpu/plan/device_plan.h"
#include "attention/gpu/plan/given_index.h"
#include "attention/gpu/plan/recent_plans.h"
#include "attention/gpu/plan/select_memory.h"
#include "attention/gpu/plan_requests.h"
#include "attention/piece_operands.h"
#include "device/cuda.h"
#include "device/memory.h"

namespace sb {
namespace {

using gpu::DeviceBuffer;
using gpu::DevicePlan;
using gpu::Precision;

class CudaState final : public AttentionState {
 public:
  std::shared_ptr<DevicePlan> plan;
  DeviceBuffer lists;
  const GivenSelection* given = nullptr;
  void* list_memory() const { return plan->sparse() ? lists.data() : plan->own_lists(); }
};

class CudaAttention final : public SelectingAttention {
 public:
  explicit CudaAttention(const CudaAttentionOptions& options)
      : options_(options),
        selection_(options.attention.selection),
        device_(cuda::device_info()),
        requests_(options_, device_),
        select_memory_(selection_, options.attention.layers) {
    if (selection_.pattern != SelectionPattern::dense) check_selection_config(selection_);
    SB_USER_CHECK(device_.major >= 8, "{} is too old: attention on CUDA needs compute capability 8.0 or later",
                  device_.name);
    for (const int64_t layer : selection_.dense_layers) {
      SB_USER_CHECK(layer >= 0 && layer < options.attention.layers,
                    "attention.dense_layers: {}, but the model has layers 0 to {}", layer,
                    options.attention.layers - 1);
    }
    report_.layers.resize(options.attention.layers);
  }

  std::unique_ptr<AttentionState> make_state() const override { return std::make_unique<CudaState>(); }

  void forward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
               const AttentionOperands& given, AttentionState& state, bool replay) override {
    CudaState& kept = static_cast<CudaState&>(state);
    check_operands(given);
    select_memory_.give(kept.given);
    if (!replay) kept.plan = plan_for(exec, layer, shape, sequences, given.q.dtype());
    SB_CHECK(kept.plan != nullptr, "replay without an earlier forward");
    const ArenaScope scope(*exec.scratch);
    const AttentionOperands operands = keys_in_order(exec, sequences, given), own = own_keys(sequences, given);
    const bool selects = !replay && kept.plan->sparse();
    const bool counts = !replay && !sequences.again;
    const bool measures =
        counts && sequences.tokens() > 0 && options_.attention.coverage_rows > 0 && select_memory_.ready(layer);
    const bool observes = counts && kept.plan->sample_count() > 0;
    const bool beside_forward = selects || measures || observes;
    if (beside_forward) {
      gpu::SelectParams selected;
      if (selects) selected = select(exec, layer, shape, own, kept);
      // What the forward does not need is made beside it.
      cuda::record(rows_listed_.get(), exec.stream);
      cuda::wait_on_stream(rows_listed_.get(), beside_.get());
      if (selects) {
        if (counts) count_selected(layer, selected, *kept.plan);
        gpu::list_columns(selected, beside_.get());
        order_work(beside_.get(), *kept.plan, kept.plan->lists_in(kept.list_memory()));
      }
      Exec beside = exec;
      beside.stream = beside_.get();
      if (observes) select_memory_.observe(beside, layer, shape, own, kept.plan->samples(), kept.plan->sample_count());
      if (measures) measure(beside, layer, shape, operands, kept);
      cuda::record(made_beside_.get(), beside_.get());
    }
    if (counts) report_.layers[layer].causal_pairs += kept.plan->causal_pairs();
    if (counts && !selects) report_.layers[layer].pairs += kept.plan->causal_pairs();
    if (sequences.tokens() > 0) attend(exec, operands, kept);
    if (beside_forward) cuda::wait_on_stream(made_beside_.get(), exec.stream);
  }

  void backward(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                const AttentionOperands& given, const AttentionGradients& gradients, AttentionState& state) override {
    CudaState& kept = static_cast<CudaState&>(state);
    check_operands(given);
    if (kept.plan == nullptr && kept.lists.borrowed())
      kept.plan = plan_for(exec, layer, shape, sequences, given.q.dtype());
    SB_CHECK(kept.plan != nullptr && kept.plan->cu_seqlens().back() == sequences.tokens(),
             "backward of {} tokens without their forward", sequences.tokens());
    if (sequences.tokens() == 0) return;
    SB_CHECK(gradients.dk.dtype() == (sequences.is_piece() ? DType::f32 : given.k.dtype()), "gradients of keys in {}",
             dtype_name(gradients.dk.dtype()));
    const ArenaScope scope(*exec.scratch);
    const AttentionOperands operands = keys_in_order(exec, sequences, given);
    gpu::BackwardParams params;
    kept.plan->set(params);
    set_operands(params, operands);
    params.d_o = gradients.dout.raw();
    params.dq = gradients.dq.raw();
    params.dk = gradients.dk.raw();
    params.dv = gradients.dv.raw();
    const DevicePlan::Lists lists = kept.plan->lists_in(kept.list_memory());
    params.items = lists.items;
    params.splits = lists.splits;
    params.counts = lists.counts;
    params.column_offsets = lists.column_offsets;
    params.column_entries = lists.column_entries;
    params.row_entries = lists.row_entries;
    params.gathered = kept.plan->gathered(lists);
    const bool summed = kept.plan->hopper() && !options_.deterministic &&
                        !gpu::quicker_in_two_kernels(params.shape, params.tiling, kept.plan->backward_pairs());
    params.statistics = floats(exec, gpu::statistics_size(params.shape, params.tiling));
    if (summed) params.dq_sum = floats(exec, gpu::dq_sum_size(params.shape, params.tiling));
    params.partials = floats(exec, gpu::partials_size(params.shape, params.limits.slots));
    if (kept.plan->hopper() && params.gathered.piece_count > 0) {
      params.gathered_rows = gathered_rows(exec, params);
      params.gathered_parts = gpu::gathered_parts(params.gathered.piece_count, device_.multiprocessors);
      params.gathered_places = exec.scratch->allocate_array<gpu::GatheredPlace>(params.gathered.place_count);
    }
    params.gathered_sums =
        floats(exec, gpu::gathered_sums_size(params.shape, params.gathered.piece_count, params.gathered_parts));
    params.counter = exec.scratch->allocate_array<int32_t>(4);
    if (!kept.plan->hopper())
      gpu::portable_backward(params, kept.plan->precision(), exec.stream);
    else if (summed)
      gpu::hopper_backward(params, exec.stream);
    else
      gpu::hopper_backward_deterministic(params, exec.stream);
  }

  // Puts lists that come from elsewhere into a state, for a forward with `replay`.
  void give(const BlockIndex& index, const Exec& exec, const AttentionShape& shape, DType dtype, CudaState& state,
            std::optional<int32_t> first_query) {
    const int32_t before = first_query.value_or(0);
    std::vector<int32_t> cu_seqlens{0};
    gpu::PlanRequest request;
    for (const BlockIndex::Sequence& sequence : index.sequences()) {
      cu_seqlens.push_back(sequence.token_begin + sequence.length - before);
      request.dense.push_back(sequence.dense);
      request.tiles.push_back(sequence_tiles(selection_, sequence.length, selection_.budget));
    }
    request.shape = {cu_seqlens.back(), shape.heads, shape.kv_heads, shape.head_dim, shape.scale, before};
    request.piece = first_query.has_value();
    request.precision = dtype == DType::f32 ? Precision::fp32 : Precision::bf16;
    request.hopper =
        gpu::hopper_takes(options_, shape, dtype, device_.major) &&
        (index.shape().query_block % 2 == 0 || (index.shape().block != 64 && !index.has_gathered_columns()));
    request.cu_seqlens = cu_seqlens;
    request.selection = &selection_;
    request.multiprocessors = device_.multiprocessors;
    request.index = &index;
    if (state.plan.use_count() != 1) state.plan = std::make_shared<DevicePlan>();  // else its memory serves again
    state.plan->build(request, staging_, exec.stream);
    if (!state.plan->sparse()) return;
    const gpu::HostLists host = gpu::lists_of(index, state.plan->select(), state.plan->work(), before);
    const int64_t bytes = state.plan->list_bytes();
    const DevicePlan::Lists staged = state.plan->lists_in(staging_.take(bytes));
    const auto write = [](const auto& from, auto* to) { std::ranges::copy(from, to); };
    write(host.row_entries, staged.row_entries);
    write(host.column_entries, staged.column_entries);
    write(host.column_offsets, staged.column_offsets);
    write(host.gathered_columns, staged.gathered_columns);
    write(host.gathered_bits, staged.gathered_bits);
    void* memory = state.lists.ensure("block index", bytes);
    staging_.send(exec.stream, memory, bytes);
    order_work(exec.stream, *state.plan, state.plan->lists_in(memory));
  }

  int64_t scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int) const override {
    return memory().scratch_bytes(shape, max_tokens);
  }
  int64_t state_bytes(const AttentionShape& shape, int64_t max_tokens) const override {
    return memory().state_bytes(shape, max_tokens);
  }

  void reserve(const AttentionShape& shape, int64_t max_tokens, DType dtype,
               std::span<const std::unique_ptr<AttentionState>> states) override {
    const int64_t lists = state_bytes(shape, max_tokens);
    for (const auto& state : states) static_cast<CudaState&>(*state).lists.reserve("block index", lists);
    const gpu::PlanSize size = requests_.largest_plan(shape, max_tokens, dtype);
    plans_.reserve(different_plans(states.size()), size.device);
    staging_.reserve(size.uploaded);
    select_memory_.reserve(shape);
    if (options_.attention.coverage_rows > 0) coverage_.reserve();
  }
  int64_t reserved_bytes(const AttentionShape& shape, int64_t max_tokens, DType dtype, int64_t states) const override {
    return static_cast<int64_t>(plans_.for_states(different_plans(static_cast<size_t>(states)))) *
               requests_.largest_plan(shape, max_tokens, dtype).device +
           select_memory_.reserved_bytes(shape);
  }

  std::string refuses_pieces() const override { return why_not_in_pieces(selection_); }
  PieceBytes piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int) const override {
    const gpu::PieceSize& size = requests_.largest_piece(shape, limits);
    PieceBytes bytes;
    bytes.scratch = size.scratch;
    if (!limits.in_order)
      bytes.scratch += 2 * Arena::rounded(limits.longest * shape.kv_heads * shape.head_dim * dtype_bytes(limits.dtype));
    bytes.state = size.lists;
    bytes.layer = size.kept;
    const size_t whole = different_plans(static_cast<size_t>(limits.states));
    const int64_t smaller = requests_.largest_plan(shape, limits.max_tokens, limits.dtype).device;
    bytes.reserved =
        static_cast<int64_t>(plans_.for_states(whole + different_pieces(limits))) * std::max(smaller, size.device) -
        static_cast<int64_t>(plans_.for_states(whole)) * smaller;
    return bytes;
  }
  void reserve_pieces(const AttentionShape& shape, const PieceLimits& limits,
                      std::span<const std::unique_ptr<AttentionState>> states) override {
    const gpu::PieceSize size = requests_.largest_piece(shape, limits);
    for (const auto& state : states) static_cast<CudaState&>(*state).lists.reserve("block index", size.lists);
    plans_.reserve(different_pieces(limits), size.device);
    staging_.reserve(size.uploaded);
    statistics_.resize(static_cast<size_t>(options_.attention.layers));
    for (int layer = limits.first_layer; layer < limits.last_layer; ++layer)
      statistics_[static_cast<size_t>(layer)].reserve("statistics of pieces", size.kept);
  }

  AttentionReport take_report() override {
    select_memory_.take_pairs(report_);
    coverage_.take(report_);
    AttentionReport taken = std::move(report_);
    report_ = {};
    report_.layers.resize(options_.attention.layers);
    return taken;
  }

  void use(const LearnedSelection& learned) override { select_memory_.use(learned); }
  SelectionObservations take_observations() override { return select_memory_.take_observations(); }

 private:
  // Layers share a plan unless their budgets differ: then a state of every micro-batch in flight has its own.
  size_t different_plans(size_t states) const {
    constexpr size_t kShared = 56;
    return options_.attention.largest_budget > 0 ? states : std::min(states, kShared);
  }
  // Every piece in flight has one for layers that are dense and one for the others.
  size_t different_pieces(const PieceLimits& limits) const {
    const auto states = static_cast<size_t>(limits.states);
    return options_.attention.largest_budget > 0
               ? states
               : std::min(states, 2 * states / static_cast<size_t>(limits.last_layer - limits.first_layer));
  }
  gpu::AttentionMemory memory() const { return {options_.attention, device_.multiprocessors, gpu::kBatchMasses}; }

  static float* floats(const Exec& exec, size_t count) {
    return exec.scratch->allocate_array<float>(static_cast<int64_t>(count));
  }

  // Room for K and V at the gathered columns, in bf16.
  template <typename Params>
  static gpu::GatheredRows gathered_rows(const Exec& exec, const Params& params) {
    const int64_t count = int64_t{params.gathered.piece_count} * gpu::kGatheredPiece * params.shape.head_dim;
    return {exec.scratch->allocate_array<uint16_t>(count), exec.scratch->allocate_array<uint16_t>(count)};
  }

  static void check_operands(const AttentionOperands& operands) {
    for (const TensorView* view : {&operands.q, &operands.k, &operands.v, &operands.out})
      SB_CHECK(view->device() == DeviceKind::cuda && view->dtype() == operands.q.dtype(),
               "attention on CUDA takes tensors of one type on the device");
    SB_CHECK(operands.q.dtype() == DType::bf16 || operands.q.dtype() == DType::f32, "attention in {}",
             dtype_name(operands.q.dtype()));
  }

  template <typename Params>
  static void set_operands(Params& params, const AttentionOperands& operands) {
    params.q = operands.q.raw();
    params.k = operands.k.raw();
    params.v = operands.v.raw();
    params.o = operands.out.raw();
    params.lse = operands.lse.f32();
  }

  void attend(const Exec& exec, const AttentionOperands& operands, const CudaState& state) {
    gpu::ForwardParams params;
    state.plan->set(params);
    set_operands(params, operands);
    const DevicePlan::Lists lists = state.plan->lists_in(state.list_memory());
    params.row_entries = lists.row_entries;
    params.gathered = state.plan->gathered(lists);
    params.counter = exec.scratch->allocate_array<int32_t>(4);
    if (state.plan->hopper()) params.gathered_rows = gathered_rows(exec, params);
    if (state.plan->hopper())
      gpu::hopper_forward(params, exec.stream);
    else
      gpu::portable_forward(params, state.plan->precision(), exec.stream);
  }

  void measure(const Exec& exec, int layer, const AttentionShape& shape, const AttentionOperands& operands,
               const CudaState& state) {
    const DevicePlan& plan = *state.plan;
    gpu::CoverageParams params;
    plan.set(params);
    params.q = operands.q.raw();
    params.k = operands.k.raw();
    params.moments = selection_.score != BlockScore::mean;
    params.block = selection_.block;
    select_memory_.set_planes(exec, layer, shape, params);
    params.parts = gpu::judged_parts(selection_);
    params.query_block = selection_.query_block;
    params.sinks = selection_.sink_blocks;
    params.local = selection_.local_blocks;
    const DevicePlan::Lists lists = plan.lists_in(state.list_memory());
    params.row_entries = lists.row_entries;
    params.gathered = plan.gathered(lists);
    params.scores = floats(exec, 3 * plan.coverage().scores);
    params.ranks = floats(exec, 3 * plan.coverage().ranks);
    params.results = floats(exec, plan.coverage().results);
    gpu::measure_coverage(params, plan.precision(), exec.stream);
    coverage_.add(exec, layer, plan.coverage(), plan.shape(), params.results);
  }

  std::shared_ptr<DevicePlan> plan_for(const Exec& exec, int layer, const AttentionShape& shape,
                                       const PackedSequences& sequences, DType dtype) {
    const gpu::PlanRequest request = requests_.of(layer, shape, sequences, dtype);
    if (std::shared_ptr<DevicePlan> known = plans_.find(request)) return known;
    std::shared_ptr<DevicePlan> plan = plans_.take();
    plan->build(request, staging_, exec.stream);
    plans_.put(plan);
    return plan;
  }

  // Statistics of a piece's blocks come beside those of the pieces before it.
  void append_statistics(const Exec& exec, int layer, const DevicePlan& plan, gpu::SelectParams& params) {
    params.statistics_given = true;  // or not needed
    if (!selection_.scores_blocks()) return;
    statistics_.resize(static_cast<size_t>(options_.attention.layers));
    params.statistics = statistics_[static_cast<size_t>(layer)].ensure("statistics of pieces", plan.kept_bytes());
    params.room = exec.scratch->allocate_bytes(plan.room_bytes());
    if (plan.hopper())
      gpu::hopper_block_statistics(params, exec.stream);
    else
      gpu::portable_block_statistics(params, plan.precision(), exec.stream);
  }

  // Row lists; what the column lists are made from.
  gpu::SelectParams select(const Exec& exec, int layer, const AttentionShape& shape, const AttentionOperands& operands,
                           CudaState& state) {
    const DevicePlan& plan = *state.plan;
    const DevicePlan::Lists lists = plan.lists_in(state.lists.ensure("block index", plan.list_bytes()));
    gpu::SelectParams params;
    plan.set(params);
    params.q = operands.q.raw();
    params.k = operands.k.raw();
    params.pattern = selection_.pattern;
    params.lookahead = selection_.order == SelectionOrder::lookahead;
    params.moments = selection_.score == BlockScore::moments;
    params.coverage = static_cast<float>(selection_.coverage);
    params.row_entries = lists.row_entries;
    params.column_offsets = lists.column_offsets;
    params.column_entries = lists.column_entries;
    if (!plan.piece()) params.statistics = exec.scratch->allocate_bytes(plan.statistics_bytes());
    params.masses = exec.scratch->allocate_array<uint16_t>(plan.select().slices * plan.select().masses);
    params.map = exec.scratch->allocate_array<uint8_t>(plan.select().map_bytes);
    params.column_counts = exec.scratch->allocate_array<int32_t>(params.column_count);
    if (params.most_mass()) {
      params.sums = exec.scratch->allocate_array<uint16_t>(plan.select().sums);
      params.pool_counts = exec.scratch->allocate_array<int32_t>(plan.pool_counts());
    }
    select_memory_.begin(exec, layer, shape, plan.select(), params);
    if (plan.piece()) append_statistics(exec, layer, plan, params);
    if (selection_.pattern == SelectionPattern::vertical_slash)
      select_vertical_slash(exec, plan, params, lists);
    else if (plan.hopper())
      gpu::hopper_select(params, exec.stream);
    else
      gpu::portable_select(params, plan.precision(), exec.stream);
    return params;
  }

  // What was selected, for the report and what is learned of it: beside the forward.
  void count_selected(int layer, const gpu::SelectParams& selected, const DevicePlan& plan) {
    select_memory_.add_counts(layer, plan.select(), plan.mass_classes(), selected, beside_.get());
    if (!select_memory_.counts()) {
      report_.layers[layer].pairs += plan.select().token_pairs;
      return;
    }
    // Dense sequences beside those that are counted; none beside a piece.
    for (int s = 0; s < plan.sequences(); ++s) {
      const int64_t n = plan.cu_seqlens()[s + 1] - plan.cu_seqlens()[s];
      if (plan.dense()[s]) report_.layers[layer].pairs += plan.list_heads() * (n * (n + 1) / 2);
    }
  }

  static void order_work(void* stream, const DevicePlan& plan, const DevicePlan::Lists& lists) {
    gpu::BackwardWorkParams work;
    plan.set(work);
    work.column_offsets = lists.column_offsets;
    work.items = lists.items;
    work.splits = lists.splits;
    work.counts = lists.counts;
    gpu::make_backward_work(work, stream);
  }

  void select_vertical_slash(const Exec& exec, const DevicePlan& plan, const gpu::SelectParams& select,
                             const DevicePlan::Lists& lists) {
    gpu::SlashParams params;
    plan.set(params);
    params.select = select;
    params.vertical_coverage = static_cast<float>(selection_.vertical_coverage);
    params.slash_coverage = static_cast<float>(selection_.slash_coverage);
    params.gathered = plan.gathered(lists);
    params.columns = lists.gathered_columns;
    params.bits = lists.gathered_bits;
    const gpu::SlashPlan& slash = plan.slash();
    params.chunk_values = floats(exec, slash.chunks * gpu::kSlashChunkFloats);
    params.row_sums = floats(exec, int64_t{slash.lists} * gpu::kSlashChunk);
    params.distances = floats(exec, slash.blocks);
    params.slashes = exec.scratch->allocate_array<uint8_t>(slash.blocks);
    gpu::select_vertical_slash(params, plan.precision(), exec.stream);
  }

  CudaAttentionOptions options_;
  SelectionConfig selection_;
  cuda::DeviceInfo device_;
  gpu::PlanRequests requests_;
  gpu::Staging staging_;
  gpu::RecentPlans<DevicePlan> plans_;
  std::vector<DeviceBuffer> statistics_;  // of every layer: of the key blocks of the sequence that comes in pieces
  gpu::SelectMemory select_memory_;
  gpu::CoverageLog coverage_;
  std::shared_ptr<void> beside_ = cuda::make_stream();
  std::shared_ptr<void> rows_listed_ = cuda::make_event(false), made_beside_ = cuda::make_event(false);
  AttentionReport report_;
};

}  // namespace

std::unique_ptr<SelectingAttention> make_cuda_attention(const CudaAttentionOptions& options) {
  cuda::require_device();
  return std::make_unique<CudaAttention>(options);
}

std::unique_ptr<AttentionState> make_cuda_state(void* lists, int64_t bytes, const GivenSelection* given) {
  auto state = std::make_unique<CudaState>();
  state->lists.borrow(lists, bytes);
  state->given = given;
  return state;
}

bool cuda_attention_takes_hopper(const CudaAttentionOptions& options, const AttentionShape& shape, DType dtype) {
  return gpu::hopper_takes(options, shape, dtype, cuda::device_info().major);
}

const char* cuda_attention_kernels(const CudaAttentionOptions& options, const AttentionShape& shape, DType dtype) {
  return cuda_attention_takes_hopper(options, shape, dtype) ? "Hopper" : "portable";
}

BlockIndex read_block_index(const AttentionState& state, ThreadPool& pool) {
  const CudaState& kept = static_cast<const CudaState&>(state);
  SB_CHECK(kept.plan != nullptr, "a state without a forward has no lists");
  const DevicePlan& plan = *kept.plan;
  const gpu::SelectPlan& select = plan.select();
  gpu::IndexOf what{{}, plan.cu_seqlens(), plan.dense(), plan.shape().first_query};
  if (plan.piece()) what.cu_seqlens.back() += what.first_query;
  what.shape.block = plan.index_block();
  what.shape.query_block = plan.index_query_block();
  what.shape.list_heads = plan.list_heads();
  gpu::HostLists host;
  const auto read = [](const auto* from, auto& to, int64_t count) {
    to.resize(count);
    if (count > 0) cuda::copy_and_wait(from, to.data(), count * static_cast<int64_t>(sizeof(to[0])));
  };
  if (plan.sparse()) {
    const DevicePlan::Lists lists = plan.lists_in(kept.list_memory());
    read(lists.row_entries, host.row_entries, select.entries);
    read(lists.gathered_columns, host.gathered_columns, plan.work().gathered_columns);
    read(lists.gathered_bits, host.gathered_bits, plan.work().gathered_words);
  }
  return gpu::index_of(what, select, plan.work(), host, pool);
}

void write_block_index(const BlockIndex& index, SelectingAttention& attention, const Exec& exec,
                       const AttentionShape& shape, DType dtype, AttentionState& state,
                       std::optional<int32_t> first_query) {
  static_cast<CudaAttention&>(attention).give(index, exec, shape, dtype, static_cast<CudaState&>(state), first_query);
}

}  // namespace sb
