#include "attention/cpu/sparse_attention.h"

#include <algorithm>

#include "attention/cpu/block_sparse.h"
#include "attention/cpu/walk.h"

namespace sb {
namespace {

class SparseState final : public AttentionState {
 public:
  BlockIndex index;
};

// A vector that grows by itself takes more than was planned, and holds the old memory beside the new.
void make_room(std::vector<float>& values, size_t floats) {
  if (values.capacity() < floats) std::vector<float>().swap(values);
  values.reserve(floats);
  values.resize(floats);
}

}  // namespace

LayerAttention AttentionReport::total() const {
  LayerAttention sum;
  for (const LayerAttention& layer : layers) {
    sum.pairs += layer.pairs;
    sum.causal_pairs += layer.causal_pairs;
    sum.coverage += layer.coverage;
    sum.covered_tokens += layer.covered_tokens;
  }
  return sum;
}

SparseAttention::SparseAttention(const Options& options)
    : options_(options), selector_(options.selection), step_(options.selection, options.layers) {
  for (const int64_t layer : options.selection.dense_layers) {
    SB_USER_CHECK(layer >= 0 && layer < options.layers,
                  "attention.dense_layers: there is no layer {}; the model has layers 0 to {}", layer,
                  options.layers - 1);
  }
  report_.layers.resize(options.layers);
  cut_.resize(options.layers);
}

SparseAttention::~SparseAttention() = default;

std::unique_ptr<AttentionState> SparseAttention::make_state() const {
  return std::make_unique<SparseState>();
}

BlockIndex& SparseAttention::index(AttentionState& state) {
  return static_cast<SparseState&>(state).index;
}

SequenceTiles SparseAttention::tiles_of(const PackedSequences& sequences, int sequence) const {
  const int64_t tokens = sequences.cu_seqlens[sequence + 1] - sequences.cu_seqlens[sequence];
  return sequence_tiles(options_.selection, sequences.is_piece() ? sequences.piece.length : tokens,
                        sequences.budgets.empty() ? options_.selection.budget : sequences.budgets[sequence]);
}

const float* SparseAttention::statistics(const Exec& exec, const AttentionShape& shape, const float* k,
                                         const SequenceTiles& tiles, const LayerPlanes* planes) {
  const BlockScoring scoring(options_.selection);
  make_room(statistics_, static_cast<size_t>(BlockStatistics::floats(scoring, shape, tiles.blocks())));
  BlockStatistics::fill(exec, shape, scoring, k, tiles.tokens, statistics_.data(), planes);
  return statistics_.data();
}

void SparseAttention::append_statistics(const Exec& exec, int layer, const AttentionShape& shape,
                                        const PackedSequences& piece, const AttentionOperands& operands) {
  const BlockScoring scoring(options_.selection);
  const int64_t block_floats = scoring.block_floats(shape.head_dim), first = piece.piece.begin / scoring.block;
  const int64_t whole = tiles_of(piece, 0).blocks();
  const KeyPage own = piece.piece.pages.back();
  SequenceTiles tiles = tiles_of(piece, 0);
  tiles.tokens = piece.tokens();
  const float* rows = statistics(exec, shape, operands.k.rows(own.row, own.row + tiles.tokens).f32(), tiles,
                                 step_.planes(layer, shape));
  std::vector<float>& kept = cut_[layer].statistics;
  if (piece.piece.begin == 0) make_room(kept, static_cast<size_t>(BlockStatistics::floats(scoring, shape, whole)));
  for (int head = 0; head < shape.kv_heads; ++head)
    std::copy_n(rows + head * tiles.blocks() * block_floats, tiles.blocks() * block_floats,
                kept.data() + (head * whole + first) * block_floats);
}

void SparseAttention::select(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                             const AttentionOperands& operands, BlockIndex& index) {
  const SelectionConfig& selection = options_.selection;
  std::vector<uint8_t> dense(sequences.sequences());
  for (int s = 0; s < sequences.sequences(); ++s) dense[s] = runs_dense(selection, layer, tiles_of(sequences, s));
  const BlockIndexShape index_shape = {selection.block, selection.query_block, selector_.list_heads(shape)};
  const int32_t piece[] = {0, static_cast<int32_t>(sequences.piece_end())};
  builder_.begin(index, index_shape, sequences.is_piece() ? piece : sequences.cu_seqlens, dense, exec.pool->threads());
  for (int s = 0; s < sequences.sequences(); ++s) {
    if (dense[s]) continue;
    SelectionRequest request;
    request.layer = layer;
    request.shape = shape;
    request.tiles = tiles_of(sequences, s);
    request.q = operands.q.rows(sequences.cu_seqlens[s], sequences.cu_seqlens[s + 1]).f32();
    request.place = index.sequences()[s];
    request.threshold = step_.threshold(layer, request.tiles);
    request.planes = step_.planes(layer, shape);
    if (sequences.is_piece()) {
      request.begin = sequences.piece.begin;
      request.end = sequences.piece_end();
      request.statistics = cut_[layer].statistics.data();
    } else {
      request.k = operands.k.rows(sequences.cu_seqlens[s], sequences.cu_seqlens[s + 1]).f32();
      if (selection.scores_blocks())
        request.statistics = statistics(exec, shape, request.k, request.tiles, request.planes);
    }
    const MassCounts counts = selector_.select(exec, request, builder_);
    if (!sequences.again) step_.count(layer, request.tiles, counts);
  }
  builder_.finish(*exec.pool);
}

void SparseAttention::measure_energies(const Exec& exec, int layer, const AttentionShape& shape,
                                       const PackedSequences& sequences, const AttentionOperands& operands) {
  if (!step_.by_planes()) return;
  for (int s = 0; s < sequences.sequences(); ++s) {
    const int64_t begin = sequences.cu_seqlens[s], end = sequences.cu_seqlens[s + 1];
    const int64_t keys = sequences.is_piece() ? sequences.piece.pages.back().row : begin;
    step_.add(layer, measure_planes(exec, shape, operands.q.rows(begin, end).f32(),
                                    operands.k.rows(keys, keys + end - begin).f32(), end - begin));
  }
}

void SparseAttention::count_pairs(int layer, const PackedSequences& sequences, const BlockIndex& index) {
  LayerAttention& layer_report = report_.layers[layer];
  // The index of a piece begins with the tokens before it, which have no lists.
  const int64_t before = sequences.is_piece() ? causal_triangle(sequences.piece.begin) * index.shape().list_heads : 0;
  layer_report.pairs += index.token_pairs() - (index.sequences().front().dense ? before : 0);
  layer_report.causal_pairs += index.causal_token_pairs() - before;
}

void SparseAttention::report(int layer, int64_t tokens, CoverageSample sample) {
  LayerAttention& layer_report = report_.layers[layer];
  layer_report.coverage += sample.held * static_cast<double>(tokens);
  layer_report.covered_tokens += tokens;
  report_.samples.push_back({layer, tokens, std::move(sample)});
}

void SparseAttention::measure(const Exec& exec, int layer, const AttentionShape& shape,
                              const PackedSequences& sequences, const AttentionOperands& operands,
                              const BlockIndex& index) {
  const LayerPlanes* planes = step_.planes(layer, shape);
  for (int s = 0; s < sequences.sequences(); ++s) {
    const SequenceTiles tiles = tiles_of(sequences, s);
    if (tiles.tokens == 0) continue;
    const float* k = operands.k.rows(sequences.cu_seqlens[s], sequences.cu_seqlens[s + 1]).f32();
    const CoverageRequest request{
        .q = operands.q.rows(sequences.cu_seqlens[s], sequences.cu_seqlens[s + 1]).f32(),
        .k = k,
        .statistics = statistics(exec, shape, k, tiles, planes),
        .scoring = BlockScoring(options_.selection),
        .rows = options_.coverage_rows,
        .index = &index,
        .sequence = s,
        .planes = planes,
    };
    report(layer, tiles.tokens, measure_coverage(exec, shape, tiles, request));
  }
}

// The sample of a sequence is reported with its last piece.
void SparseAttention::measure_piece(const Exec& exec, int layer, const AttentionShape& shape,
                                    const PackedSequences& piece, const AttentionOperands& operands,
                                    const BlockIndex& index) {
  const CoverageRequest request{
      .q = operands.q.f32(),
      .k = operands.k.f32(),
      .statistics = cut_[layer].statistics.data(),
      .scoring = BlockScoring(options_.selection),
      .rows = options_.coverage_rows,
      .index = &index,
      .sequence = 0,
      .planes = step_.planes(layer, shape),
      .begin = piece.piece.begin,
      .end = piece.piece_end(),
      .pages = piece.piece.pages,
  };
  CoverageSample& sum = cut_[layer].coverage;
  if (piece.piece.begin == 0) sum = {};
  sum += measure_coverage(exec, shape, tiles_of(piece, 0), request);
  if (piece.piece_end() == piece.piece.length) report(layer, piece.piece.length, std::move(sum));
}

void SparseAttention::forward(const Exec& exec, int layer, const AttentionShape& shape,
                              const PackedSequences& sequences, const AttentionOperands& operands,
                              AttentionState& state, bool replay) {
  BlockIndex& selected = index(state);
  const bool piece = sequences.is_piece();
  if (!replay) {
    if (piece && needs_statistics() && step_.ready(layer)) append_statistics(exec, layer, shape, sequences, operands);
    select(exec, layer, shape, sequences, operands, selected);
  }
  if (piece)
    block_sparse_piece_forward(exec, shape, selected, sequences, operands);
  else
    block_sparse_forward(exec, shape, selected, operands);
  if (replay || sequences.again) return;
  count_pairs(layer, sequences, selected);
  measure_energies(exec, layer, shape, sequences, operands);
  if (options_.coverage_rows == 0 || !step_.ready(layer)) return;
  if (piece)
    measure_piece(exec, layer, shape, sequences, operands, selected);
  else
    measure(exec, layer, shape, sequences, operands, selected);
}

void SparseAttention::backward(const Exec& exec, int layer, const AttentionShape& shape,
                               const PackedSequences& sequences, const AttentionOperands& operands,
                               const AttentionGradients& gradients, AttentionState& state) {
  if (sequences.is_piece())
    block_sparse_piece_backward(exec, shape, index(state), sequences, operands, gradients);
  else
    block_sparse_backward(exec, shape, index(state), operands, gradients);
}

int64_t SparseAttention::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  return block_sparse_scratch_bytes(shape, max_tokens, threads);
}

