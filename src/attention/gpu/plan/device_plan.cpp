#include "attention/gpu/plan/device_plan.h"

#include <algorithm>

#include "attention/gpu/plan/given_index.h"
#include "attention/gpu/select/step_values.h"
#include "core/errors.h"
#include "device/cuda.h"

namespace sb::gpu {

void* DeviceBuffer::ensure(const char* name, int64_t bytes) {
  SB_USER_CHECK(!borrowed_ || bytes <= bytes_,
                "{}: {} bytes are needed and {} are there; a sequence's budget is larger than largest_budget says",
                name, bytes, bytes_);
  if (bytes > bytes_) reserve(name, bytes + bytes / 4);
  return memory_.get();
}

void DeviceBuffer::reserve(const char* name, int64_t bytes) {
  if (bytes <= bytes_) return;
  memory_.reset();
  memory_ = cuda::allocate(name, bytes);
  bytes_ = bytes;
}

void DeviceBuffer::borrow(void* memory, int64_t bytes) {
  memory_ = std::shared_ptr<void>(std::shared_ptr<void>(), memory);
  bytes_ = bytes;
  borrowed_ = true;
}

char* Staging::take(int64_t bytes) {
  current_ = (current_ + 1) % slots_.size();
  Slot& slot = slots_[current_];
  if (slot.event == nullptr) slot.event = cuda::make_event(false);
  if (slot.used) cuda::wait(slot.event.get());
  if (bytes > slot.bytes) {
    slot.bytes = bytes + bytes / 4;
    slot.memory = cuda::allocate_host(slot.bytes);
  }
  return static_cast<char*>(slot.memory.get());
}

void Staging::reserve(int64_t bytes) {
  for (size_t i = 0; i < slots_.size(); ++i) take(bytes);
}

void Staging::send(void* stream, void* to, int64_t bytes) {
  Slot& slot = slots_[current_];
  cuda::copy(stream, slot.memory.get(), to, bytes);
  cuda::record(slot.event.get(), stream);
  slot.used = true;
}

bool DevicePlan::matches(const PlanRequest& request) const {
  const Shape &a = shape_, &b = request.shape;
  if (a.tokens != b.tokens || a.query_heads != b.query_heads || a.kv_heads != b.kv_heads || a.head_dim != b.head_dim ||
      a.scale != b.scale || a.first_query != b.first_query || piece_ != request.piece ||
      precision_ != request.precision || hopper_ != request.hopper || dense_ != request.dense ||
      !std::ranges::equal(cu_seqlens_, request.cu_seqlens))
    return false;
  for (size_t s = 0; s < dense_.size(); ++s)
    if (lengths_[s] != request.tiles[s].tokens || (!dense_[s] && budgets_[s] != request.tiles[s].budget)) return false;
  return true;
}

RowLayout DevicePlan::plan_lists(const PlanRequest& request) {
  if (request.index != nullptr) {
    select_ = plan_of(*request.index, shape_.first_query);
    slash_.gathered = gathered_capacities(*request.index);
  } else {
    SelectionConfig config = *request.selection;
    std::vector<SequenceTiles> tiles = request.tiles;
    if (config.pattern == SelectionPattern::vertical_slash) {
      slash_ = make_slash_plan(shape_, cu_seqlens_, dense_, tiles, config);
      config.query_block = slash_query_block(config);
      for (SequenceTiles& one : tiles) one.query_block = config.query_block;
    }
    const ScoreTile score = hopper_ ? hopper_score_tile(shape_, config) : kPortableScoreTile;
    select_ = make_select_plan(shape_, cu_seqlens_, dense_, tiles, config, score, request.batch_masses,
                               /*held=*/nullptr, piece_);
  }
  const int32_t keys = hopper_ ? kBlock : select_.block;
  return {select_.list_heads, select_.query_block, select_.block,  keys,
          select_.rows,       select_.row_offsets, slash_.gathered};
}

void DevicePlan::build(const PlanRequest& request, Staging& staging, void* stream) {
  shape_ = request.shape;
  precision_ = request.precision;
  hopper_ = request.hopper;
  piece_ = request.piece;
  cu_seqlens_.assign(request.cu_seqlens.begin(), request.cu_seqlens.end());
  dense_ = request.dense;
  budgets_.clear();
  lengths_.clear();
  for (const SequenceTiles& tiles : request.tiles) {
    budgets_.push_back(tiles.budget);
    lengths_.push_back(tiles.tokens);
  }
  sparse_ = std::find(dense_.begin(), dense_.end(), false) != dense_.end();
  list_heads_ = request.index != nullptr                    ? request.index->shape().list_heads
                : request.selection->lists_per_query_head() ? shape_.query_heads
                                                            : shape_.kv_heads;
  index_block_ = request.index != nullptr ? request.index->shape().block : request.selection->block;
  index_query_block_ = request.index != nullptr ? request.index->shape().query_block : request.selection->query_block;
  dense_pairs_ = causal_pairs_ = 0;
  for (size_t s = 0; s + 1 < cu_seqlens_.size(); ++s) {
    const int64_t tokens = cu_seqlens_[s + 1] - cu_seqlens_[s];
    const int64_t pairs = list_heads_ * (tokens * shape_.first_query + tokens * (tokens + 1) / 2);
    causal_pairs_ += pairs;
    if (dense_[s]) dense_pairs_ += pairs;
  }

  select_ = {};
  slash_ = {};
  RowLayout rows;
  if (sparse_) rows = plan_lists(request);
  work_ = make_work(shape_, cu_seqlens_, dense_, sparse_ ? &rows : nullptr, request.multiprocessors);
  samples_.clear();
  if (request.selection->judges_by_planes()) samples_ = plane_samples(cu_seqlens_);
  coverage_ = {};
  if (request.coverage_rows > 0)
    coverage_ = make_coverage_plan(shape_, cu_seqlens_, dense_, request.tiles, request.coverage_rows,
                                   sparse_ ? &select_ : nullptr, slash_.gathered);

  Upload upload;
  place(upload);
  place_lists();
  own_lists_ = (upload.bytes() + 255) / 256 * 256;
  memory_.ensure("attention plan", bytes());
  upload.fill(staging.take(upload.bytes()));
  staging.send(stream, memory_.data(), upload.bytes());
  forget_uploaded();

  if (!sparse_) {
    BackwardWorkParams params;
    set(params);
    const Lists own = lists_in(own_lists());
    params.items = own.items;
    params.splits = own.splits;
    params.counts = own.counts;
    make_backward_work(params, stream);
  }
}

void DevicePlan::place(Upload& upload) {
  places_.cu_seqlens = upload.add(cu_seqlens_);
  places_.cu_subtiles = upload.add(work_.cu_subtiles);
  places_.forward = upload.add(work_.forward);
  places_.places = upload.add(work_.places);
  places_.scores = upload.add(select_.scores);
  places_.score_rows = upload.add(select_.score_rows);
  places_.items = upload.add(select_.items);
  places_.blocks = upload.add(select_.blocks);
  places_.groups = upload.add(select_.groups);
  places_.pools = upload.add(select_.pools);
  places_.mass_classes = upload.add(select_.mass_classes);
  places_.samples = upload.add(samples_);
  places_.coverage_sequences = upload.add(coverage_.sequences);
  places_.coverage_tokens = upload.add(coverage_.tokens);
  places_.coverage_lists = upload.add(coverage_.lists);
  places_.coverage_grid = upload.add(coverage_.grid);
  places_.gathered = upload.add(work_.gathered);
  places_.gathered_pieces = upload.add(work_.gathered_pieces);
  places_.slash_sequences = upload.add(slash_.sequences);
  forward_count_ = static_cast<int32_t>(work_.forward.size());
  block_count_ = static_cast<int32_t>(select_.blocks.size());
  group_count_ = static_cast<int32_t>(select_.groups.size());
  pool_count_ = static_cast<int32_t>(select_.pools.size());
  coverage_count_ = static_cast<int32_t>(coverage_.tokens.size());
  sample_count_ = static_cast<int32_t>(samples_.size());
}

void DevicePlan::place_lists() {
  Layout lists;
  lists_.row_entries = lists.add<uint32_t>(select_.entries);
  lists_.column_entries = lists.add<uint32_t>(select_.entries);
  lists_.column_offsets = lists.add<int32_t>(select_.columns + 1);
  lists_.items = lists.add<BackwardItem>(work_.limits.items);
  lists_.splits = lists.add<SplitColumn>(work_.limits.splits);
  lists_.counts = lists.add<WorkCounts>(1);
  lists_.gathered_columns = lists.add<int32_t>(work_.gathered_columns);
  lists_.gathered_bits = lists.add<uint64_t>(work_.gathered_words);
  lists_.bytes = lists.bytes();
}

void DevicePlan::forget_uploaded() {
  coverage_.tokens = {};
  coverage_.lists = {};
  coverage_.grid = {};
  work_.forward = {};
  work_.places = {};
  select_.scores = {};
  select_.score_rows = {};
  select_.items = {};
  select_.blocks = {};
  select_.groups = {};
  select_.pools = {};
  select_.mass_classes = {};
  samples_ = {};
}

int64_t DevicePlan::statistics_bytes() const {
  return hopper_ ? hopper_statistics_bytes(shape_, select_) : portable_statistics_bytes(shape_, select_);
}

int64_t DevicePlan::kept_bytes() const {
  return hopper_ ? hopper_kept_bytes(select_) : portable_statistics_bytes(shape_, select_);
}

int64_t DevicePlan::room_bytes() const {
  return hopper_ ? hopper_room_bytes(shape_, select_) : 0;
}

int64_t DevicePlan::piece_scratch_bytes() const {
  constexpr int64_t kFloat = sizeof(float), kRounding = 64 * 256;  // of every array
  const auto floats = [](size_t count) { return static_cast<int64_t>(count) * kFloat; };
  const int64_t backward = floats(statistics_size(shape_, work_.tiling)) + floats(dq_sum_size(shape_, work_.tiling)) +
                           floats(partials_size(shape_, work_.limits.slots));
  const int64_t selecting = room_bytes() + 2 * select_.slices * select_.masses + select_.map_bytes +
                            4 * int64_t{select_.columns} +
                            8 * plane_sums_partials(sample_count_, shape_.kv_heads, shape_.head_dim);
  const int64_t rows = coverage_.sequences.empty() ? 0 : coverage_.sequences.front().whole_sampled;
  const int64_t measuring =
      rows == 0 ? 0
                : kFloat * most_piece_coverage_floats(rows, shape_.tokens, lengths_.front(), index_block_,
                                                      shape_.query_heads, shape_.kv_heads);
  return std::max(backward, selecting + measuring) + kRounding;
}

DevicePlan::Lists DevicePlan::lists_in(void* memory) const {
  char* base = static_cast<char*>(memory);
  return {reinterpret_cast<uint32_t*>(base + lists_.row_entries),
          reinterpret_cast<uint32_t*>(base + lists_.column_entries),
          reinterpret_cast<int32_t*>(base + lists_.column_offsets),
          reinterpret_cast<BackwardItem*>(base + lists_.items),
          reinterpret_cast<SplitColumn*>(base + lists_.splits),
          reinterpret_cast<WorkCounts*>(base + lists_.counts),
          reinterpret_cast<int32_t*>(base + lists_.gathered_columns),
          reinterpret_cast<uint64_t*>(base + lists_.gathered_bits)};
}

void DevicePlan::set(SelectParams& params) const {
  params.shape = shape_;
  set_plan(select_, params);
  params.scores = at<ScoreItem>(places_.scores);
  params.score_rows = at<ScoreToken>(places_.score_rows);
  params.items = at<SelectItem>(places_.items);
  params.blocks = at<SelectBlock>(places_.blocks);
  params.block_count = block_count_;
  params.groups = at<SelectGroup>(places_.groups);
  params.group_count = group_count_;
  params.pools = at<SelectPool>(places_.pools);
  params.pool_count = pool_count_;
}

void DevicePlan::set(BackwardWorkParams& params) const {
  params.shape = shape_;
  params.tiling = work_.tiling;
  params.places = at<BackwardItem>(places_.places);
  params.head_places = work_.head_places;
  params.columns = work_.columns;
  params.workers = work_.workers;
  params.leaves_out = piece_;
}

void DevicePlan::set(ForwardParams& params) const {
  params.shape = shape_;
  params.tiling = work_.tiling;
  params.items = at<ForwardItem>(places_.forward);
  params.item_count = forward_count_;
}

GatheredColumns DevicePlan::gathered(const Lists& lists) const {
  if (work_.gathered.empty()) return {};
  return {at<GatheredList>(places_.gathered),
          list_heads_,
          at<int32_t>(places_.gathered_pieces),
          static_cast<int32_t>(work_.gathered_pieces.size()),
          lists.gathered_columns,
          lists.gathered_bits,
          static_cast<int32_t>(work_.gathered.size()),
          work_.gathered_places};
}

void DevicePlan::set(SlashParams& params) const {
  set(params.select);
  params.sequences = at<SlashSequence>(places_.slash_sequences);
  params.sequence_count = static_cast<int32_t>(slash_.sequences.size());
  params.head_chunks = slash_.head_chunks;
  params.lists = slash_.lists;
  for (const SlashSequence& sequence : slash_.sequences)
    params.max_blocks = std::max(params.max_blocks, sequence.blocks);
}

void DevicePlan::set(CoverageParams& params) const {
  params.shape = shape_;
  params.sequences = at<CoverageSequence>(places_.coverage_sequences);
  params.sequence_count = static_cast<int32_t>(coverage_.sequences.size());
  params.blocks = coverage_.blocks;
  params.tokens = at<CoverageToken>(places_.coverage_tokens);
  params.token_count = coverage_count_;
  params.lists = at<CoverageList>(places_.coverage_lists);
  params.grid = at<int32_t>(places_.coverage_grid);
  if (!sparse_) return;
  params.list_heads = select_.list_heads;
  params.list_block = select_.block;
  params.list_query_block = select_.query_block;
}

void DevicePlan::set(BackwardParams& params) const {
  params.shape = shape_;
  params.tiling = work_.tiling;
  params.cu_seqlens = at<int32_t>(places_.cu_seqlens);
  params.cu_subtiles = at<int32_t>(places_.cu_subtiles);
  params.sequences = sequences();
  params.limits = work_.limits;
  params.columns = work_.columns;
  params.row_items = at<ForwardItem>(places_.forward);
  params.row_item_count = forward_count_;
  params.adds = piece_;
}

}  // namespace sb::gpu
