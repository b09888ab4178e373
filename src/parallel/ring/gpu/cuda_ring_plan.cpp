#include "parallel/ring/gpu/cuda_ring_plan.h"

#include <algorithm>

#include "attention/select/block_statistics.h"
#include "core/errors.h"
#include "device/cuda.h"

namespace sb::gpu {

bool CudaRingPlan::matches(const RingPlanRequest& request) const {
  const AttentionShape &a = attention_, &b = request.shape;
  if (!layout_ || a.heads != b.heads || a.kv_heads != b.kv_heads || a.head_dim != b.head_dim || a.scale != b.scale ||
      precision_ != request.precision || hopper_ != request.hopper || dense_ != request.dense ||
      !std::ranges::equal(layout_->cu_seqlens(), request.cu_seqlens))
    return false;
  for (size_t s = 0; s < dense_.size(); ++s)
    if (!dense_[s] && budgets_[s] != request.tiles[s].budget) return false;
  return true;
}

void CudaRingPlan::plan_set(const RingPlanRequest& request, bool dense, const ReplicatedKeys& replicated) {
  RingListRequest lists;
  lists.layout = layout_.get();
  lists.rank = rank_;
  lists.replicated = &replicated;
  lists.shape = {layout_->local_cu_seqlens(rank_).back(), attention_.heads, attention_.kv_heads, attention_.head_dim,
                 attention_.scale};
  lists.config = *request.selection;
  lists.multiprocessors = request.multiprocessors;
  lists.batch_masses = request.batch_masses;
  lists.tiles = request.tiles;
  lists.copies = !dense;
  lists.scored = !dense && request.selection->scores_blocks();
  if (hopper_)
    lists.score = hopper_score_tile(lists.shape, *request.selection);
  else
    lists.keys = std::min(request.selection->block, kBlock);
  if (dense) {
    // Everything, as a budget that is never too small.
    lists.config.pattern = SelectionPattern::topk;
    lists.config.order = SelectionOrder::causal;
    lists.config.query_block = std::min(lists.config.block, kDenseQueryBlock);
    for (SequenceTiles& tiles : lists.tiles) {
      tiles.query_block = lists.config.query_block;
      tiles.budget = (tiles.blocks() + tiles.sink_blocks + tiles.local_blocks + 4) * tiles.block;
    }
  } else {
    lists.replicated_blocks = request.selection->sink_blocks;
  }
  bool any = false;
  for (int s = 0; s < layout_->sequences(); ++s) {
    lists.left_out.push_back(request.dense[s] != dense || layout_->length(s) == 0);
    any = any || !lists.left_out.back();
  }
  if (!any) return;
  Set& set = sets_.emplace_back();
  set.dense = dense;
  set.shape = lists.shape;
  set.plan = make_ring_lists(lists);
  set.row_count = static_cast<int32_t>(set.plan.rows.size());
  set.group_count = static_cast<int32_t>(set.plan.groups.size());
  set.block_count = static_cast<int32_t>(set.plan.select.blocks.size());
  set.columns = static_cast<int32_t>(set.plan.column_sources.size());
  Layout memory;
  set.list_row_entries = memory.add<uint32_t>(set.plan.select.entries);
  set.list_pass_begin = memory.add<int32_t>(int64_t{set.row_count} * (layout_->ranks() + 2));
  set.list_column_entries = memory.add<uint32_t>(set.plan.select.entries);
  set.list_column_offsets = memory.add<int32_t>(int64_t{set.columns} + 1);
  set.list_bytes = memory.bytes();
}

void CudaRingPlan::plan_coverage(const RingPlanRequest& request) {
  coverage_ = {};
  coverage_held_.clear();
  coverage_own_.clear();
  coverage_sampled_.clear();
  if (request.coverage_rows == 0) return;
  const Shape shape{layout_->cu_seqlens().back(), attention_.heads, attention_.kv_heads, attention_.head_dim,
                    attention_.scale};
  coverage_ = make_coverage_plan(shape, layout_->cu_seqlens(), request.dense, request.tiles, request.coverage_rows,
                                 nullptr, {});
  const Set* with_lists = sparse();
  const std::vector<int32_t> local = layout_->local_cu_seqlens(rank_);
  const int block = layout_->block();
  for (int s = 0; s < layout_->sequences(); ++s)
    for (const int32_t b : layout_->held(rank_, s))
      coverage_held_.push_back({s, b, static_cast<int32_t>(local[s] + layout_->place(s, b) * block)});
  int32_t first_row = 0;
  std::vector<int32_t> first_rows;
  for (int s = 0; s < layout_->sequences() && with_lists; ++s) {
    first_rows.push_back(first_row);
    const int query_block = with_lists->plan.select.query_block;
    first_row += (local[s + 1] - local[s] + query_block - 1) / query_block;
  }
  for (size_t i = 0; i < coverage_.tokens.size(); ++i) {
    const CoverageToken& token = coverage_.tokens[i];
    const int s = token.sequence;
    const bool own = layout_->owner(s, token.position / block) == rank_;
    const int32_t place = own ? layout_->place(s, token.position / block) * block + token.position % block : 0;
    coverage_sampled_.push_back(own ? local[s] + place : -1);
    if (own) coverage_own_.push_back(static_cast<int32_t>(i));
    if (with_lists == nullptr) continue;
    const SelectPlan& select = with_lists->plan.select;
    for (int32_t head = 0; head < select.list_heads; ++head) {
      CoverageList list;
      if (own && !request.dense[s]) {
        const RingRow& row =
            with_lists->plan.rows[int64_t{head} * select.rows + first_rows[s] + place / select.query_block];
        list = {row.list_begin, row.capacity};
      }
      coverage_.lists.push_back(list);
    }
  }
}

void CudaRingPlan::build(const RingPlanRequest& request, Staging& staging, void* stream) {
  layout_ =
      std::make_unique<ContextLayout>(request.placement, request.ranks, request.selection->block, request.cu_seqlens);
  rank_ = request.rank;
  attention_ = request.shape;
  precision_ = request.precision;
  hopper_ = request.hopper;
  dense_ = request.dense;
  budgets_.clear();
  for (const SequenceTiles& tiles : request.tiles) budgets_.push_back(tiles.budget);
  // Only dense flags matter for what has copies, since nothing gathers columns.
  BlockIndex index;
  BlockIndexBuilder builder;
  builder.begin(index, {request.selection->block, request.selection->query_block, attention_.kv_heads},
                layout_->cu_seqlens(), std::vector<uint8_t>(dense_.begin(), dense_.end()), 1);
  const ReplicatedKeys replicated = replicated_keys(*layout_, index, request.selection->sink_blocks, {});
  sets_.clear();
  plan_set(request, false, replicated);
  plan_set(request, true, replicated);
  plan_coverage(request);

  count_pairs();

  // Blocks are multiples of the sampling, so what is sampled of a sequence here is what one rank alone would sample.
  std::vector<int32_t> samples;
  if (request.selection->judges_by_planes()) samples = plane_samples(layout_->local_cu_seqlens(rank_));
  sample_count_ = static_cast<int32_t>(samples.size());
  const std::vector<int32_t>& given = replicated.given[rank_];
  given_count_ = std::ssize(given);
  piece_ = replicated.piece;
  Upload upload;
  given_ = upload.add(given);
  samples_ = upload.add(samples);
  add_coverage(upload);
  for (Set& set : sets_) add_set(upload, set);
  bytes_ = uploaded_ = upload.bytes();
  for (Set& set : sets_)
    if (set.dense) {
      set.own_lists = (bytes_ + 255) / 256 * 256;
      bytes_ = set.own_lists + set.list_bytes;
    }
  memory_.ensure("ring plan", bytes_);
  upload.fill(staging.take(uploaded_));
  staging.send(stream, memory_.data(), uploaded_);
  forget_uploaded();
}

void CudaRingPlan::count_pairs() {
  dense_pairs_ = causal_pairs_ = 0;
  for (int s = 0; s < layout_->sequences(); ++s)
    for (const int32_t b : layout_->held(rank_, s)) {
      const int64_t begin = int64_t{b} * layout_->block(), end = begin + layout_->block_length(s, b);
      const int64_t pairs = attention_.kv_heads * (end * (end + 1) - begin * (begin + 1)) / 2;
      causal_pairs_ += pairs;
      if (dense_[s]) dense_pairs_ += pairs;
    }
  pairs_ = dense_pairs_ + (sparse() ? sparse()->plan.select.token_pairs : 0);
}

void CudaRingPlan::add_coverage(Upload& upload) {
  coverage_sequences_ = upload.add(coverage_.sequences);
  coverage_tokens_ = upload.add(coverage_.tokens);
  coverage_lists_ = upload.add(coverage_.lists);
  coverage_grid_ = upload.add(coverage_.grid);
  coverage_blocks_ = upload.add(coverage_held_);
  coverage_own_tokens_ = upload.add(coverage_own_);
  coverage_rows_ = upload.add(coverage_sampled_);
  sampled_ = static_cast<int32_t>(coverage_.tokens.size());
  held_count_ = static_cast<int32_t>(coverage_held_.size());
  own_count_ = static_cast<int32_t>(coverage_own_.size());
}

void CudaRingPlan::add_set(Upload& upload, Set& set) {
  const RingListPlan& plan = set.plan;
  set.rows = upload.add(plan.rows);
  set.blocks = upload.add(plan.blocks);
  set.groups = upload.add(plan.groups);
  set.sources = upload.add(plan.column_sources);
  set.head_columns = upload.add(plan.head_columns);
  set.statistics = upload.add(plan.statistics);
  set.scores = upload.add(plan.select.scores);
  set.score_rows = upload.add(plan.select.score_rows);
  set.items = upload.add(plan.select.items);
  set.mass_classes = upload.add(plan.select.mass_classes);
  set.select_blocks = upload.add(plan.select.blocks);
  for (const RingPassPlan& from : plan.passes) {
    Set::Pass& pass = set.passes.emplace_back();
    pass.tokens = from.tokens();
    pass.keys = upload.add(from.keys);
    pass.queries = upload.add(from.queries);
    pass.items = upload.add(from.work.forward);
    pass.places = upload.add(from.work.places);
    pass.cu_seqlens = upload.add(from.cu_seqlens);
    pass.cu_subtiles = upload.add(from.work.cu_subtiles);
    pass.item_count = static_cast<int32_t>(from.work.forward.size());
    pass.sequences = static_cast<int32_t>(from.cu_seqlens.size()) - 1;
    pass.first_column = from.first_column;
  }
}

void CudaRingPlan::forget_uploaded() {
  for (Set& set : sets_) {
    for (size_t c = 0; c < set.passes.size(); ++c) {
      set.passes[c].work = std::move(set.plan.passes[c].work);
      set.passes[c].work.forward = {};
      set.passes[c].work.places = {};
    }
    set.plan.passes = {};
    set.plan.groups = {};
    set.plan.column_sources = {};
    set.plan.statistics = {};
    set.plan.select.scores = {};
    set.plan.select.score_rows = {};
    set.plan.select.items = {};
    set.plan.select.mass_classes = {};
    set.plan.select.blocks = {};
  }
  coverage_.tokens = {};
  coverage_.lists = {};
  coverage_.grid = {};
}

CudaRingPlan::Lists CudaRingPlan::lists_in(const Set& set, void* memory) const {
  char* base = static_cast<char*>(memory);
  return {reinterpret_cast<uint32_t*>(base + set.list_row_entries),
          reinterpret_cast<int32_t*>(base + set.list_pass_begin),
          reinterpret_cast<uint32_t*>(base + set.list_column_entries),
          reinterpret_cast<int32_t*>(base + set.list_column_offsets)};
}

BlockIndex CudaRingPlan::read_index(void* memory, ThreadPool& pool) const {
  BlockIndex index;
  BlockIndexBuilder builder;
  const Set* set = sparse();
  const int list_heads = attention_.kv_heads;
  const int query_block = set != nullptr ? set->plan.select.query_block : 1;
  builder.begin(index, {layout_->block(), query_block, list_heads}, layout_->cu_seqlens(),
                std::vector<uint8_t>(dense_.begin(), dense_.end()), 1);
  if (set != nullptr && set->row_count > 0) {
    const SelectPlan& select = set->plan.select;
    const Lists lists = lists_in(*set, memory);
    const int passes = layout_->ranks() + 1, expand = select.select_block / select.block;
    std::vector<uint32_t> entries(static_cast<size_t>(select.entries));
    std::vector<int32_t> begin(static_cast<size_t>(set->row_count) * (passes + 1));
    const auto read = [](const auto* from, auto& to) {
      if (!to.empty()) cuda::copy_and_wait(from, to.data(), static_cast<int64_t>(to.size() * sizeof(to[0])));
    };
    read(lists.row_entries, entries);
    read(lists.pass_begin, begin);
    int32_t row = 0;
    for (int s = 0; s < layout_->sequences(); ++s) {
      const int64_t blocks = (layout_->length(s) + select.block - 1) / select.block;
      for (const int32_t b : layout_->held(rank_, s))
        for (int64_t token = int64_t{b} * layout_->block();
             token < int64_t{b} * layout_->block() + layout_->block_length(s, b); token += query_block, ++row)
          for (int head = 0; head < list_heads && !dense_[s]; ++head) {
            const int64_t number = int64_t{head} * select.rows + row;
            std::vector<IndexEntry> selected;
            for (int64_t j = 0; j < blocks; j += expand) {
              const RingBlock& block = set->plan.blocks[set->plan.rows[number].block + j];
              const int32_t* of = begin.data() + number * (passes + 1) + block.pass;
              for (int32_t i = of[0]; i < of[1]; ++i)
                if (static_cast<int32_t>(entry_id(entries[i])) == block.place)
                  selected.push_back(
                      {static_cast<uint16_t>(j / expand), static_cast<uint8_t>(entry_first(entries[i]))});
            }
            builder.set_row(0, BlockIndex::row_id(index.sequences()[s], head, static_cast<int>(token / query_block)),
                            selected);
          }
    }
  }
  builder.finish(pool);
  return index;
}

void CudaRingPlan::set(const Set& set, SelectParams& params) const {
  params.shape = set.shape;
  set_plan(set.plan.select, params);
  params.scores = at<ScoreItem>(set.scores);
  params.score_rows = at<ScoreToken>(set.score_rows);
  params.items = at<SelectItem>(set.items);
  params.blocks = at<SelectBlock>(set.select_blocks);
  params.block_count = set.block_count;
}

void CudaRingPlan::set(const Set& set, RingCutParams& params) const {
  params.rows = at<RingRow>(set.rows);
  params.row_count = set.row_count;
  params.blocks = at<RingBlock>(set.blocks);
  params.passes = layout_->ranks() + 1;
  params.groups = at<RingGroup>(set.groups);
  params.group_count = set.group_count;
  params.head_columns = at<int32_t>(set.head_columns);
  params.column_sources = at<int32_t>(set.sources);
  params.columns = set.columns;
}

void CudaRingPlan::set(CoverageParams& params) const {
  params.shape = {layout_->local_cu_seqlens(rank_).back(), attention_.heads, attention_.kv_heads, attention_.head_dim,
                  attention_.scale};
  params.sequences = at<CoverageSequence>(coverage_sequences_);
  params.sequence_count = static_cast<int32_t>(coverage_.sequences.size());
  params.blocks = coverage_.blocks;
  params.tokens = at<CoverageToken>(coverage_tokens_);
  params.token_count = sampled_;
  params.lists = at<CoverageList>(coverage_lists_);
  params.grid = at<int32_t>(coverage_grid_);
  params.held = at<CoverageBlock>(coverage_blocks_);
  params.own_tokens = at<int32_t>(coverage_own_tokens_);
  params.held_count = held_count_;
  params.own_count = own_count_;
  if (sparse() == nullptr) return;
  params.list_heads = sparse()->plan.select.list_heads;
  params.list_block = sparse()->plan.select.block;
  params.list_query_block = sparse()->plan.select.query_block;
}

}  // namespace sb::gpu
