#include "core/tensor.h"

#include <fmt/ranges.h>

namespace sb {

Shape::Shape(std::initializer_list<int64_t> dims) {
  SB_CHECK(dims.size() <= kMaxRank, "{} dimensions, at most {}", dims.size(), kMaxRank);
  for (const int64_t dim : dims) {
    SB_CHECK(dim >= 0, "negative dimension {}", dim);
    dims_[rank_++] = dim;
  }
}

int64_t Shape::elements() const {
  int64_t product = 1;
  for (int i = 0; i < rank_; ++i) product *= dims_[i];
  return product;
}

std::string Shape::to_string() const {
  return fmt::format("[{}]", fmt::join(dims_.begin(), dims_.begin() + rank_, ", "));
}

TensorView TensorView::rows(int64_t begin, int64_t end) const {
  SB_CHECK(shape_.rank() >= 1 && 0 <= begin && begin <= end && end <= shape_[0], "rows [{}, {}) of {}", begin, end,
           shape_.to_string());
  const int64_t row = shape_[0] == 0 ? 0 : elements() / shape_[0];
  Shape shape;
  switch (shape_.rank()) {
    case 1:
      shape = {end - begin};
      break;
    case 2:
      shape = {end - begin, shape_[1]};
      break;
    case 3:
      shape = {end - begin, shape_[1], shape_[2]};
      break;
    default:
      shape = {end - begin, shape_[1], shape_[2], shape_[3]};
      break;
  }
  return {static_cast<char*>(data_) + begin * row * dtype_bytes(dtype_), dtype_, shape, device_};
}

TensorView TensorView::reshaped(Shape shape) const {
  SB_CHECK(shape.elements() == elements(), "{} does not hold the elements of {}", shape.to_string(),
           shape_.to_string());
  return {data_, dtype_, shape, device_};
}

}  // namespace sb
