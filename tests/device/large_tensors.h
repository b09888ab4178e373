#pragma once

// Tensors on the GPU that are too large to be brought there: rows of random numbers that repeat.

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

#include "core/random.h"
#include "device/cuda.h"
#include "device/memory.h"

namespace sb {

class LargeTensors {
 public:
  static constexpr int64_t kMany = int64_t{1} << 31;  // elements: one more than 32 bits with a sign can count
  static constexpr int64_t kPeriod = 257;  // rows: no power of two, so that no wrapped index meets its own row

  explicit LargeTensors(const Exec& exec) : exec_(exec) {}

  TensorView zeros(DType dtype, Shape shape) {
    memory_.push_back(make_arena("tensor", shape.elements() * dtype_bytes(dtype), DeviceKind::cuda));
    const TensorView view = memory_.back().allocate(dtype, shape);
    zero_tensor(exec_, view);
    return view;
  }
  template <typename T>
  TensorView placed(const std::vector<T>& values, DType dtype, Shape shape) {
    const TensorView view = zeros(dtype, shape);
    cuda::copy_and_wait(values.data(), view.raw(), static_cast<int64_t>(values.size() * sizeof(T)));
    return view;
  }
  // In bf16.
  TensorView random(Shape shape, uint64_t seed) { return placed(bits(shape.elements(), seed), DType::bf16, shape); }
  TensorView repeated(Shape shape, uint64_t seed) {
    const TensorView view = zeros(DType::bf16, shape);
    const int64_t rows = shape[0], width = shape.elements() / rows;
    const std::vector<uint16_t> first = bits(std::min(rows, kPeriod) * width, seed);
    cuda::copy_and_wait(first.data(), view.raw(), static_cast<int64_t>(first.size() * sizeof(uint16_t)));
    for (int64_t done = kPeriod; done < rows; done *= 2) {
      const int64_t more = std::min(done, rows - done);
      copy_tensor(exec_, view.rows(0, more), view.rows(done, done + more));
    }
    return view;
  }
  // Its last rows, in memory of their own.
  TensorView copy_of_last(const TensorView& view, int64_t count) {
    const TensorView rows = view.rows(view.dim(0) - count, view.dim(0)), copy = zeros(view.dtype(), rows.shape());
    copy_tensor(exec_, rows, copy);
    return copy;
  }

  // In fp32.
  static std::vector<float> host(const TensorView& view) {
    const HostCopy copy(view);
    std::vector<float> values(static_cast<size_t>(view.elements()));
    for (size_t i = 0; i < values.size(); ++i) {
      if (view.dtype() == DType::f32) {
        values[i] = copy.view().f32()[i];
      } else {
        const uint32_t word = uint32_t{static_cast<const uint16_t*>(copy.view().raw())[i]} << 16;
        std::memcpy(&values[i], &word, sizeof(word));
      }
    }
    return values;
  }

 private:
  // Normal numbers, cut to bf16.
  static std::vector<uint16_t> bits(int64_t count, uint64_t seed) {
    Random random(seed, 77);
    std::vector<uint16_t> values(static_cast<size_t>(count));
    for (uint16_t& value : values) {
      const auto drawn = static_cast<float>(random.normal());
      uint32_t word;
      std::memcpy(&word, &drawn, sizeof(word));
      value = static_cast<uint16_t>(word >> 16);
    }
    return values;
  }

  const Exec exec_;
  std::deque<Arena> memory_;
};

}  // namespace sb
