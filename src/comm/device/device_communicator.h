#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "core/tensor.h"

namespace sb {

// Communicators whose buffers lie on a device. Operations stand in the order of a stream: one begins when what was
// queued on the stream before the call is done, and what is queued after its wait() comes after it. wait() itself does
// not wait for the device; what it waits for is said with each implementation. When barrier()
// returns, the earlier collectives of the group and its messages that were waited for are over on the devices of all
// ranks; it throws what any of them failed with. Messages that nobody has waited for yet may still come.
struct DeviceCommOptions {
  DeviceKind device = DeviceKind::cuda;  // cpu: host memory, where everything is done at once; for tests
  void* stream = nullptr;                // of the rank's computations
};

// Takes the data through page-locked host memory, in pieces that are copied out, exchanged and copied back while their
// neighbours are. Needs nothing but the host's communicator (threads, MPI): any number of ranks may share a device, and
// sums are added in rank order. wait() waits until the data is there and its copy to the device is queued. Collective
// over `host`, which must outlive it.
std::unique_ptr<Communicator> make_staged_communicator(Communicator& host, const DeviceCommOptions& options,
                                                       int64_t piece_bytes = int64_t{4} << 20);

// NCCL, loaded when this is called: every rank has a device of its own. wait() waits until the operation is queued.
// UserError when the library is missing. Collective over `host`, which carries what ranks have to tell each other and
// must outlive it. Sums are added in an order of the library's own, the same for the same ranks.
std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const DeviceCommOptions& options,
                                                     const std::filesystem::path& library = "libnccl.so.2");

// What a rank does in a group: its collectives, and the messages it sends and receives, by the other side and the tag.
struct DeviceLines {
  struct Line {
    int rank = 0, tag = 0;
  };
  bool collectives = false;
  std::vector<Line> to = {}, from = {};
};

// Has such a group make now what its first operations would have to make: NCCL's communicators, page-locked memory. A
// number goes every way, so that a rank that cannot be reached is told of here and not in the middle of a step. Nothing
// else runs on this rank's device while something is made. Collective over the group; each rank names its own lines,
// and ranks of several groups connect them in the same order.
void connect_group(Communicator& group, DeviceKind device, const DeviceLines& lines);

}  // namespace sb
