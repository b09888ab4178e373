// The tests' NCCL on streams of the software device: a call puts the rank's part into its stream, and returns; the
// operation happens when the streams of all ranks have come to it.
#include "softgpu/interface/kernel.h"
#include "softgpu/runtime/scheduler.h"
#include "tests/comm/fake_nccl.h"

namespace fake_nccl {
namespace {

using softgpu::Meeting;
using softgpu::Scheduler;

void check_memory(const Operation& operation, size_t rank) {
  const Call& call = operation.calls[rank];
  const size_t bytes = call.count * element_bytes(call.type), ranks = operation.calls.size();
  const size_t from = call.kind == "reduce_scatter" ? bytes * ranks : bytes;
  const size_t to = call.kind == "all_gather" ? bytes * ranks : bytes;
  const bool reads = call.kind != "receive" && (call.kind != "broadcast" || call.root == static_cast<int>(rank));
  const bool writes = call.kind != "send";
  if ((reads && !softgpu::device_may_touch(call.from, from)) || (writes && !softgpu::device_may_touch(call.to, to)))
    softgpu::fail("NCCL: %s of %zu elements by rank %zu, from %p to %p, is not within memory of the device",
                  call.kind.c_str(), call.count, rank, call.from, call.to);
}

}  // namespace

void submit(const std::shared_ptr<Operation>& operation, size_t rank) {
  const Scheduler::Turn turn;
  if (!operation->of_streams) {
    const auto made = std::make_shared<Meeting>();
    made->what = "NCCL's " + operation->calls[rank].kind + ", operation " + std::to_string(operation->number) +
                 " of a communicator of " + std::to_string(operation->calls.size());
    made->parts.resize(operation->calls.size());
    // (The operation has the meeting: the meeting may not keep the operation.)
    made->perform = [own = std::weak_ptr(operation)] {
      if (const auto locked = own.lock()) {
        perform(*locked);
        locked->done = true;
      }
    };
    operation->of_streams = made;
  }
  const auto meeting = std::static_pointer_cast<Meeting>(operation->of_streams);
  softgpu::Stream* stream = Scheduler::get().of(static_cast<cudaStream_t>(operation->calls[rank].stream));
  if (stream->device != softgpu::current_device())
    softgpu::fail("NCCL: %s on a stream of device %d by rank %zu, whose device is %d", meeting->what.c_str(),
                  stream->device, rank, softgpu::current_device());
  check_memory(*operation, rank);
  operation->accepted = true;
  meeting->parts[rank].stream = stream;
  // It holds the operation until the stream has come by.
  Scheduler::get().put(*stream, {.what = meeting->what, .run = [operation] {}, .meets = meeting, .part = rank});
}

void give_up(Operation& operation) {
  const Scheduler::Turn turn;
  if (!operation.of_streams) return;
  std::static_pointer_cast<Meeting>(operation.of_streams)->given_up = true;
  Scheduler::get().changed();
}

int device_of_caller(int) {
  return softgpu::current_device();
}

}  // namespace fake_nccl
