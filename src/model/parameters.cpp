#include "model/parameters.h"

#include <cstring>
#include <utility>

namespace sb {

namespace {
constexpr int64_t kAlignElements = 16;  // 64 bytes: shard borders and vector loads stay aligned
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

void ParameterSet::end_group(int shards) {
  SB_CHECK(!values_ && shards > 0, "{} shards", shards);
  const int64_t begin = groups_.empty() ? 0 : groups_.back().end, multiple = kAlignElements * shards;
  flat_elements_ = begin + (flat_elements_ - begin + multiple - 1) / multiple * multiple;
  groups_.push_back({begin, flat_elements_});
}

void ParameterSet::allocate(bool with_gradients) {
  SB_CHECK(!values_, "allocated twice");
  const int64_t bytes = flat_bytes();
  values_ = std::make_unique<Arena>("weights", bytes);
  flat_values_ = values_->allocate(DType::f32, {flat_elements_});
  std::memset(flat_values_.raw(), 0, static_cast<size_t>(bytes));
  if (!with_gradients) return;
  gradients_ = std::make_unique<Arena>("gradients", bytes);
  flat_gradients_ = gradients_->allocate(DType::f32, {flat_elements_});
  zero_gradients();
}

std::vector<FlatTensor> ParameterSet::flat_tensors() const {
  std::vector<FlatTensor> tensors;
  for (const Parameter& parameter : parameters_) {
    const int64_t row = parameter.elements() / parameter.shape[0];
    for (const Parameter::Part& part : parameter.parts) {
      std::vector<int64_t> shape = {part.row_end - part.row_begin};
      for (int axis = 1; axis < parameter.shape.rank(); ++axis) shape.push_back(parameter.shape[axis]);
      tensors.push_back({part.hf_name, std::move(shape), parameter.offset + part.row_begin * row,
                         parameter.offset + part.row_end * row});
    }
  }
  return tensors;
}

TensorView ParameterSet::value(int index) const {
  return view(flat_values_, parameter(index));
}

TensorView ParameterSet::gradient(int index) const {
  return view(flat_gradients_, parameter(index));
}

TensorView ParameterSet::values() const {
  SB_CHECK(values_, "the parameters are not allocated");
  return flat_values_;
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

void ParameterSet::zero_gradients() {
  SB_CHECK(gradients_, "these parameters have no gradients");
  std::memset(flat_gradients_.raw(), 0, static_cast<size_t>(flat_gradients_.bytes()));
}

TensorView ParameterSet::view(const TensorView& flat, const Parameter& parameter) {
  SB_CHECK(!flat.empty(), "{} is not allocated", parameter.name);
  return flat.rows(parameter.offset, parameter.offset + parameter.elements()).reshaped(parameter.shape);
}

}  // namespace sb
