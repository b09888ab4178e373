#include "attention/gpu/plan/select_memory.h"

#include <algorithm>
#include <array>
#include <bit>

#include "attention/gpu/select/step_values.h"
#include "core/errors.h"
#include "device/cuda.h"

namespace sb::gpu {

SelectMemory::SelectMemory(const SelectionConfig& selection, int layers)
    : layers_(layers),
      channels_(selection.judges_by_planes() ? selection.score_channels : 0),
      counts_(selection.pattern == SelectionPattern::topp || selection.pattern == SelectionPattern::mass ||
              selection.pattern == SelectionPattern::vertical_slash),
      learns_(selection.learns_thresholds()),
      step_(selection, layers),
      put_(static_cast<size_t>(layers)),
      sampled_(static_cast<size_t>(layers)) {
  if (!counts_) return;
  counters_.reserve("attention counts", counter_bytes());
  cuda::zero_and_wait(counters_.data(), counter_bytes());
  reserve_taken(counter_bytes());
}

void SelectMemory::reserve_taken(int64_t bytes) {
  if (bytes <= taken_bytes_) return;
  taken_ = HostMemory(bytes, DeviceKind::cuda);
  taken_bytes_ = bytes;
}

template <typename T>
std::span<const T> SelectMemory::take_values(void* stream, T* from, int64_t count) {
  const int64_t bytes = count * int64_t{sizeof(T)};
  reserve_taken(bytes);
  cuda::copy(stream, from, taken_.data(), bytes);
  cuda::zero(stream, from, bytes);
  cuda::synchronize(stream);
  return {static_cast<const T*>(taken_.data()), static_cast<size_t>(count)};
}

int64_t SelectMemory::counter_bytes() const {
  return counts_ ? int64_t{layers_} * (1 + classes()) * int64_t{sizeof(unsigned long long)} : 0;
}

int64_t SelectMemory::plane_words(const AttentionShape& shape) const {
  return plane_word_count(shape.kv_heads, channels_);
}

int64_t SelectMemory::reserved_bytes(const AttentionShape& shape) const {
  const int64_t planes =
      channels_ == 0 ? 0 : layers_ * plane_words(shape) * int64_t{sizeof(uint32_t)} + sum_bytes(shape);
  return counter_bytes() + planes;
}

void SelectMemory::reserve(const AttentionShape& shape) {
  if (channels_ == 0) return;
  if (sums_.data() != nullptr) {
    SB_CHECK(shape.kv_heads == shape_.kv_heads && shape.head_dim == shape_.head_dim, "layers of different shapes");
    return;
  }
  shape_ = shape;
  planes_.reserve("planes", layers_ * plane_words(shape) * int64_t{sizeof(uint32_t)});
  sums_.reserve("energies of planes", sum_bytes(shape));
  cuda::zero_and_wait(sums_.data(), sum_bytes(shape));
  reserve_taken(sum_bytes(shape));
}

void SelectMemory::use(const LearnedSelection& learned) {
  step_.use(learned);
  put_.assign(put_.size(), false);
}

const uint32_t* SelectMemory::planes(const Exec& exec, int layer, const AttentionShape& shape) {
  if (given_ != nullptr) {
    auto* words = exec.scratch->allocate_array<uint32_t>(plane_words(shape));
    SB_CHECK(std::ssize(given_->planes) == plane_words(shape), "{} values of planes, {} wanted", given_->planes.size(),
             plane_words(shape));
    put_words(words, given_->planes, exec.stream);
    return words;
  }
  reserve(shape);
  auto* words = static_cast<uint32_t*>(planes_.data()) + layer * plane_words(shape);
  if (!put_[static_cast<size_t>(layer)]) {
    const std::vector<uint32_t> values = sb::plane_words(*step_.planes(layer, shape));
    SB_CHECK(std::ssize(values) == plane_words(shape), "{} values of planes, {} wanted", values.size(),
             plane_words(shape));
    put_words(words, values, exec.stream);
    put_[static_cast<size_t>(layer)] = true;
  }
  return words;
}

void SelectMemory::begin(const Exec& exec, int layer, const AttentionShape& shape, const SelectPlan& plan,
                         SelectParams& params) {
  const auto sequences = std::ssize(plan.sequences);
  if (counts_) {
    params.selected = exec.scratch->allocate_array<unsigned long long>(2 * sequences);
    cuda::zero(exec.stream, params.selected, 2 * sequences * static_cast<int64_t>(sizeof(unsigned long long)));
  }
  if (learns_) {
    std::vector<uint32_t> thresholds;
    for (size_t s = 0; s < plan.sequences.size(); ++s) {
      const SelectSequence& sequence = plan.sequences[s];
      const float threshold = sequence.wanted == 0 ? 0.0f
                              : given_ != nullptr  ? start_threshold(sequence.tiles) + given_->corrections[s]
                                                   : step_.threshold(layer, sequence.tiles);
      thresholds.push_back(std::bit_cast<uint32_t>(threshold));
    }
    auto* to = exec.scratch->allocate_array<float>(sequences);
    put_words(reinterpret_cast<uint32_t*>(to), thresholds, exec.stream);
    params.thresholds = to;
  }
  set_planes(exec, layer, shape, params);
}

void SelectMemory::add_counts(int layer, const SelectPlan& plan, const int32_t* classes, const SelectParams& params,
                              void* stream) {
  if (!counts_) return;
  if (given_ != nullptr) {
    if (learns_) write_given_counts(plan, params, stream);
    return;
  }
  gpu::add_counts(pairs(layer), blocks(layer), params.selected, classes, static_cast<int32_t>(plan.sequences.size()),
                  stream);
  counted_on_ = stream;
  if (!learns_) return;
  for (const SelectSequence& sequence : plan.sequences) {
    if (sequence.given == 0) continue;
    Known& known = known_[mass_key(layer, sequence.tiles)];
    known.given += sequence.given;
    known.wanted += sequence.wanted;
  }
}

void SelectMemory::write_given_counts(const SelectPlan& plan, const SelectParams& params, void* stream) const {
  std::vector<SequenceBlocks> sequences;
  for (size_t s = 0; s < plan.sequences.size(); ++s)
    if (plan.sequences[s].given > 0)
      sequences.push_back(
          {static_cast<int32_t>(s), given_->places[s], plan.sequences[s].given, plan.sequences[s].wanted});
  write_counts(given_->counts, params.selected, sequences, stream);
}

void SelectMemory::observe(const Exec& exec, int layer, const AttentionShape& shape, const AttentionOperands& operands,
                           const int32_t* samples, int32_t sample_count) {
  if (channels_ == 0 || sample_count == 0) return;
  if (given_ == nullptr) reserve(shape);
  PlaneSumsParams params;
  params.shape = {operands.q.dim(0), shape.heads, shape.kv_heads, shape.head_dim, shape.scale};
  params.q = operands.q.raw();
  params.k = operands.k.raw();
  params.samples = samples;
  params.sample_count = sample_count;
  params.partial =
      exec.scratch->allocate_array<double>(plane_sums_partials(sample_count, shape.kv_heads, shape.head_dim));
  params.sums = given_ != nullptr ? given_->sums + 1 : sums(layer);
  if (given_ != nullptr) {
    cuda::zero(exec.stream, params.sums, sum_values(shape) * int64_t{sizeof(double)});
    const auto tokens = std::bit_cast<std::array<uint32_t, 2>>(static_cast<double>(sample_count));
    put_words(reinterpret_cast<uint32_t*>(given_->sums), tokens, exec.stream);
  }
  add_plane_sums(params, operands.q.dtype() == DType::f32 ? Precision::fp32 : Precision::bf16, exec.stream);
  if (given_ != nullptr) return;
  observed_on_ = exec.stream;
  sampled_[static_cast<size_t>(layer)] += sample_count;
}

void SelectMemory::take_pairs(AttentionReport& report) {
  if (!counted_on_) return;
  const std::span<const unsigned long long> counted = take_values(*counted_on_, pairs(0), layers_);
  for (size_t layer = 0; layer < counted.size(); ++layer)
    report.layers[layer].pairs += static_cast<int64_t>(counted[layer]);
}

SelectionObservations SelectMemory::take_observations() {
  SelectionObservations seen;
  if (learns_) take_masses(seen);
  if (std::ranges::any_of(sampled_, [](int64_t tokens) { return tokens > 0; })) take_sums(seen);
  return seen;
}

void SelectMemory::take_masses(SelectionObservations& seen) {
  if (known_.empty()) return;
  const std::span<const unsigned long long> counted =
      take_values(*counted_on_, blocks(0), int64_t{layers_} * kMassClasses);
  for (const auto& [key, known] : known_) {
    const auto at = static_cast<size_t>(key.layer) * kMassClasses + static_cast<size_t>(mass_class(key));
    if (known.wanted > 0) seen.masses[key] = {static_cast<int64_t>(counted[at]) - known.given, known.wanted};
  }
  known_.clear();
}

void SelectMemory::take_sums(SelectionObservations& seen) {
  const auto values = static_cast<size_t>(sum_values(shape_)), width = values / 3;
  const std::span<const double> all = take_values(*observed_on_, sums(0), layers_ * static_cast<int64_t>(values));
  seen.planes.resize(static_cast<size_t>(layers_));
  for (size_t layer = 0; layer < sampled_.size(); ++layer) {
    if (sampled_[layer] == 0) continue;
    PlaneSums& to = seen.planes[layer];
    const auto at = all.begin() + static_cast<int64_t>(layer * values);
    to.tokens = static_cast<double>(sampled_[layer]);
    to.query_squares.assign(at, at + static_cast<int64_t>(width));
    to.key_sums.assign(at + static_cast<int64_t>(width), at + static_cast<int64_t>(2 * width));
    to.key_squares.assign(at + static_cast<int64_t>(2 * width), at + static_cast<int64_t>(values));
    sampled_[layer] = 0;
  }
}

}  // namespace sb::gpu
