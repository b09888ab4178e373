#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/arena.h"
#include "device/event.h"
#include "device/memory.h"

namespace sb {

// AdamW's values and moments of one rank, which wait for their update in host memory (page-locked beside CUDA). They
// come to the device in windows: while one is updated, the next is on its way there and the one before on its way back,
// each on a stream of its own.
class HostOptimizerState {
 public:
  static constexpr int64_t kWindow = int64_t{8} << 20;  // elements
  HostOptimizerState(int64_t elements, DeviceKind device, DType moments = DType::f32, int64_t window = kWindow);

  // What the constructor will allocate.
  static int64_t device_bytes(int64_t elements, DType moments = DType::f32, int64_t window = kWindow);
  static int64_t host_bytes(int64_t elements, DType moments = DType::f32);

  // In host memory; what is still on its way there is waited for.
  TensorView values() const { return settled(0); }
  TensorView first_moment() const { return settled(1); }
  TensorView second_moment() const { return settled(2); }

  struct Window {
    int64_t begin, end;                              // elements
    TensorView values, first_moment, second_moment;  // on the device
  };
  // Calls body(window) for all of the elements [begin, end), in order; what it queues on exec.stream may change them.
  // The calls of one update come in order, too.
  void update(const Exec& exec, int64_t begin, int64_t end, const std::function<void(const Window&)>& body);

 private:
  static constexpr int kPlaces = 3, kArrays = 3;
  // Room for a window on the device.
  struct Place {
    TensorView arrays[kArrays];
    DeviceEvent arrived, computed, left;
  };
  DType dtype(int array) const { return array == 0 ? DType::f32 : moments_; }
  TensorView settled(int array) const;
  TensorView host(int array) const;

  int64_t elements_, window_;
  DeviceKind device_;
  DType moments_;
  HostMemory host_;
  Arena arena_;
  std::vector<Place> places_;
  std::shared_ptr<void> arriving_, leaving_;  // streams
  size_t next_ = 0;                           // place
  int64_t updated_ = 0;                       // elements before this one, in the update under way
};

}  // namespace sb
