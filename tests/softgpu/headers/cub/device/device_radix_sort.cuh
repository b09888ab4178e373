#pragma once

// CUB's radix sort on the software device. Kernels of the library's own run in its place, so that the address sanitizer
// sees what it reads and writes.

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "softgpu/interface/kernel.h"

namespace cub {

struct DeviceRadixSort {
  // Stable, by the bits [begin_bit, end_bit) of the keys. Without `room` only says how much it takes.
  template <typename Key, typename Value, typename Count>
  static cudaError_t SortPairs(void* room, size_t& room_bytes, const Key* keys, Key* sorted_keys, const Value* values,
                               Value* sorted_values, Count count, int begin_bit = 0, int end_bit = sizeof(Key) * 8,
                               cudaStream_t stream = nullptr) {
    using Bits = std::make_unsigned_t<Key>;
    const auto total = static_cast<size_t>(count);
    const size_t needed = 1024 + total * (sizeof(Key) + sizeof(Value));
    if (room == nullptr) {
      room_bytes = needed;
      return cudaSuccess;
    }
    if (room_bytes < needed || begin_bit < 0 || end_bit > static_cast<int>(sizeof(Key) * 8) || begin_bit > end_bit)
      return cudaErrorInvalidValue;
    const auto sort = [=] {
      // Whatever else somebody keeps in there is gone.
      std::memset(room, 0xCD, needed);
      const int width = end_bit - begin_bit;
      const Bits mask = width == static_cast<int>(sizeof(Key) * 8) ? ~Bits{0} : (Bits{1} << width) - 1;
      // A signed key's order has its sign turned.
      const Bits turn = std::is_signed_v<Key> ? Bits{1} << (sizeof(Key) * 8 - 1) : Bits{0};
      const auto part = [&](size_t i) { return (static_cast<Bits>(keys[i]) ^ turn) >> begin_bit & mask; };
      std::vector<size_t> order(total);
      std::iota(order.begin(), order.end(), size_t{0});
      std::ranges::stable_sort(order, [&](size_t a, size_t b) { return part(a) < part(b); });
      for (size_t i = 0; i < total; ++i) {
        sorted_keys[i] = keys[order[i]];
        sorted_values[i] = values[order[i]];
      }
    };
    softgpu::Kernel kernel;
    kernel.body = sort;
    kernel.library_name = "cub::DeviceRadixSort::SortPairs";
    kernel.grid = kernel.block = dim3(1);
    kernel.stream = stream;
    return softgpu::enqueue_kernel(std::move(kernel));
  }
};

}  // namespace cub
