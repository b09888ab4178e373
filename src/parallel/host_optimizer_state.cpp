#include "parallel/host_optimizer_state.h"

#include <algorithm>

#include "device/cuda.h"

namespace sb {
namespace {

// Of the values and both moments.
int64_t arrays_bytes(int64_t elements, DType moments) {
  return array_bytes(elements, DType::f32) + 2 * array_bytes(elements, moments);
}

Exec on_stream(const Exec& exec, const std::shared_ptr<void>& stream) {
  Exec own = exec;
  if (stream) own.stream = stream.get();
  return own;
}

}  // namespace

int64_t HostOptimizerState::device_bytes(int64_t elements, DType moments, int64_t window) {
  return kPlaces * arrays_bytes(std::min(elements, window), moments);
}

int64_t HostOptimizerState::host_bytes(int64_t elements, DType moments) {
  return arrays_bytes(elements, moments);
}

HostOptimizerState::HostOptimizerState(int64_t elements, DeviceKind device, DType moments, int64_t window)
    : elements_(elements),
      window_(std::min(elements, window)),
      device_(device),
      moments_(moments),
      host_(host_bytes(elements, moments), device),
      arena_(make_arena("windows of the optimizer", device_bytes(elements, moments, window), device)) {
  SB_CHECK(window > 0, "windows of {} elements", window);
  for (int i = 0; i < kPlaces; ++i) {
    Place& place = places_.emplace_back(Place{{}, DeviceEvent(device), DeviceEvent(device), DeviceEvent(device)});
    for (int array = 0; array < kArrays; ++array) place.arrays[array] = arena_.allocate(dtype(array), {window_});
  }
  if (device != DeviceKind::cuda) return;
  arriving_ = cuda::make_stream();
  leaving_ = cuda::make_stream();
}

TensorView HostOptimizerState::host(int array) const {
  int64_t begin = 0;
  for (int before = 0; before < array; ++before) begin += array_bytes(elements_, dtype(before));
  return {static_cast<char*>(host_.data()) + begin, dtype(array), {elements_}};
}

TensorView HostOptimizerState::settled(int array) const {
  for (const Place& place : places_) place.left.wait();
  return host(array);
}

void HostOptimizerState::update(const Exec& exec, int64_t begin, int64_t end,
                                const std::function<void(const Window&)>& body) {
  SB_CHECK(0 <= begin && begin <= end && end <= elements_, "elements {} to {} of {}", begin, end, elements_);
  const Exec in = on_stream(exec, arriving_), out = on_stream(exec, leaving_);
  // A new update: what the one before changed has to be back.
  if (begin < updated_)
    for (const Place& place : places_) place.left.hold(in);
  updated_ = end;
  for (int64_t at = begin; at < end; at += window_) {
    const int64_t stop = std::min(end, at + window_);
    Place& place = places_[next_++ % kPlaces];
    const auto here = [&](int array) { return place.arrays[array].rows(0, stop - at); };
    place.left.hold(in);
    for (int array = 0; array < kArrays; ++array) upload(in, host(array).rows(at, stop).raw(), here(array));
    place.arrived.record(in);
    place.arrived.hold(exec);
    body({at, stop, here(0), here(1), here(2)});
    place.computed.record(exec);
    place.computed.hold(out);
    for (int array = 0; array < kArrays; ++array) download(out, here(array), host(array).rows(at, stop).raw());
    place.left.record(out);
  }
}

}  // namespace sb
