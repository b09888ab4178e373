#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "core/dtype.h"
#include "core/errors.h"

namespace sb {

enum class DeviceKind : uint8_t { cpu, cuda };

// At most four dimensions, row-major.
class Shape {
 public:
  static constexpr int kMaxRank = 4;
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);

  int rank() const { return rank_; }
  int64_t operator[](int i) const { return dims_[i]; }
  int64_t elements() const;
  bool operator==(const Shape& other) const = default;
  std::string to_string() const;  // "[3, 4]"

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// A view of contiguous memory that somebody else (an arena, usually) owns. Cheap to copy.
class TensorView {
 public:
  TensorView() = default;
  TensorView(void* data, DType dtype, Shape shape, DeviceKind device = DeviceKind::cpu)
      : data_(data), shape_(shape), dtype_(dtype), device_(device) {}
  // From a plain host buffer; T is float, int32_t or int64_t.
  template <typename T>
  TensorView(T* data, Shape shape)
      : TensorView(const_cast<std::remove_const_t<T>*>(data), dtype_of<std::remove_const_t<T>>::value, shape) {}

  bool empty() const { return data_ == nullptr; }
  DType dtype() const { return dtype_; }
  DeviceKind device() const { return device_; }
  const Shape& shape() const { return shape_; }
  int64_t dim(int i) const { return shape_[i]; }
  int64_t elements() const { return shape_.elements(); }
  int64_t bytes() const { return elements() * dtype_bytes(dtype_); }
  void* raw() const { return data_; }

  // Typed pointer; checks the type.
  template <typename T>
  T* as() const {
    SB_CHECK(dtype_of<std::remove_const_t<T>>::value == dtype_, "tensor {} holds {}", shape_.to_string(),
             dtype_name(dtype_));
    return static_cast<T*>(data_);
  }
  float* f32() const { return as<float>(); }

  // Rows [begin, end) of the first dimension.
  TensorView rows(int64_t begin, int64_t end) const;
  // The same memory with another shape of as many elements.
  TensorView reshaped(Shape shape) const;

 private:
  void* data_ = nullptr;
  Shape shape_;
  DType dtype_ = DType::f32;
  DeviceKind device_ = DeviceKind::cpu;
};

}  // namespace sb
