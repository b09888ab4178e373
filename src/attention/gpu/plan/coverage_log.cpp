#include "attention/gpu/plan/coverage_log.h"

#include <algorithm>

namespace sb::gpu {

void CoverageLog::reserve() {
  while (std::ssize(pages_) < kPages)
    pages_.push_back({HostMemory(kPageFloats * int64_t{sizeof(float)}, device_), DeviceEvent(device_)});
}

// Pages are read in the order in which they were written: the next one has the oldest values.
CoverageLog::Page& CoverageLog::page_with_room() {
  if (pages_[current_].used == kPageFloats) {
    current_ = (current_ + 1) % pages_.size();
    read(pages_[current_]);
  }
  return pages_[current_];
}

void CoverageLog::read(Page& page) {
  page.copied.wait();
  const auto* data = static_cast<const float*>(page.memory.data());
  values_.insert(values_.end(), data, data + page.used);
  page.used = 0;
}

void CoverageLog::add(const Exec& exec, int layer, const CoveragePlan& coverage, const Shape& shape, float* results) {
  reserve();
  for (const CoverageSequence& sequence : coverage.sequences) {
    if (sequence.whole_sampled == 0) continue;
    records_.push_back({layer, sequence.whole_tokens, sequence.sampled, sequence.points, shape.kv_heads,
                        shape.query_heads, sequence.whole_sampled, sequence.goes_on, added_ + sequence.results});
  }
  for (int64_t done = 0; done < coverage.results;) {
    Page& page = page_with_room();
    const int64_t count = std::min(coverage.results - done, kPageFloats - page.used);
    download(exec, TensorView(results + done, DType::f32, {count}, exec.device),
             static_cast<float*>(page.memory.data()) + page.used);
    page.copied.record(exec);
    page.used += count;
    done += count;
  }
  added_ += coverage.results;
}

void CoverageLog::take(AttentionReport& report) {
  for (size_t i = 1; i <= pages_.size(); ++i) read(pages_[(current_ + i) % pages_.size()]);
  for (const Record& record : records_) add_sample(record, values_.data() + record.begin, report);
  records_.clear();
  values_.clear();
  added_ = 0;
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
