// Streams, events and graphs of the CUDA runtime, on the scheduler.
#include <cuda_runtime_api.h>

#include "softgpu/runtime/device_memory.h"
#include "softgpu/runtime/errors.h"
#include "softgpu/runtime/scheduler.h"

namespace softgpu {
namespace {

struct Event {
  std::shared_ptr<Marker> latest;  // none: not recorded yet
  bool measures = true;
  int device = 0;
};

Event* of(cudaEvent_t event) {
  if (event == nullptr) fail("a function of events is called with none");
  return reinterpret_cast<Event*>(event);
}

struct Graph {
  std::vector<Operation> operations;
};

Graph* of(cudaGraph_t graph) {
  return reinterpret_cast<Graph*>(graph);
}
Graph* of(cudaGraphExec_t graph) {
  return reinterpret_cast<Graph*>(graph);
}

// What may not be asked of a stream that is being captured, nor of the default one beside it.
cudaError_t capture_refusal(const Stream& stream) {
  if (stream.capturing) return cudaErrorStreamCaptureUnsupported;
  Scheduler& scheduler = Scheduler::get();
  if (&stream == scheduler.default_stream(stream.device) && scheduler.captures(stream.device))
    return cudaErrorStreamCaptureImplicit;
  return cudaSuccess;
}

}  // namespace
}  // namespace softgpu

using namespace softgpu;

extern "C" {

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* made, unsigned flags) {
  if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking) return result(cudaErrorInvalidValue);
  const Scheduler::Turn turn;
  Stream* stream = Scheduler::get().make_stream(current_device(), flags == cudaStreamDefault);
  *made = reinterpret_cast<cudaStream_t>(stream);
  return result(cudaSuccess);
}

cudaError_t cudaStreamCreate(cudaStream_t* made) {
  return cudaStreamCreateWithFlags(made, cudaStreamDefault);
}

// What is in the stream is still done.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  const Scheduler::Turn turn;
  Scheduler& scheduler = Scheduler::get();
  if (handle == nullptr) return result(cudaErrorInvalidResourceHandle);
  scheduler.destroy(scheduler.of(handle));
  return result(cudaSuccess);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Scheduler::Turn turn;
  Scheduler& scheduler = Scheduler::get();
  Stream* stream = scheduler.of(handle);
  if (const cudaError_t error = capture_refusal(*stream); error != cudaSuccess) return result(error);
  scheduler.wait_for(turn, scheduler.mark(*stream));
  return result(cudaSuccess);
}

cudaError_t cudaDeviceSynchronize() {
  Scheduler::Turn turn;
  if (Scheduler::get().captures_any(current_device())) return result(cudaErrorStreamCaptureUnsupported);
  Scheduler::get().wait_for_device(turn, current_device());
  return result(cudaSuccess);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* made, unsigned flags) {
  *made = reinterpret_cast<cudaEvent_t>(new Event{nullptr, (flags & cudaEventDisableTiming) == 0, current_device()});
  return result(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t* made) {
  return cudaEventCreateWithFlags(made, cudaEventDefault);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Scheduler::Turn turn;
  delete of(event);
  return result(cudaSuccess);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  const Scheduler::Turn turn;
  Stream* stream = Scheduler::get().of(handle);
  if (const cudaError_t error = capture_refusal(*stream); error != cudaSuccess) return result(error);
  if (of(event)->device != stream->device)
    return refused(cudaErrorInvalidResourceHandle, "an event of device %d is recorded on a stream of device %d",
                   of(event)->device, stream->device);
  of(event)->latest = Scheduler::get().mark(*stream);
  return result(cudaSuccess);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  const Scheduler::Turn turn;
  Stream* stream = Scheduler::get().of(handle);
  if (flags != 0) return result(cudaErrorInvalidValue);
  if (const cudaError_t error = capture_refusal(*stream); error != cudaSuccess) return result(error);
  if (const auto marker = of(event)->latest)
    Scheduler::get().put(*stream, {.what = "wait for an event", .waits = marker});
  return result(cudaSuccess);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Scheduler::Turn turn;
  if (const auto marker = of(event)->latest) Scheduler::get().wait_for(turn, marker);
  return result(cudaSuccess);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Scheduler::Turn turn;
  const auto marker = of(event)->latest;
  return result(!marker || Scheduler::get().ask(marker) ? cudaSuccess : cudaErrorNotReady);
}

// Of the software device itself: no measure of a GPU.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
  const Scheduler::Turn turn;
  const Event &first = *of(begin), &second = *of(end);
  if (!first.latest || !second.latest || !first.measures || !second.measures)
    return refused(cudaErrorInvalidResourceHandle, "the time between events that were not recorded or do not measure");
  if (!first.latest->done || !second.latest->done) return result(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(second.latest->when - first.latest->when).count();
  return result(cudaSuccess);
}

// --- graphs: what was captured, put into a stream whenever it is launched
// ---------------------------------------------

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  const Scheduler::Turn turn;
  Stream* stream = Scheduler::get().of(handle);
  if (handle == nullptr) return result(cudaErrorStreamCaptureUnsupported);
  if (stream->capturing) return result(cudaErrorIllegalState);
  stream->capturing = true;
  stream->capture_mode = mode;
  stream->captured_by = std::this_thread::get_id();
  return result(cudaSuccess);
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  const Scheduler::Turn turn;
  Stream* stream = Scheduler::get().of(handle);
  if (!stream->capturing) return result(cudaErrorIllegalState);
  stream->capturing = false;
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{std::move(stream->captured)});
  stream->captured.clear();
  return result(cudaSuccess);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags) {
  if (flags != 0) return result(cudaErrorInvalidValue);
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*of(graph)));
  return result(cudaSuccess);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  const Scheduler::Turn turn;
  Stream* stream = Scheduler::get().of(handle);
  if (const cudaError_t error = capture_refusal(*stream); error != cudaSuccess) return result(error);
  for (const Operation& operation : of(executable)->operations) Scheduler::get().put(*stream, operation);
  return result(cudaSuccess);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete of(graph);
  return result(cudaSuccess);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete of(executable);
  return result(cudaSuccess);
}

}  // extern "C"
