#include "attention/cpu/sparse_attention.h"

#include <algorithm>

#include "attention/cpu/block_sparse.h"

namespace sb {
namespace {

class SparseState final : public AttentionState {
 public:
  BlockIndex index;
};

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
    SB_USER_CHECK(layer >= 0 && layer < options.layers, "attention.dense_layers: {}, but the model has layers 0 to {}",
                  layer, options.layers - 1);
  }
  report_.layers.resize(options.layers);
}

SparseAttention::~SparseAttention() = default;

std::unique_ptr<AttentionState> SparseAttention::make_state() const {
  return std::make_unique<SparseState>();
}

BlockIndex& SparseAttention::index(AttentionState& state) {
  return static_cast<SparseState&>(state).index;
}

SequenceTiles SparseAttention::tiles_of(const PackedSequences& sequences, int sequence) const {
  return sequence_tiles(options_.selection, sequences.cu_seqlens[sequence + 1] - sequences.cu_seqlens[sequence],
                        sequences.budgets.empty() ? options_.selection.budget : sequences.budgets[sequence]);
}

const float* SparseAttention::statistics(const Exec& exec, const AttentionShape& shape, const float* k,
                                         const SequenceTiles& tiles) {
  const BlockScoring scoring(options_.selection);
  const auto floats = static_cast<size_t>(BlockStatistics::floats(scoring, shape, tiles.blocks()));
  // A vector that grows by itself takes more than was planned, and holds the old memory beside the new.
  if (statistics_.capacity() < floats) std::vector<float>().swap(statistics_);
  statistics_.reserve(floats);
  statistics_.resize(floats);
  BlockStatistics::fill(exec, shape, scoring, k, tiles.tokens, statistics_.data());
  return statistics_.data();
}

void SparseAttention::choose(const Exec& exec, int layer, const AttentionShape& shape, const PackedSequences& sequences,
                             const AttentionOperands& operands, BlockIndex& index) {
  const SelectionConfig& selection = options_.selection;
  std::vector<uint8_t> dense(sequences.sequences());
  for (int s = 0; s < sequences.sequences(); ++s) dense[s] = runs_dense(selection, layer, tiles_of(sequences, s));
  const BlockIndexShape index_shape = {selection.block, selection.query_block, selector_.list_heads(shape)};
  builder_.begin(index, index_shape, sequences.cu_seqlens, dense, exec.pool->threads());
  for (int s = 0; s < sequences.sequences(); ++s) {
    if (dense[s]) continue;
    SelectionRequest request;
    request.layer = layer;
    request.shape = shape;
    request.tiles = tiles_of(sequences, s);
    request.q = operands.q.rows(sequences.cu_seqlens[s], sequences.cu_seqlens[s + 1]).f32();
    request.k = operands.k.rows(sequences.cu_seqlens[s], sequences.cu_seqlens[s + 1]).f32();
    request.place = index.sequences()[s];
    if (selection.scores_blocks()) request.statistics = statistics(exec, shape, request.k, request.tiles);
    request.threshold = step_.threshold(layer, request.tiles);
    request.planes = step_.planes(layer, shape);
    step_.count(layer, request.tiles, selector_.select(exec, request, builder_));
  }
  builder_.finish(*exec.pool);
}

void SparseAttention::measure(const Exec& exec, int layer, const AttentionShape& shape,
                              const PackedSequences& sequences, const AttentionOperands& operands) {
  if (!step_.by_planes()) return;
  for (int s = 0; s < sequences.sequences(); ++s) {
    const int64_t begin = sequences.cu_seqlens[s], end = sequences.cu_seqlens[s + 1];
    step_.add(layer, measure_planes(exec, shape, operands.q.rows(begin, end).f32(), operands.k.rows(begin, end).f32(),
                                    end - begin));
  }
}

