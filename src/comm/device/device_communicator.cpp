#include "comm/device/device_communicator.h"

#include <algorithm>
#include <tuple>

#include "comm/device/device_engine.h"
#include "comm/device/nccl_group.h"
#include "comm/device/staged_group.h"
#include "device/memory.h"

namespace sb {
namespace {

using Kind = DeviceOperation::Kind;

class DeviceRequest final : public CommRequest::State {
 public:
  DeviceRequest(std::shared_ptr<DeviceEngine> engine, std::shared_ptr<DeviceGroup> group,
                std::shared_ptr<DeviceOperation> operation, int rank)
      : engine_(std::move(engine)), group_(std::move(group)), operation_(std::move(operation)), rank_(rank) {}
  void wait() override { engine_->wait(group_, *operation_); }
  bool done() override { return engine_->done(group_, *operation_); }
  void abandon() override { engine_->abandon(group_, *operation_, rank_); }

 private:
  std::shared_ptr<DeviceEngine> engine_;
  std::shared_ptr<DeviceGroup> group_;
  std::shared_ptr<DeviceOperation> operation_;
  const int rank_;
};

using MakeGroup = std::function<std::shared_ptr<DeviceGroup>(std::unique_ptr<Communicator> host)>;

class DeviceCommunicator final : public Communicator {
 public:
  // `control` is used by this object's caller, the group's own by the engine: a thread each.
  DeviceCommunicator(std::shared_ptr<DeviceEngine> engine, MakeGroup make_group, std::unique_ptr<Communicator> control)
      : engine_(std::move(engine)),
        make_group_(std::move(make_group)),
        control_(std::move(control)),
        group_(make_group_(control_->split(0, control_->rank(), control_->name()))) {
    engine_->add(group_);
  }
  ~DeviceCommunicator() override { engine_->remove(group_); }

  int rank() const override { return control_->rank(); }
  int size() const override { return control_->size(); }
  const std::string& name() const override { return control_->name(); }
  std::chrono::milliseconds timeout() const override { return control_->timeout(); }

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    std::unique_ptr<Communicator> part = control_->split(color, key, name);
    if (!part) return nullptr;
    return std::make_unique<DeviceCommunicator>(engine_, make_group_, std::move(part));
  }

  CommRequest all_reduce_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    return collective(Kind::all_reduce, "all_reduce", data, count, type, op, 0);
  }
  CommRequest reduce_scatter_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    return collective(Kind::reduce_scatter, "reduce_scatter", data, count, type, op, 0);
  }
  CommRequest all_gather_async(void* data, int64_t count, CommType type) override {
    return collective(Kind::all_gather, "all_gather", data, count, type, ReduceOp::sum, 0);
  }
  CommRequest broadcast_async(void* data, int64_t count, CommType type, int root) override {
    SB_CHECK(root >= 0 && root < size(), "broadcast from rank {} of group {} of {}", root, name(), size());
    return collective(Kind::broadcast, "broadcast", data, count, type, ReduceOp::sum, root);
  }
  CommRequest barrier_async() override {
    return collective(Kind::barrier, "barrier", nullptr, 0, CommType::u8, ReduceOp::sum, 0);
  }
  CommRequest send_async(const void* data, int64_t bytes, int to, int tag) override {
    return message(Kind::send, const_cast<void*>(data), bytes, to, tag);
  }
  CommRequest receive_async(void* data, int64_t bytes, int from, int tag) override {
    return message(Kind::receive, data, bytes, from, tag);
  }
  void check_usable() const override {
    control_->check_usable();
    engine_->check_usable(*group_);
  }
  [[noreturn]] void abort(const std::string& why, int exit_code) override {
    control_->abort(why, exit_code);
    throw CommAborted(why);  // never reached; the compiler does not see it through the pointer
  }

 private:
  CommRequest collective(Kind kind, const char* kind_name, void* data, int64_t count, CommType type, ReduceOp op,
                         int root) {
    SB_CHECK(count >= 0, "{} of {} elements", kind_name, count);
    auto operation = std::make_shared<DeviceOperation>(engine_->events());
    operation->kind = kind;
    operation->data = data;
    operation->count = count;
    operation->type = type;
    operation->op = op;
    operation->peer = root;
    operation->text = fmt::format("{} #{} of group {}", kind_name, ++collectives_, name());
    return begin(std::move(operation));
  }

  CommRequest message(Kind kind, void* data, int64_t bytes, int other, int tag) {
    SB_CHECK(other >= 0 && other < size(), "a message to or from rank {} of group {} of {}", other, name(), size());
    SB_CHECK(bytes >= 0, "a message of {} bytes", bytes);
    auto operation = std::make_shared<DeviceOperation>(engine_->events());
    operation->kind = kind;
    operation->data = data;
    operation->count = bytes;
    operation->peer = other;
    operation->tag = tag;
    const bool sends = kind == Kind::send;
    operation->text = fmt::format("{} #{} of group {} ({} rank {}, tag {}, {} bytes)", sends ? "send" : "receive",
                                  ++messages_, name(), sends ? "to" : "from", other, tag, bytes);
    return begin(std::move(operation));
  }

  CommRequest begin(std::shared_ptr<DeviceOperation> operation) {
    engine_->begin(group_, operation);
    return CommRequest(std::make_unique<DeviceRequest>(engine_, group_, std::move(operation), rank()));
  }

  std::shared_ptr<DeviceEngine> engine_;
  MakeGroup make_group_;
  std::unique_ptr<Communicator> control_;
  std::shared_ptr<DeviceGroup> group_;
  int64_t collectives_ = 0, messages_ = 0;
};

