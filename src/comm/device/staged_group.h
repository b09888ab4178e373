#pragma once

#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "comm/device/device_engine.h"
#include "device/memory.h"

namespace sb {

// What the groups of a rank share.
class StagedCopies {
 public:
  StagedCopies(DeviceKind device, int64_t piece_bytes);

  int64_t piece_bytes() const { return piece_bytes_; }
  DeviceKind device() const { return device_; }
  DeviceEventPool& events() { return events_; }
  void copy(const Exec& queue, const void* from, void* to, int64_t bytes) const;

 private:
  const DeviceKind device_;
  const int64_t piece_bytes_;
  DeviceEventPool events_;
};

// Operations on device memory by way of a host communicator. Collectives stand in one line, messages in one for each
// (direction, other side, tag); in a line two pieces are under way at once: while one is exchanged, the next is copied
// out or the one before it in. Lines have queues of their own: what one waits for keeps no other. With its first data a
// line gets page-locked memory for the two pieces, and keeps it.
class StagedGroup final : public DeviceGroup {
 public:
  StagedGroup(std::unique_ptr<Communicator> host, std::shared_ptr<StagedCopies> copies)
      : host_(std::move(host)), copies_(std::move(copies)) {}
  ~StagedGroup() override;

  void begin(std::shared_ptr<DeviceOperation> operation) override;
  bool advance(const Queued& queued) override;
  bool idle() const override;
  void drop() override;

 private:
  struct Piece {
    explicit Piece(DeviceEventPool& events) : fetched(events.take()), stored(events.take()) {}
    std::shared_ptr<DeviceOperation> operation;
    int64_t begin = 0, count = 0;  // elements of the operation's count
    bool last = false;
    HostMemory buffer;  // of the line; none where there is no data
    enum class State { fetching, exchanging, storing } state = State::fetching;
    DeviceEvent fetched, stored;
    CommRequest request;
    Clock::time_point exchange_begun;
  };
  struct Line {
    explicit Line(DeviceKind device);
    std::shared_ptr<void> out_stream, in_stream;
    Exec out, in;
    std::deque<std::shared_ptr<DeviceOperation>> operations;  // not cut completely yet
    int64_t cut = 0;                                          // elements of the first one
    std::deque<Piece> pieces;
    std::vector<HostMemory> free;  // buffers that no piece uses
    bool has_buffers = false;
  };
  using Key = std::tuple<DeviceOperation::Kind, int, int>;  // collectives: (barrier, 0, 0)

  int64_t element_bytes(const DeviceOperation& operation) const;
  int64_t piece_elements(const DeviceOperation& operation) const;
  HostMemory take_buffer(Line& line) const;
  bool cut_piece(Line& line);
  void fetch(const Line& line, Piece& piece) const;
  bool may_exchange(const Line& line, const Piece& piece) const;
  CommRequest exchange(const Piece& piece);
  void store(const Line& line, Piece& piece) const;
  bool advance(Line& line, const Queued& queued);
  void check_time(const Line& line, const Piece& piece) const;

  std::unique_ptr<Communicator> host_;
  std::shared_ptr<StagedCopies> copies_;
  std::map<Key, Line> lines_;
};

}  // namespace sb
