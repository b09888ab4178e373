#include "attention/gpu/plan/coverage_log.h"

#include <algorithm>

#include "device/cuda.h"

namespace sb::gpu {
namespace {

constexpr int64_t kPieceFloats = 1 << 18;

}  // namespace

void CoverageLog::reserve() {
  if (pieces_.empty()) add_piece(kPieceFloats);
}

int64_t CoverageLog::reserved_bytes() {
  return kPieceFloats * static_cast<int64_t>(sizeof(float));
}

CoverageLog::Piece& CoverageLog::add_piece(int64_t floats) {
  Piece& piece = pieces_.emplace_back();
  piece.floats = floats;
  piece.memory.ensure("coverage", floats * static_cast<int64_t>(sizeof(float)));
  return piece;
}

float* CoverageLog::add(int layer, const CoveragePlan& coverage, const Shape& shape) {
  size_t at = 0;
  while (at < pieces_.size() && pieces_[at].floats - pieces_[at].used < coverage.results) ++at;
  Piece& piece = at < pieces_.size() ? pieces_[at] : add_piece(std::max<int64_t>(kPieceFloats, coverage.results));
  for (const CoverageSequence& sequence : coverage.sequences) {
    if (sequence.whole_sampled == 0) continue;
    records_.push_back({layer, sequence.whole_tokens, sequence.sampled, sequence.points, shape.kv_heads,
                        shape.query_heads, sequence.whole_sampled, sequence.goes_on, at,
                        piece.used + sequence.results});
  }
  float* room = static_cast<float*>(piece.memory.data()) + piece.used;
  piece.used += coverage.results;
  return room;
}

void CoverageLog::take(AttentionReport& report) {
  std::vector<std::vector<float>> values(pieces_.size());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    values[i].resize(pieces_[i].used);
    if (pieces_[i].used > 0)
      cuda::copy_and_wait(pieces_[i].memory.data(), values[i].data(),
                          pieces_[i].used * static_cast<int64_t>(sizeof(float)));
    pieces_[i].used = 0;
  }
  for (const Record& record : records_) add_sample(record, values[record.piece].data() + record.begin, report);
  records_.clear();
}

// The sample of a sequence in pieces is reported with the last of them.
void CoverageLog::add_sample(const Record& record, const float* value, AttentionReport& report) {
  CoverageSample& sample = begun_[record.layer];
  sample.rows += record.sampled;
  sample.curve.resize(static_cast<size_t>(record.points), 0.0);
  const double share = 1.0 / (static_cast<double>(record.whole_sampled) * record.heads);
  for (int i = 0; i < record.sampled * record.kv_heads; ++i) {
    sample.held += share * *value++;
    for (double& point : sample.curve) point += share * *value++;
  }
  if (record.goes_on) return;
  LayerAttention& layer = report.layers[record.layer];
  layer.coverage += sample.held * static_cast<double>(record.tokens);
  layer.covered_tokens += record.tokens;
  report.samples.push_back({record.layer, record.tokens, std::move(sample)});
  begun_.erase(record.layer);
}

}  // namespace sb::gpu