void SparseAttention::forward(const Exec& exec, int layer, const AttentionShape& shape,
                              const PackedSequences& sequences, const AttentionOperands& operands,
                              AttentionState& state, bool replay) {
  BlockIndex& chosen = index(state);
  if (!replay) choose(exec, layer, shape, sequences, operands, chosen);
  block_sparse_forward(exec, shape, chosen, operands);
  if (replay) return;

  LayerAttention& layer_report = report_.layers[layer];
  layer_report.pairs += chosen.token_pairs();
  layer_report.causal_pairs += chosen.causal_token_pairs();
  measure(exec, layer, shape, sequences, operands);
  if (options_.coverage_rows == 0 || !step_.ready(layer)) return;
  for (int s = 0; s < sequences.sequences(); ++s) {
    const SequenceTiles tiles = tiles_of(sequences, s);
    if (tiles.tokens == 0) continue;
    const float* k = operands.k.rows(sequences.cu_seqlens[s], sequences.cu_seqlens[s + 1]).f32();
    const CoverageRequest request{
        .q = operands.q.rows(sequences.cu_seqlens[s], sequences.cu_seqlens[s + 1]).f32(),
        .k = k,
        .statistics = statistics(exec, shape, k, tiles),
        .scoring = BlockScoring(options_.selection),
        .rows = options_.coverage_rows,
        .index = &chosen,
        .sequence = s,
        .planes = step_.planes(layer, shape),
    };
    report_.samples.push_back({layer, tiles.tokens, measure_coverage(exec, shape, tiles, request)});
    layer_report.coverage += report_.samples.back().sample.held * static_cast<double>(tiles.tokens);
    layer_report.covered_tokens += tiles.tokens;
  }
}

void SparseAttention::backward(const Exec& exec, int layer, const AttentionShape& shape,
                               const PackedSequences& sequences, const AttentionOperands& operands,
                               const AttentionGradients& gradients, AttentionState& state) {
  block_sparse_backward(exec, shape, index(state), operands, gradients);
}

int64_t SparseAttention::scratch_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  return block_sparse_scratch_bytes(shape, max_tokens, threads);
}

SparseAttention::Lists SparseAttention::lists(const AttentionShape& shape, int64_t max_tokens) const {
  const SelectionConfig& selection = options_.selection;
  if (selection.pattern == SelectionPattern::dense) return {};
  const int64_t blocks = (max_tokens + selection.block - 1) / selection.block;
  const int64_t budget = std::max(selection.budget, options_.largest_budget);
  // Twice the budget: a list holds what any token of the query block chose.
  return {(max_tokens + selection.query_block - 1) / selection.query_block * selector_.list_heads(shape),
          std::min(blocks, 2 * budget / selection.block + selection.sink_blocks + selection.local_blocks + 2),
          selection.lists_per_query_head() ? std::min(max_tokens, 2 * selection.vertical_cap) : 0};
}

int64_t SparseAttention::state_bytes(const AttentionShape& shape, int64_t max_tokens) const {
  // Rows hold three bytes an entry, columns four.
  const auto [rows, entries, columns] = lists(shape, max_tokens);
  return rows * (entries * 7 + columns * static_cast<int64_t>(sizeof(int32_t)) + 12);
}

int64_t SparseAttention::call_bytes(const AttentionShape& shape, int64_t max_tokens, int threads) const {
  const auto [rows, entries, columns] = lists(shape, max_tokens);
  int64_t bytes = BlockIndexBuilder::most_bytes(rows, rows * entries, rows * columns, threads);
  if (options_.selection.scores_blocks() || options_.coverage_rows > 0) {
    const int64_t blocks = (max_tokens + options_.selection.block - 1) / options_.selection.block;
    bytes +=
        BlockStatistics::floats(BlockScoring(options_.selection), shape, blocks) * static_cast<int64_t>(sizeof(float));
  }
  return bytes;
}

AttentionReport SparseAttention::take_report() {
  AttentionReport taken = std::move(report_);
  report_ = {};
  report_.layers.resize(options_.layers);
  return taken;
}

}  // namespace sb
