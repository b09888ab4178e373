// NCCL's interface for ranks that are threads of one process. What was called is written down, and ranks that call
// different things are told of it. When an operation happens is said by fake_nccl_at_once.cpp (host memory) or
// tests/softgpu/nccl/ (streams of the software device).
#include "tests/comm/fake_nccl.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "device/float16.h"

namespace {

using fake_nccl::Call;
using fake_nccl::Operation;

enum Result { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };

struct UniqueId {
  char bytes[128];
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
};

struct World {
  int ranks = 0, joined = 0, finalized = 0;
  std::vector<int> devices;  // of the ranks that joined
  bool shared_device = false;
  std::map<int64_t, std::shared_ptr<Operation>> operations;
};

struct Comm {
  std::shared_ptr<World> world;
  int rank = 0;
  int64_t number = 0;
  std::vector<std::shared_ptr<Operation>> pending;  // the last one last
  bool finalizing = false;
};

std::mutex mutex;
std::map<std::string, std::shared_ptr<World>> worlds;
std::string calls;
int64_t ids = 0;
std::string hanging;  // operations of this kind never end
std::string failing;  // and of this fail
const char* const kLastError = "the cable is loose";
std::string last_error = kLastError;

struct Bf16 {
  uint16_t bits;
  operator float() const { return sb::f32_from_bf16(bits); }
  Bf16() = default;
  explicit Bf16(float value) : bits(sb::bf16_from_f32(value)) {}
};

template <typename T>
void combine(void* into, const void* other, size_t count, int op) {
  auto* a = static_cast<T*>(into);
  const auto* b = static_cast<const T*>(other);
  for (size_t i = 0; i < count; ++i) {
    if (op == 0) a[i] = static_cast<T>(a[i] + b[i]);
    if (op == 2) a[i] = std::max(a[i], b[i]);
    if (op == 3) a[i] = std::min(a[i], b[i]);
  }
}

void reduce(std::vector<char>& into, const Operation& operation, size_t offset, size_t count) {
  const Call& first = operation.calls[0];
  const size_t bytes = count * fake_nccl::element_bytes(first.type);
  into.assign(static_cast<const char*>(first.from) + offset, static_cast<const char*>(first.from) + offset + bytes);
  for (size_t r = 1; r < operation.calls.size(); ++r) {
    const char* other = static_cast<const char*>(operation.calls[r].from) + offset;
    if (first.type == 1) combine<uint8_t>(into.data(), other, count, first.op);
    if (first.type == 2) combine<int32_t>(into.data(), other, count, first.op);
    if (first.type == 4) combine<int64_t>(into.data(), other, count, first.op);
    if (first.type == 7) combine<float>(into.data(), other, count, first.op);
    if (first.type == 8) combine<double>(into.data(), other, count, first.op);
    if (first.type == 9) combine<Bf16>(into.data(), other, count, first.op);
  }
}

}  // namespace

void fake_nccl::perform(Operation& operation) {
  const Call& first = operation.calls[0];
  const size_t bytes = first.count * fake_nccl::element_bytes(first.type), ranks = operation.calls.size();
  std::vector<char> sum;
  if (first.kind == "all_reduce") {
    reduce(sum, operation, 0, first.count);
    for (const Call& call : operation.calls) std::memcpy(call.to, sum.data(), bytes);
  } else if (first.kind == "reduce_scatter") {
    std::vector<std::vector<char>> sums(ranks);
    for (size_t r = 0; r < ranks; ++r) reduce(sums[r], operation, r * bytes, first.count);
    for (size_t r = 0; r < ranks; ++r) std::memcpy(operation.calls[r].to, sums[r].data(), bytes);
  } else if (first.kind == "all_gather") {
    for (size_t to = 0; to < ranks; ++to)
      for (size_t from = 0; from < ranks; ++from)
        std::memmove(static_cast<char*>(operation.calls[to].to) + from * bytes, operation.calls[from].from, bytes);
  } else if (first.kind == "broadcast") {
    const void* from = operation.calls[static_cast<size_t>(first.root)].from;
    for (const Call& call : operation.calls) std::memmove(call.to, from, bytes);
  } else {
    const bool forward = first.kind == "send";  // rank 0 sends to rank 1, or the other way round
    std::memcpy(operation.calls[forward ? 1 : 0].to, operation.calls[forward ? 0 : 1].from, bytes);
  }
}

