#pragma once

#include <deque>
#include <map>
#include <memory>
#include <tuple>

#include "comm/device/device_engine.h"
#include "comm/device/nccl_library.h"

namespace sb {

// Operations on device memory through NCCL. Collectives share one NCCL communicator; messages have one of two ranks for
// each (from, to, tag), with a stream of its own, because NCCL runs what shares a communicator strictly in order. Made
// when first needed, which connect_group() is for. The two sides of a message tell each other over the host's
// communicator when they have come to it, and hand it to NCCL when both have: a device does not spin for what the other
// side does much later.
class NcclGroup final : public DeviceGroup {
 public:
  NcclGroup(std::unique_ptr<Communicator> host, std::shared_ptr<NcclLibrary> library, DeviceKind device);
  ~NcclGroup() override;

  void begin(std::shared_ptr<DeviceOperation> operation) override;
  bool advance(const Queued& queued) override;
  bool idle() const override;
  void drop() override;

 private:
  // What the sides of a message tell each other: how long it is, and the sender of the first one how to meet.
  struct Announcement {
    nccl::UniqueId id;
    int64_t bytes = 0;
  };
  struct Announcements {
    Announcement mine, theirs;
  };
  struct Task {
    std::shared_ptr<DeviceOperation> operation;
    std::unique_ptr<Announcements> announcements;  // of a message
    CommRequest told, heard;                       // on their way; `told` may be a barrier's
    bool asked = false;                            // the requests were made
    Clock::time_point begun;                       // of what it waits for
    bool running = false;                          // the device has come to it
  };
  struct Lane {
    nccl::Comm comm = nullptr;
    enum class State { new_, meeting, initialising, usable, handing_over } state = State::new_;
    int rank = 0, ranks = 1;  // in the NCCL communicator
    nccl::UniqueId id;
    CommRequest meeting;
    std::shared_ptr<void> stream;
    Exec exec;
    std::deque<Task> waiting, handed_over;
    Clock::time_point begun;  // of the state

    void enter(State next) {
      state = next;
      begun = Clock::now();
    }
  };
  using Key = std::tuple<int, int, int>;  // from, to, tag; collectives: (-1, -1, -1)

  Lane& lane(const DeviceOperation& operation);
  bool advance(Lane& lane, const Queued& queued);
  bool advance_self(const Queued& queued);
  bool prepare(Lane& lane, Task& task);
  bool meet(Lane& lane, Task& task);
  void initialise(Lane& lane);
  bool advance_barrier(Lane& lane, Task& task, const Queued& queued);
  void hand_over(Lane& lane, const DeviceOperation& operation);
  bool over_everywhere() const;
  bool settled(Lane& lane) const;
  void check(nccl::Result result, const Lane& lane, const std::string& what) const;
  void check_time(const Lane& lane, const Task& front) const;
  void check_running(Lane& lane);

  std::unique_ptr<Communicator> host_;
  std::shared_ptr<NcclLibrary> library_;
  const DeviceKind device_;
  std::map<Key, Lane> lanes_;
  std::map<int, std::deque<std::shared_ptr<DeviceOperation>>> self_sends_, self_receives_;  // by tag
  std::deque<std::shared_ptr<DeviceOperation>> self_copies_;                                // the receives, queued
  std::shared_ptr<void> self_stream_;
  Exec self_;
};

}  // namespace sb
