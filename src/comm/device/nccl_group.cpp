#include "comm/device/nccl_group.h"

#include <algorithm>
#include <cstring>

#include "device/cuda.h"

namespace sb {
namespace {

using Kind = DeviceOperation::Kind;

// Of the multiprocessors, for one message: enough for the fastest link, little enough for the model beside it.
constexpr int kMessageCtas = 8;

nccl::DataType data_type(CommType type) {
  switch (type) {
    case CommType::u8:
      return nccl::kUint8;
    case CommType::i32:
      return nccl::kInt32;
    case CommType::i64:
      return nccl::kInt64;
    case CommType::f32:
      return nccl::kFloat32;
    case CommType::f64:
      return nccl::kFloat64;
    case CommType::bf16:
      return nccl::kBfloat16;
  }
  throw InternalError("no communication type {}", static_cast<int>(type));
}

nccl::RedOp reduction(ReduceOp op) {
  return op == ReduceOp::sum ? nccl::kSum : op == ReduceOp::max ? nccl::kMax : nccl::kMin;
}

Exec queue_on(DeviceKind device, std::shared_ptr<void>& stream) {
  if (device == DeviceKind::cuda) stream = cuda::make_stream();
  return {.device = device, .stream = stream.get()};
}

}  // namespace

NcclGroup::NcclGroup(std::unique_ptr<Communicator> host, std::shared_ptr<NcclLibrary> library, DeviceKind device)
    : host_(std::move(host)), library_(std::move(library)), device_(device), self_(queue_on(device, self_stream_)) {}

NcclGroup::~NcclGroup() {
  for (auto& [key, lane] : lanes_) {
    if (lane.comm == nullptr) continue;
    // All ranks are on their way out; one that is not there must not keep this one.
    const Clock::time_point begun = Clock::now();
    nccl::Result state = library_->comm_finalize(lane.comm);
    while ((state == nccl::kSuccess || state == nccl::kInProgress) && Clock::now() - begun < host_->timeout()) {
      if (library_->comm_get_async_error(lane.comm, &state) != nccl::kSuccess || state != nccl::kInProgress) break;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    if (state == nccl::kSuccess)
      library_->comm_destroy(lane.comm);
    else
      library_->comm_abort(lane.comm);
  }
}

void NcclGroup::begin(std::shared_ptr<DeviceOperation> operation) {
  if (operation->message() && operation->peer == host_->rank()) {
    const int tag = operation->tag;
    (operation->kind == Kind::send ? self_sends_ : self_receives_)[tag].push_back(std::move(operation));
    return;
  }
  Lane& own = lane(*operation);
  Task& task = own.waiting.emplace_back();
  if (operation->message()) task.announcements = std::make_unique<Announcements>();
  task.operation = std::move(operation);
  task.begun = Clock::now();
}

NcclGroup::Lane& NcclGroup::lane(const DeviceOperation& operation) {
  const int rank = host_->rank();
  Key key{-1, -1, -1};
  if (operation.kind == Kind::send) key = {rank, operation.peer, operation.tag};
  if (operation.kind == Kind::receive) key = {operation.peer, rank, operation.tag};
  const auto [place, is_new] = lanes_.try_emplace(key);
  Lane& found = place->second;
  if (is_new) {
    found.rank = operation.message() ? (operation.kind == Kind::send ? 0 : 1) : rank;
    found.ranks = operation.message() ? 2 : host_->size();
    found.exec = queue_on(device_, found.stream);
  }
  return found;
}

bool NcclGroup::idle() const {
  const auto empty = [](const auto& lines) {
    return std::all_of(lines.begin(), lines.end(), [](const auto& entry) { return entry.second.empty(); });
  };
  return empty(self_sends_) && empty(self_receives_) && self_copies_.empty() &&
         std::all_of(lanes_.begin(), lanes_.end(), [](const auto& entry) {
           return entry.second.waiting.empty() && entry.second.handed_over.empty();
         });
}

void NcclGroup::drop() {
  for (auto& [key, lane] : lanes_) {
    lane.meeting.abandon();
    for (Task& task : lane.waiting) {
      task.told.abandon();
      task.heard.abandon();
    }
    if (lane.comm != nullptr) library_->comm_abort(lane.comm);
    lane.comm = nullptr;  // gone, whatever fails from here on
  }
  if (device_ == DeviceKind::cuda) {
    cuda::synchronize(self_.stream);
    for (auto& [key, lane] : lanes_) cuda::synchronize(lane.exec.stream);
  }
  lanes_.clear();
  self_copies_.clear();
  self_sends_.clear();
  self_receives_.clear();
}

bool NcclGroup::advance(const Queued& queued) {
  // The library does not hear of a rank of this process that failed: what waits for it would wait until its time is
  // over.
  if (!idle()) host_->check_usable();
  bool moved = advance_self(queued);
  for (auto& [key, lane] : lanes_) moved = advance(lane, queued) || moved;
  return moved;
}

bool NcclGroup::advance_self(const Queued& queued) {
  bool moved = false;
  for (auto& [tag, sends] : self_sends_) {
    auto& receives = self_receives_[tag];
    for (; !sends.empty() && !receives.empty(); moved = true) {
      DeviceOperation &from = *sends.front(), &to = *receives.front();
      SB_CHECK(from.count == to.count, "rank {}: {}, but the other side has {} bytes", host_->rank(), to.text,
               from.count);
      from.ready.hold(self_);
      to.ready.hold(self_);
      if (from.count > 0 && device_ == DeviceKind::cuda) cuda::copy(self_.stream, from.data, to.data, from.count);
      if (from.count > 0 && device_ == DeviceKind::cpu)
        std::memcpy(to.data, from.data, static_cast<size_t>(from.count));
      for (DeviceOperation* operation : {&from, &to}) {
        operation->over.record(self_);
        queued(*operation);
      }
      self_copies_.push_back(receives.front());
      sends.pop_front();
      receives.pop_front();
    }
  }
  for (; !self_copies_.empty() && self_copies_.front()->over.passed(); moved = true) self_copies_.pop_front();
  // Nobody else will ever bring the other half.
  for (auto* lines : {&self_sends_, &self_receives_})
    for (const auto& [tag, operations] : *lines)
      for (const auto& operation : operations)
        if (waited_for(*operation, {}) >= host_->timeout()) throw_timeout(host_->rank(), host_->timeout(), *operation);
  return moved;
}

bool NcclGroup::advance(Lane& lane, const Queued& queued) {
  bool moved = false;
  if (!lane.waiting.empty()) {
    Task& task = lane.waiting.front();
    DeviceOperation& operation = *task.operation;
    bool over = false;
    if (operation.kind == Kind::barrier) {
      over = advance_barrier(lane, task, queued);
    } else if (lane.state == Lane::State::handing_over) {
      over = settled(lane);
    } else if (prepare(lane, task)) {
      operation.ready.hold(lane.exec);
      lane.enter(Lane::State::handing_over);
      if (operation.count > 0) hand_over(lane, operation);
      over = settled(lane);
      moved = true;
    }
    if (over && operation.kind != Kind::barrier) {
      lane.enter(lane.comm == nullptr ? Lane::State::new_ : Lane::State::usable);
      operation.over.record(lane.exec);
      queued(operation);
      lane.handed_over.push_back(std::move(task));
    }
    if (over) {
      lane.waiting.pop_front();
      moved = true;
    } else {
      check_time(lane, task);
    }
  }
  check_running(lane);
  while (!lane.handed_over.empty() && lane.handed_over.front().operation->over.passed()) {
    lane.handed_over.pop_front();
    moved = true;
  }
  return moved;
}

// True: the operation can be handed over.
bool NcclGroup::prepare(Lane& lane, Task& task) {
  const DeviceOperation& operation = *task.operation;
  if (operation.message()) {
    if (!task.asked) {
      // A side takes part when its stream has come so far.
      if (!operation.ready.passed()) {
        task.begun = Clock::now();
        return false;
      }
      const bool sends = operation.kind == Kind::send;
      auto& [mine, theirs] = *task.announcements;
      if (sends && lane.state == Lane::State::new_) check(library_->get_unique_id(&lane.id), lane, "ncclGetUniqueId");
      mine.id = lane.id;
      mine.bytes = operation.count;
      // Tags by direction: this rank may send to the other under the same tag.
      const int forth = 2 * operation.tag, back = forth + 1;
      task.told = host_->send_async(&mine, sizeof mine, operation.peer, sends ? forth : back);
      task.heard = host_->receive_async(&theirs, sizeof theirs, operation.peer, sends ? back : forth);
      task.asked = true;
      task.begun = Clock::now();
    }
    if (!task.told.done() || !task.heard.done()) return false;
    task.told.wait();
    task.heard.wait();
    const Announcement& theirs = task.announcements->theirs;
    SB_CHECK(theirs.bytes == operation.count, "rank {}: {}, but the other side has {} bytes", host_->rank(),
             operation.text, theirs.bytes);
    if (lane.state == Lane::State::new_ && operation.kind == Kind::receive) lane.id = theirs.id;
  }
  if (operation.count == 0) return lane.state == Lane::State::new_ || lane.state == Lane::State::usable;
  return meet(lane, task);
}

bool NcclGroup::meet(Lane& lane, Task& task) {
  if (lane.state == Lane::State::new_) {
    if (task.operation->message()) {
      initialise(lane);
    } else {
      if (host_->rank() == 0) check(library_->get_unique_id(&lane.id), lane, "ncclGetUniqueId");
      lane.meeting = host_->broadcast_async(&lane.id, sizeof lane.id, CommType::u8, 0);
      lane.enter(Lane::State::meeting);
    }
  }
  if (lane.state == Lane::State::meeting && lane.meeting.done()) {
    lane.meeting.wait();
    initialise(lane);
  }
  if (lane.state == Lane::State::initialising && settled(lane)) lane.enter(Lane::State::usable);
  return lane.state == Lane::State::usable;
}

void NcclGroup::initialise(Lane& lane) {
  nccl::Config config;
  config.blocking = 0;
  if (lane.waiting.front().operation->message()) config.max_ctas = kMessageCtas;
  lane.enter(Lane::State::initialising);
  check(library_->comm_init_rank_config(&lane.comm, lane.ranks, lane.id, lane.rank, &config), lane,
        "ncclCommInitRankConfig");
}

bool NcclGroup::advance_barrier(Lane& lane, Task& task, const Queued& queued) {
  if (!task.asked) {
    if (!task.operation->ready.passed() || !over_everywhere()) {
      task.begun = Clock::now();
      return false;
    }
    task.told = host_->barrier_async();
    task.asked = true;
    task.begun = Clock::now();
  }
  if (!task.told.done()) return false;
  task.told.wait();
  task.operation->over.record(lane.exec);
  queued(*task.operation);
  return true;
}

bool NcclGroup::over_everywhere() const {
  return self_copies_.empty() &&
         std::all_of(lanes_.begin(), lanes_.end(), [](const auto& entry) { return entry.second.handed_over.empty(); });
}

void NcclGroup::hand_over(Lane& lane, const DeviceOperation& operation) {
  const auto count = static_cast<size_t>(operation.count);
  const nccl::DataType type = data_type(operation.type);
  auto* data = static_cast<char*>(operation.data);
  char* own_part = data + host_->rank() * operation.bytes();
  void* stream = lane.exec.stream;
  nccl::Result result = nccl::kSuccess;
  switch (operation.kind) {
    case Kind::all_reduce:
      result = library_->all_reduce(data, data, count, type, reduction(operation.op), lane.comm, stream);
      break;
    case Kind::reduce_scatter:
      result = library_->reduce_scatter(data, own_part, count, type, reduction(operation.op), lane.comm, stream);
      break;
    case Kind::all_gather:
      result = library_->all_gather(own_part, data, count, type, lane.comm, stream);
      break;
    case Kind::broadcast:
      result = library_->broadcast(data, data, count, type, operation.peer, lane.comm, stream);
      break;
    case Kind::send:
      result = library_->send(data, count, type, 1, lane.comm, stream);
      break;
    case Kind::receive:
      result = library_->receive(data, count, type, 0, lane.comm, stream);
      break;
    case Kind::barrier:
      throw InternalError("a barrier is the host's");
  }
  check(result, lane, operation.text);
}

// The library works in the background where it has to set something up.
bool NcclGroup::settled(Lane& lane) const {
  if (lane.comm == nullptr) return true;
  nccl::Result state = nccl::kSuccess;
  check(library_->comm_get_async_error(lane.comm, &state), lane, "ncclCommGetAsyncError");
  check(state, lane, lane.waiting.front().operation->text);
  return state == nccl::kSuccess;
}

void NcclGroup::check(nccl::Result result, const Lane& lane, const std::string& what) const {
  if (result == nccl::kSuccess || result == nccl::kInProgress) return;
  throw CommAborted(fmt::format("rank {}: {} failed: {}", host_->rank(), what, library_->message(result, lane.comm)));
}

void NcclGroup::check_time(const Lane& lane, const Task& front) const {
  const Clock::time_point begun = std::max(front.begun, lane.begun);
  for (const Task& task : lane.waiting)
    if (waited_for(*task.operation, begun) >= host_->timeout())
      throw_timeout(host_->rank(), host_->timeout(), *front.operation);
}

// What the device works on takes too long when the data of this rank has long been there: another one is missing.
void NcclGroup::check_running(Lane& lane) {
  if (lane.handed_over.empty()) return;
  Task& task = lane.handed_over.front();
  if (!task.running && task.operation->ready.passed()) {
    task.running = true;
    task.begun = Clock::now();
  }
  if (lane.comm != nullptr && !task.operation->over.passed()) {
    nccl::Result state = nccl::kSuccess;
    check(library_->comm_get_async_error(lane.comm, &state), lane, "ncclCommGetAsyncError");
    check(state, lane, task.operation->text);
  }
  if (task.running && !task.operation->over.passed() && Clock::now() - task.begun >= host_->timeout())
    throw_timeout(host_->rank(), host_->timeout(), *task.operation);
}

}  // namespace sb