namespace {

// Why a rank's call is not what the others called; empty: it is.
std::string difference(const Operation& operation, int rank, const Call& call) {
  for (size_t other = 0; other < operation.calls.size(); ++other) {
    const Call& theirs = operation.calls[other];
    if (theirs.kind.empty()) continue;
    const bool message = call.kind == "send" || call.kind == "receive";
    const bool fits = message ? theirs.kind == (call.kind == "send" ? "receive" : "send")
                              : theirs.kind == call.kind && theirs.op == call.op && theirs.root == call.root;
    if (fits && theirs.count == call.count && theirs.type == call.type) continue;
    return "rank " + std::to_string(rank) + " calls " + call.kind + " of " + std::to_string(call.count) +
           " elements of type " + std::to_string(call.type) + " as operation " + std::to_string(operation.number) +
           " of a communicator, rank " + std::to_string(other) + " " + theirs.kind + " of " +
           std::to_string(theirs.count) + " of type " + std::to_string(theirs.type);
  }
  return "";
}

Result enter(void* handle, Call call) {
  auto* comm = static_cast<Comm*>(handle);
  std::lock_guard lock(mutex);
  calls += call.kind + " " + std::to_string(call.count) + "\n";
  if (call.kind == failing) return kInvalidUsage;
  std::erase_if(comm->pending, [](const auto& operation) { return operation->done.load(); });
  if (!comm->pending.empty() && !comm->pending.back()->accepted) return kInvalidUsage;  // it has not been waited for
  std::shared_ptr<Operation>& slot = comm->world->operations[comm->number];
  if (!slot) {
    slot = std::make_shared<Operation>();
    slot->number = comm->number;
    slot->calls.resize(static_cast<size_t>(comm->world->ranks));
  }
  if (const std::string why = difference(*slot, comm->rank, call); !why.empty()) {
    last_error = why;
    return kInvalidUsage;
  }
  ++comm->number;
  const bool hangs = call.kind == hanging;
  const auto rank = static_cast<size_t>(comm->rank);
  slot->calls[rank] = std::move(call);
  comm->pending.push_back(slot);
  const std::shared_ptr<Operation> operation = slot;
  // Nobody asks for it any more once all have called.
  if (++slot->arrived == slot->calls.size()) comm->world->operations.erase(operation->number);
  if (!hangs) fake_nccl::submit(operation, rank);
  return kInProgress;
}

}  // namespace

extern "C" {

// For the tests: what was called since the last time.
void fake_nccl_take_calls(char* into, size_t size) {
  std::lock_guard lock(mutex);
  const size_t count = std::min(size - 1, calls.size());
  std::memcpy(into, calls.data(), count);
  into[count] = 0;
  calls.clear();
}
void fake_nccl_behave(const char* hangs, const char* fails) {
  std::lock_guard lock(mutex);
  hanging = hangs;
  failing = fails;
  last_error = kLastError;
}

int ncclGetVersion(int* version) {
  *version = 21903;
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  return result == kInvalidUsage ? "invalid usage" : "unknown";
}
const char* ncclGetLastError(void*) {
  thread_local std::string told;
  std::lock_guard lock(mutex);
  told = last_error;
  return told.c_str();
}
int ncclGetUniqueId(UniqueId* id) {
  std::lock_guard lock(mutex);
  std::memset(id->bytes, 0, sizeof id->bytes);
  std::snprintf(id->bytes, sizeof id->bytes, "fake %lld", static_cast<long long>(++ids));
  return kSuccess;
}
int ncclCommInitRankConfig(void** comm, int ranks, UniqueId id, int rank, Config* config) {
  std::lock_guard lock(mutex);
  if (config->magic != 0xcafebeef || config->blocking != 0 || rank < 0 || rank >= ranks) return kInvalidArgument;
  calls += "init " + std::to_string(ranks) + "\n";
  if (failing == "init") return kInvalidUsage;
  std::shared_ptr<World>& world = worlds[id.bytes];
  if (!world) world = std::make_shared<World>();
  world->ranks = ranks;
  ++world->joined;
  const int device = fake_nccl::device_of_caller(rank);
  if (std::ranges::find(world->devices, device) != world->devices.end()) {
    last_error = "duplicate GPU: two ranks of a communicator have device " + std::to_string(device);
    world->shared_device = true;
  }
  world->devices.push_back(device);
  *comm = new Comm{world, rank, 0, {}, false};
  return kInProgress;
}
int ncclCommGetAsyncError(void* handle, int* state) {
  auto* comm = static_cast<Comm*>(handle);
  std::lock_guard lock(mutex);
  const World& world = *comm->world;
  const bool ready = world.joined == world.ranks && (comm->pending.empty() || comm->pending.back()->accepted) &&
                     (!comm->finalizing || world.finalized > 0);
  *state = world.shared_device ? kInvalidUsage : ready ? kSuccess : kInProgress;
  return kSuccess;
}
int ncclCommFinalize(void* handle) {
  std::lock_guard lock(mutex);
  static_cast<Comm*>(handle)->finalizing = true;
  ++static_cast<Comm*>(handle)->world->finalized;
  return kInProgress;
}
int ncclCommDestroy(void* handle) {
  delete static_cast<Comm*>(handle);
  return kSuccess;
}
int ncclCommAbort(void* handle) {
  std::lock_guard lock(mutex);
  calls += "abort\n";
  for (const auto& operation : static_cast<Comm*>(handle)->pending) fake_nccl::give_up(*operation);
  delete static_cast<Comm*>(handle);
  return kSuccess;
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* comm, void* stream) {
  return enter(comm, {"all_reduce", from, to, count, type, op, 0, stream});
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, void* comm, void* stream) {
  return enter(comm, {"reduce_scatter", from, to, count, type, op, 0, stream});
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void* stream) {
  return enter(comm, {"all_gather", from, to, count, type, 0, 0, stream});
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* comm, void* stream) {
  return enter(comm, {"broadcast", from, to, count, type, 0, root, stream});
}
int ncclSend(const void* from, size_t count, int type, int peer, void* comm, void* stream) {
  if (peer == static_cast<Comm*>(comm)->rank) return kInvalidArgument;
  return enter(comm, {"send", from, nullptr, count, type, 0, peer, stream});
}
int ncclRecv(void* to, size_t count, int type, int peer, void* comm, void* stream) {
  if (peer == static_cast<Comm*>(comm)->rank) return kInvalidArgument;
  return enter(comm, {"receive", nullptr, to, count, type, 0, peer, stream});
}

}  // extern "C"