std::unique_ptr<Communicator> make_communicator(Communicator& host, std::shared_ptr<DeviceEngine> engine,
                                                MakeGroup make_group) {
  return std::make_unique<DeviceCommunicator>(std::move(engine), std::move(make_group),
                                              host.split(0, host.rank(), host.name()));
}

}  // namespace

std::unique_ptr<Communicator> make_staged_communicator(Communicator& host, const DeviceCommOptions& options,
                                                       int64_t piece_bytes) {
  const auto copies = std::make_shared<StagedCopies>(options.device, piece_bytes);
  return make_communicator(host, std::make_shared<DeviceEngine>(options), [copies](std::unique_ptr<Communicator> own) {
    return std::make_shared<StagedGroup>(std::move(own), copies);
  });
}

std::unique_ptr<Communicator> make_nccl_communicator(Communicator& host, const DeviceCommOptions& options,
                                                     const std::filesystem::path& library) {
  const auto nccl = std::make_shared<NcclLibrary>(library);
  return make_communicator(host, std::make_shared<DeviceEngine>(options),
                           [nccl, device = options.device](std::unique_ptr<Communicator> own) {
                             return std::make_shared<NcclGroup>(std::move(own), nccl, device);
                           });
}

void connect_group(Communicator& group, DeviceKind device, const DeviceLines& lines) {
  if (group.size() == 1) return;
  Arena arena = make_arena("connections", Arena::rounded(group.size() * int64_t{sizeof(float)}), device);
  const TensorView values = arena.allocate(DType::f32, {group.size()});
  zero_now(values);
  std::vector<CommRequest> requests;
  const auto finish = [&] {
    for (CommRequest& request : requests) request.wait();
    requests.clear();
    HostCopy{values};  // waits for the device
  };
  if (lines.collectives) {
    requests.push_back(group.all_gather_async(values.raw(), 1, CommType::f32));
    finish();
  }
  // In an order that all ranks share, so that the two sides of the first line still to be made both come to it; every
  // other sender first, so that a ring is not made link by link.
  const int rank = group.rank();
  using Link = std::tuple<int, int, int, int>;  // tag, sender modulo 2, sender, receiver
  std::vector<Link> links;
  for (const DeviceLines::Line& to : lines.to) links.emplace_back(to.tag, rank % 2, rank, to.rank);
  for (const DeviceLines::Line& from : lines.from) links.emplace_back(from.tag, from.rank % 2, from.rank, rank);
  std::ranges::sort(links);
  links.erase(std::unique(links.begin(), links.end()), links.end());  // a rank's line to itself is among both
  for (const auto& [tag, parity, sender, receiver] : links) {
    if (sender == rank) requests.push_back(group.send_async(values.f32(), sizeof(float), receiver, tag));
    if (receiver == rank) requests.push_back(group.receive_async(values.f32() + 1, sizeof(float), sender, tag));
    finish();
  }
  group.barrier();
}

}  // namespace sb
