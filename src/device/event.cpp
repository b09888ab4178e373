#include "device/event.h"

#include "device/cuda.h"

namespace sb {

DeviceEvent::DeviceEvent(DeviceKind device) {
  if (device == DeviceKind::cuda) event_ = cuda::make_event();
}

void DeviceEvent::record(const Exec& exec) {
  recorded_ = true;
  if (event_)
    cuda::record(event_.get(), exec.stream);
  else
    moment_ = std::chrono::steady_clock::now();
}

void DeviceEvent::wait() const {
  if (event_ && recorded_) cuda::wait(event_.get());
}

bool DeviceEvent::passed() const {
  return !event_ || !recorded_ || cuda::passed(event_.get());
}

void DeviceEvent::hold(const Exec& exec) const {
  if (event_ && recorded_) cuda::wait_on_stream(event_.get(), exec.stream);
}

double DeviceEvent::milliseconds_between(const DeviceEvent& begin, const DeviceEvent& end) {
  SB_CHECK(begin.recorded_ && end.recorded_, "time between events that were not recorded");
  if (begin.event_) return cuda::milliseconds_between(begin.event_.get(), end.event_.get());
  return std::chrono::duration<double, std::milli>(end.moment_ - begin.moment_).count();
}

DeviceEventPool::DeviceEventPool(DeviceKind device, int made) : device_(device) {
  if (device == DeviceKind::cpu) return;
  for (int i = 0; i < made; ++i) free_->events.push_back(cuda::make_event(false));
}

DeviceEvent DeviceEventPool::take() {
  DeviceEvent event(DeviceKind::cpu);
  if (device_ == DeviceKind::cpu) return event;
  std::shared_ptr<void> own;
  {
    const std::lock_guard lock(free_->mutex);
    if (!free_->events.empty()) {
      own = std::move(free_->events.back());
      free_->events.pop_back();
    }
  }
  if (!own) own = cuda::make_event(false);
  void* const handle = own.get();
  event.event_ = std::shared_ptr<void>(handle, [own = std::move(own), free = free_](void*) mutable {
    const std::lock_guard lock(free->mutex);
    free->events.push_back(std::move(own));
  });
  return event;
}

}  // namespace sb
