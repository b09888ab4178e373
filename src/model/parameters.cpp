#include "model/parameters.h"

#include <algorithm>
#include <utility>

#include "device/cuda.h"
#include "device/float16.h"
#include "ops/adamw.h"

namespace sb {

namespace {
constexpr int64_t kAlignElements = 16;  // 64 bytes: shard borders and vector loads stay aligned
}

int64_t FlatTensor::elements() const {
  int64_t product = 1;
  for (const int64_t extent : shape) product *= extent;
  return product;
}

void FlatTensor::each_run(const std::function<void(int64_t, int64_t, int64_t)>& body) const {
  if (cut.axis == TensorCut::Axis::none) return body(0, 0, end - begin);
  if (cut.axis == TensorCut::Axis::rows) return body(0, cut.begin * (elements() / shape[0]), end - begin);
  const int64_t own = cut.end - cut.begin;
  for (int64_t row = 0; row < shape[0]; ++row) body(row * own, row * cut.whole + cut.begin, own);
}

void FlatTensor::take_part(const float* whole, float* part) const {
  each_run([&](int64_t here, int64_t there, int64_t count) { std::copy_n(whole + there, count, part + here); });
}

void FlatTensor::put_part(const float* part, float* whole) const {
  each_run([&](int64_t here, int64_t there, int64_t count) { std::copy_n(part + here, count, whole + there); });
}

int ParameterSet::declare(std::string name, Shape shape, std::vector<Parameter::Part> parts) {
  SB_CHECK(!values_, "{} is declared after allocate()", name);
  SB_CHECK(shape.rank() >= 1 && shape.elements() > 0, "{}: shape {}", name, shape.to_string());
  int64_t row = 0;
  for (const Parameter::Part& part : parts) {
    SB_CHECK(part.row_begin == row && part.row_end > row, "{}: {} covers rows {} to {}, expected to start at {}", name,
             part.hf_name, part.row_begin, part.row_end, row);
    row = part.row_end;
  }
  SB_CHECK(row == shape[0], "{}: its parts cover {} of {} rows", name, row, shape[0]);

  Parameter parameter{std::move(name), shape, flat_elements_, shape.rank() >= 2, std::move(parts)};
  flat_elements_ += (shape.elements() + kAlignElements - 1) / kAlignElements * kAlignElements;
  parameters_.push_back(std::move(parameter));
  return count() - 1;
}

void ParameterSet::end_group(int shards, int64_t at_least) {
  SB_CHECK(!values_ && shards > 0, "{} shards", shards);
  const int64_t begin = groups_.empty() ? 0 : groups_.back().end, multiple = kAlignElements * shards;
  const int64_t elements = std::max(flat_elements_ - begin, at_least);
  flat_elements_ = begin + (elements + multiple - 1) / multiple * multiple;
  groups_.push_back({begin, flat_elements_});
}

void ParameterSet::allocate(bool with_gradients, DeviceKind device, DType weights, bool with_values) {
  SB_CHECK(!values_ && !weights_, "allocated twice");
  SB_CHECK(with_values || weights != DType::f32, "the operations read the values");
  SB_CHECK(weights == DType::f32 || (weights == DType::bf16 && device == DeviceKind::cuda),
           "weights in {} on this device", dtype_name(weights));
  const auto zeros = [&](const char* name, std::unique_ptr<Arena>& arena, DType dtype) {
    arena = std::make_unique<Arena>(make_arena(name, flat_elements_ * dtype_bytes(dtype), device));
    const TensorView flat = arena->allocate(dtype, {flat_elements_});
    zero_now(flat);
    return flat;
  };
  if (with_values) flat_values_ = zeros("weights", values_, DType::f32);
  if (with_gradients) flat_gradients_ = zeros("gradients", gradients_, DType::f32);
  unwritten_.assign(parameters_.size(), false);
  if (weights != DType::f32) flat_weights_ = zeros("rounded weights", weights_, weights);
}

FlatTensor flat_tensor(const Parameter& parameter, const Parameter::Part& part) {
  const int64_t row = parameter.elements() / parameter.shape[0];
  std::vector<int64_t> shape = {part.row_end - part.row_begin};
  for (int axis = 1; axis < parameter.shape.rank(); ++axis) shape.push_back(parameter.shape[axis]);
  if (part.cut.axis != TensorCut::Axis::none) shape[part.cut.axis == TensorCut::Axis::rows ? 0 : 1] = part.cut.whole;
  return {part.hf_name, std::move(shape), parameter.offset + part.row_begin * row,
          parameter.offset + part.row_end * row, part.cut};
}

std::vector<FlatTensor> ParameterSet::flat_tensors() const {
  std::vector<FlatTensor> tensors;
  for (const Parameter& parameter : parameters_)
    for (const Parameter::Part& part : parameter.parts) tensors.push_back(flat_tensor(parameter, part));
  return tensors;
}

std::vector<SharedElements> ParameterSet::shared_elements() const {
  // A range is of one group: groups become final, and are reduced, one by one.
  const auto begins_group = [&](const FlatTensor& tensor) {
    return std::any_of(groups_.begin(), groups_.end(), [&](const Group& group) { return group.begin == tensor.begin; });
  };
  std::vector<SharedElements> shared;
  for (const FlatTensor& tensor : flat_tensors()) {
    const TensorCut& cut = tensor.cut;
    if (cut.copies == 1) continue;
    if (!shared.empty() && shared.back().end == tensor.begin && shared.back().copies == cut.copies &&
        !begins_group(tensor))
      shared.back().end = tensor.end;
    else
      shared.push_back({tensor.begin, tensor.end, cut.copies, cut.copy});
  }
  return shared;
}

TensorView ParameterSet::value(int index) const {
  await(index);
  return part(flat_values_, index);
}

TensorView ParameterSet::weight(int index) const {
  await(index);
  return part(flat_weights_.empty() ? flat_values_ : flat_weights_, index);
}

TensorView ParameterSet::gradient(int index) const {
  return part(flat_gradients_, index);
}

TensorView ParameterSet::values() const {
  SB_CHECK(values_, "the parameters are not allocated, or their values are somebody else's");
  await(0, flat_elements_);
  return flat_values_;
}

TensorView ParameterSet::rounded_weights() const {
  await(0, flat_elements_);
  return flat_weights_;
}

TensorView ParameterSet::gradients() const {
  SB_CHECK(gradients_, "these parameters have no gradients");
  return flat_gradients_;
}

int64_t ParameterSet::elements() const {
  int64_t sum = 0;
  for (const Parameter& parameter : parameters_) sum += parameter.elements();
  return sum;
}

void ParameterSet::zero_gradients(const Exec& exec) {
  SB_CHECK(gradients_, "these parameters have no gradients");
  zero_tensor(exec, flat_gradients_);
  unwritten_.assign(parameters_.size(), false);
}

void ParameterSet::begin_gradients(const Exec& exec) {
  SB_CHECK(gradients_, "these parameters have no gradients");
  unwritten_.assign(parameters_.size(), false);
  // What lies between the matrices, padding included, in one piece.
  int64_t begin = 0;
  for (int i = 0; i < count(); ++i) {
    const Parameter& own = parameter(i);
    if (own.shape.rank() < 2) continue;
    unwritten_[static_cast<size_t>(i)] = true;
    zero_tensor(exec, flat_gradients_.rows(begin, own.offset));
    begin = own.offset + own.elements();
  }
  zero_tensor(exec, flat_gradients_.rows(begin, flat_elements_));
}

bool ParameterSet::add_to_gradient(int index) {
  const bool written = !unwritten_[static_cast<size_t>(index)];
  unwritten_[static_cast<size_t>(index)] = false;
  return written;
}

void ParameterSet::complete_gradients(const Exec& exec, int group) {
  const Group& own = groups_[static_cast<size_t>(group)];
  for (int i = 0; i < count(); ++i) {
    const int64_t offset = parameter(i).offset;
    if (own.begin <= offset && offset < own.end && !add_to_gradient(i)) zero_tensor(exec, gradient(i));
  }
}

HostCopy ParameterSet::host_values() const {
  return has_values() ? HostCopy(values()) : HostCopy(DType::f32, {flat_elements_});
}

void ParameterSet::store_values(const HostCopy& values) {
  await(0, flat_elements_);
  weights_changed();
  values.store();
  if (flat_weights_.empty()) return;
  if (has_values()) {
    const Exec exec = {.device = DeviceKind::cuda};  // the device's own stream: nothing else is running
    round_parameters(exec, flat_values_, flat_weights_);
    return cuda::synchronize(exec.stream);
  }
  const HostCopy weights(flat_weights_);
  const float* from = values.view().f32();
  auto* to = static_cast<uint16_t*>(weights.view().raw());
  for (int64_t i = 0; i < flat_elements_; ++i) to[i] = bf16_from_f32(from[i]);
  weights.store();
  if (values_owner_) values_owner_(values.view());
}

void ParameterSet::store_rounded(const FlatTensor& tensor, const float* values) {
  SB_CHECK(is_rounded_only(), "{}: the parameters have values", tensor.name);
  weights_changed();
  const HostCopy weights(flat_weights_.rows(tensor.begin, tensor.end));
  auto* to = static_cast<uint16_t*>(weights.view().raw());
  for (int64_t i = 0; i < tensor.end - tensor.begin; ++i) to[i] = bf16_from_f32(values[i]);
  weights.store();
}

TensorView ParameterSet::part(const TensorView& flat, int index) const {
  const Parameter& own = parameter(index);
  SB_CHECK(!flat.empty(), "{} is not allocated", own.name);
  return flat.rows(own.offset, own.offset + own.elements()).reshaped(own.shape);
}

bool StageParameters::trains(Kind kind) const {
  if (!lora_.enabled()) return true;
  switch (kind) {
    case Kind::norm:
      return lora_.norms;
    case Kind::embedding:
      return lora_.embedding;
    case Kind::head:
      return lora_.head;
    default:
      return false;
  }
}

ParameterPlace StageParameters::declare(Kind kind, std::string name, Shape shape, std::vector<Parameter::Part> parts) {
  if (!trains(kind)) return {&frozen_, frozen_.declare(std::move(name), shape, std::move(parts))};
  if (lora_.enabled())
    for (Parameter::Part& part : parts) part.hf_name.insert(0, kPeftPrefix);
  return {&trained_, trained_.declare(std::move(name), shape, std::move(parts))};
}

ParameterPlace StageParameters::declare_adapter(std::string name, Shape shape, std::vector<Parameter::Part> parts) {
  return {&trained_, trained_.declare(std::move(name), shape, std::move(parts))};
}

}  // namespace sb
