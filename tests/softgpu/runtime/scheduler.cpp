#include "softgpu/runtime/scheduler.h"

#include <algorithm>
#include <cstdio>

#include "softgpu/interface/options.h"
#include "softgpu/runtime/device_memory.h"
#include "softgpu/runtime/device_model.h"

namespace softgpu {
namespace {

// After so long without anything done or asked for, threads wait for each other.
constexpr std::chrono::seconds kPatience{120};

thread_local bool has_turn = false;

bool starts_early(const Operation& operation) {
  return operation.kernel && operation.kernel->early;
}

}  // namespace

Scheduler& Scheduler::get() {
  static auto* scheduler = new Scheduler;  // never destroyed: what is destroyed at exit still uses it
  return *scheduler;
}

Scheduler::Scheduler() : random_(options().streams_seed) {
  for (int device = 0; device < device_model().devices; ++device) make_stream(device, true);
}

Scheduler::Turn::Turn(Scheduler& scheduler) : lock_(scheduler.mutex_, std::defer_lock) {
  if (has_turn) fail("a kernel calls a function of the host's runtime");
  lock_.lock();
  has_turn = true;
}

Scheduler::Turn::~Turn() {
  has_turn = false;
  DeviceMemory::get().close();
}

bool Scheduler::is_in_turn() {
  return has_turn;
}

Stream* Scheduler::make_stream(int device, bool blocking) {
  return streams_.emplace_back(std::make_unique<Stream>(made_++, device, blocking)).get();
}

void Scheduler::destroy(Stream* stream) {
  stream->destroyed_ = true;
  if (stream->queue_.empty()) std::erase_if(streams_, [&](const auto& own) { return own.get() == stream; });
}

Stream* Scheduler::default_stream(int device) {
  return streams_[static_cast<size_t>(device)].get();
}

Stream* Scheduler::of(cudaStream_t handle) {
  if (handle == nullptr) return default_stream(current_device());
  for (const auto& own : streams_)
    if (own.get() == reinterpret_cast<Stream*>(handle) && !own->destroyed_) return own.get();
  fail("%p is no stream, or none any more", static_cast<void*>(handle));
}

bool Scheduler::captures(int device) const {
  return std::ranges::any_of(streams_,
                             [&](const auto& own) { return own->device == device && own->blocking && own->capturing; });
}

bool Scheduler::captures_any(int device) const {
  return std::ranges::any_of(streams_, [&](const auto& own) { return own->device == device && own->capturing; });
}

bool Scheduler::forbids_waits() const {
  return std::ranges::any_of(streams_, [](const auto& own) {
    const bool here = own->captured_by == std::this_thread::get_id();
    return own->capturing && (own->capture_mode == cudaStreamCaptureModeGlobal ||
                              (own->capture_mode == cudaStreamCaptureModeThreadLocal && here));
  });
}

// The default stream and the blocking ones wait for each other.
void Scheduler::put(Stream& stream, Operation operation) {
  if (stream.capturing) {
    stream.captured.push_back(std::move(operation));
    return;
  }
  const auto follow = [&](Stream& first) {
    if (first.queue_.empty()) return;
    auto marker = std::make_shared<Marker>();
    marker->stream = &first;
    first.queue_.push_back({.what = "order of the default stream", .marks = marker});
    stream.queue_.push_back({.what = "order of the default stream", .waits = marker});
  };
  Stream* const standard = default_stream(stream.device);
  if (&stream == standard) {
    for (const auto& own : streams_)
      if (own.get() != standard && own->blocking && own->device == stream.device) follow(*own);
  } else if (stream.blocking) {
    follow(*standard);
  }
  stream.queue_.push_back(std::move(operation));
  changed();
  if (options().streams == When::eager) {
    circle_ = missing_ = false;
    for (bool moved = true; moved;) {
      moved = false;
      // What waited for this may go on, too.
      for (size_t i = 0; i < streams_.size(); ++i)
        while (i < streams_.size() && step(*streams_[i])) moved = true;
    }
  }
  if (options().streams == When::random) wander();
}

std::shared_ptr<Marker> Scheduler::mark(Stream& stream) {
  auto marker = std::make_shared<Marker>();
  marker->stream = &stream;
  put(stream, {.what = "a place that is waited for", .marks = marker});
  return marker;
}

void Scheduler::changed() {
  ++changes_;
  changed_.notify_all();
}

// A few operations of any streams. What keeps them waiting says nothing about who waits now.
void Scheduler::wander() {
  const bool circle = circle_, missing = missing_;
  for (auto steps = random_() % 3; steps > 0; --steps) step(*streams_[random_() % streams_.size()]);
  circle_ = circle;
  missing_ = missing;
}

// Brings the first operation of a stream to its end; false: there is none, or it has to wait.
bool Scheduler::step(Stream& stream) {
  if (stream.going_) circle_ = true;
  if (stream.going_ || stream.queue_.empty()) return false;
  Operation& operation = stream.queue_.front();
  stream.going_ = true;
  const bool may = (!operation.waits || reach(operation.waits)) && (!operation.meets || meet(operation));
  if (may && operation.kernel) {
    run_kernels_of(stream);
  } else if (may) {
    if (operation.run) {
      DeviceMemory::get().open();
      operation.run();
    }
    if (operation.marks) {
      operation.marks->done = true;
      operation.marks->when = std::chrono::steady_clock::now();
    }
    stream.queue_.pop_front();
  }
  stream.going_ = false;
  if (!may) return false;
  if (stream.destroyed_ && stream.queue_.empty()) destroy(&stream);
  changed();
  return true;
}

// A kernel, and with it those behind it that may start while it runs.
void Scheduler::run_kernels_of(Stream& stream) {
  std::vector<Kernel> chain;
  do {
    chain.push_back(std::move(*stream.queue_.front().kernel));
    stream.queue_.pop_front();
  } while (!stream.queue_.empty() && starts_early(stream.queue_.front()));
  DeviceMemory::get().open();
  run_kernels(chain);
}

bool Scheduler::reach(const std::shared_ptr<Marker>& marker) {
  while (!marker->done) {
    if (options().streams == When::random && random_() % 4 == 0) wander();
    if (!marker->done && !step(*marker->stream)) return false;
  }
  return true;
}

// True: it has happened. Brings the other streams there.
bool Scheduler::meet(Operation& operation) {
  Meeting& meeting = *operation.meets;
  meeting.parts[operation.part].reached = true;
  for (Meeting::Part& part : meeting.parts) {
    while (!meeting.done && !meeting.given_up && part.stream != nullptr && !part.reached)
      if (!step(*part.stream) && !part.reached) return false;
    if (meeting.done || meeting.given_up) return true;
    if (part.stream == nullptr) {
      missing_ = true;
      return false;
    }
  }
  DeviceMemory::get().open();
  meeting.perform();
  meeting.done = true;
  return true;
}

void Scheduler::wait_for(Turn& turn, const std::shared_ptr<Marker>& marker) {
  for (;;) {
    circle_ = missing_ = false;
    if (reach(marker)) return;
    if (circle_ && !missing_) stuck("streams wait for each other");
    const uint64_t before = changes_;
    DeviceMemory::get().close();
    if (!changed_.wait_for(turn.lock_, kPatience, [&] { return changes_ != before; }))
      stuck("nothing has moved for two minutes");
  }
}

// The latest streams first: what they should have waited for has not been done yet.
void Scheduler::wait_for_device(Turn& turn, int device) {
  std::vector<std::shared_ptr<Marker>> ends;
  for (size_t i = 0; i < streams_.size(); ++i) {
    Stream& stream = *streams_[i];
    if (stream.device != device || stream.queue_.empty()) continue;
    auto marker = std::make_shared<Marker>();
    marker->stream = &stream;
    stream.queue_.push_back({.what = "the end of the device's work", .marks = marker});
    ends.push_back(std::move(marker));
  }
  if (options().streams == When::late) std::ranges::reverse(ends);
  if (options().streams == When::random) std::ranges::shuffle(ends, random_);
  for (const auto& end : ends) wait_for(turn, end);
}

bool Scheduler::ask(const std::shared_ptr<Marker>& marker) {
  circle_ = missing_ = false;
  if (options().streams == When::random) wander();
  if (!marker->done && (options().streams != When::random || random_() % 2 == 0)) step(*marker->stream);
  return marker->done;
}

std::string Scheduler::heads() const {
  std::string text;
  for (const auto& stream : streams_) {
    if (stream->queue_.empty()) continue;
    const Operation& first = stream->queue_.front();
    text += "  stream " + std::to_string(stream->number) + ", device " + std::to_string(stream->device) + ", " +
            std::to_string(stream->queue_.size()) + " operations, first: " +
            (first.kernel  ? first.kernel->name()
             : first.meets ? first.meets->what
                           : first.what);
    if (first.waits) text += ", behind stream " + std::to_string(first.waits->stream->number);
    if (first.meets)
      for (size_t i = 0; i < first.meets->parts.size(); ++i) {
        const Meeting::Part& part = first.meets->parts[i];
        text += "; rank " + std::to_string(i) + " " +
                (part.stream == nullptr ? "has not called it"
                 : part.reached         ? "is there"
                                        : "has it in stream " + std::to_string(part.stream->number));
      }
    text += "\n";
  }
  return text;
}

void Scheduler::stuck(const char* why) const {
  fail("a deadlock: %s.\n%s", why, heads().c_str());
}

}  // namespace softgpu