SparseAttention::Lists SparseAttention::lists(const AttentionShape& shape, int64_t max_tokens, int64_t keys) const {
  const SelectionConfig& selection = options_.selection;
  if (selection.pattern == SelectionPattern::dense) return {};
  const int64_t blocks = (keys + selection.block - 1) / selection.block;
  const int64_t budget = std::max(selection.budget, options_.largest_budget);
  // Twice the budget: a list holds what any token of the query block selected.
  return {(max_tokens + selection.query_block - 1) / selection.query_block * selector_.list_heads(shape),
          std::min(blocks, 2 * budget / selection.block + selection.sink_blocks + selection.local_blocks + 2),
          selection.lists_per_query_head() ? std::min(max_tokens, 2 * selection.vertical_cap) : 0};
}

int64_t SparseAttention::statistics_bytes(const AttentionShape& shape, int64_t tokens) const {
  if (!needs_statistics()) return 0;
  const int64_t blocks = (tokens + options_.selection.block - 1) / options_.selection.block;
  return BlockStatistics::floats(BlockScoring(options_.selection), shape, blocks) * static_cast<int64_t>(sizeof(float));
}

int64_t SparseAttention::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  // Rows hold three bytes per entry, columns four.
  const auto [rows, entries, columns] = lists(shape, max_tokens, max_tokens);
  return rows * (entries * 7 + columns * static_cast<int64_t>(sizeof(int32_t)) + 12);
}

int64_t SparseAttention::call_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  const auto [rows, entries, columns] = lists(shape, max_tokens, max_tokens);
  return BlockIndexBuilder::most_bytes(rows, rows * entries, rows * columns, threads) +
         statistics_bytes(shape, max_tokens);
}

std::string SparseAttention::refuses_pieces() const {
  return why_not_in_pieces(options_.selection);
}

// The index of a piece has rows for the tokens before it, too, without entries.
PieceBytes SparseAttention::piece_bytes(const AttentionShape& shape, const PieceLimits& limits, int threads) const {
  const int64_t max_tokens = limits.max_tokens, longest = limits.longest;
  const auto [rows, entries, columns] = lists(shape, max_tokens, longest);
  const int64_t all_rows = lists(shape, longest, longest).rows;
  return {
      .scratch = cpu_piece_scratch_bytes(shape, max_tokens, longest, threads),
      .state = rows * entries * 7 + all_rows * 12,
      .call = BlockIndexBuilder::most_bytes(all_rows, rows * entries, 0, threads) + statistics_bytes(shape, max_tokens),
      .layer = statistics_bytes(shape, longest),
      .page = cpu_page_bytes(shape)};
}

int64_t SparseAttention::layer_bytes_used() const {
  int64_t bytes = 0;
  for (const CutSequence& cut : cut_) bytes += static_cast<int64_t>(cut.statistics.capacity() * sizeof(float));
  return bytes;
}

AttentionReport SparseAttention::take_report() {
  AttentionReport taken = std::move(report_);
  report_ = {};
  report_.layers.resize(options_.layers);
  return taken;
}

}  // namespace sb
