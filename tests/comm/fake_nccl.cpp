// NCCL's interface on host memory, for ranks that are threads of one process: an operation is over when all its ranks
// have called it, and reports that it is in progress till then. What was called is written down.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/float16.h"

namespace {

enum Result { kSuccess = 0, kInvalidArgument = 4, kInvalidUsage = 5, kInProgress = 7 };

struct UniqueId {
  char bytes[128];
};

struct Config {
  size_t size;
  unsigned magic, version;
  int blocking, cga_cluster_size, min_ctas, max_ctas;
};

struct Call {
  std::string kind;
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;
  int type = 0, op = 0, root = 0;
};

struct Operation {
  std::vector<Call> calls;
  std::vector<bool> came;
  size_t arrived = 0;
  bool done = false;
};

struct World {
  int ranks = 0, joined = 0, finalized = 0;
  std::map<int64_t, std::shared_ptr<Operation>> operations;
};

struct Comm {
  std::shared_ptr<World> world;
  int rank = 0;
  int64_t number = 0;
  std::shared_ptr<Operation> last;
  bool finalizing = false;
};

std::mutex mutex;
std::map<std::string, std::shared_ptr<World>> worlds;
std::string calls;
int64_t ids = 0;
std::string hanging;  // operations of this kind never end
std::string failing;  // and of this fail

size_t element(int type) {
  return type == 1 ? 1 : type == 9 ? 2 : type == 2 || type == 7 ? 4 : 8;
}

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
  const size_t bytes = count * element(first.type);
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

void perform(Operation& operation) {
  const Call& first = operation.calls[0];
  const size_t bytes = first.count * element(first.type), ranks = operation.calls.size();
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

Result enter(void* handle, Call call) {
  auto* comm = static_cast<Comm*>(handle);
  std::lock_guard lock(mutex);
  calls += call.kind + " " + std::to_string(call.count) + "\n";
  if (call.kind == failing) return kInvalidUsage;
  if (comm->last && !comm->last->done) return kInvalidUsage;  // it has not been waited for
  std::shared_ptr<Operation>& slot = comm->world->operations[comm->number++];
  if (!slot) {
    slot = std::make_shared<Operation>();
    slot->calls.resize(static_cast<size_t>(comm->world->ranks));
  }
  const bool hangs = call.kind == hanging;
  slot->calls[static_cast<size_t>(comm->rank)] = std::move(call);
  comm->last = slot;
  if (++slot->arrived == slot->calls.size() && !hangs) {
    perform(*slot);
    slot->done = true;
  }
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
}

int ncclGetVersion(int* version) {
  *version = 21903;
  return kSuccess;
}
const char* ncclGetErrorString(int result) {
  return result == kInvalidUsage ? "invalid usage" : "unknown";
}
const char* ncclGetLastError(void*) {
  return "the cable is loose";
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
  *comm = new Comm{world, rank, 0, nullptr, false};
  return kInProgress;
}
int ncclCommGetAsyncError(void* handle, int* state) {
  auto* comm = static_cast<Comm*>(handle);
  std::lock_guard lock(mutex);
  const World& world = *comm->world;
  const bool ready =
      world.joined == world.ranks && (!comm->last || comm->last->done) && (!comm->finalizing || world.finalized > 0);
  *state = ready ? kSuccess : kInProgress;
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
  delete static_cast<Comm*>(handle);
  return kSuccess;
}
int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, void* comm, void*) {
  return enter(comm, {"all_reduce", from, to, count, type, op, 0});
}
int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, void* comm, void*) {
  return enter(comm, {"reduce_scatter", from, to, count, type, op, 0});
}
int ncclAllGather(const void* from, void* to, size_t count, int type, void* comm, void*) {
  return enter(comm, {"all_gather", from, to, count, type, 0, 0});
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* comm, void*) {
  return enter(comm, {"broadcast", from, to, count, type, 0, root});
}
int ncclSend(const void* from, size_t count, int type, int peer, void* comm, void*) {
  if (peer == static_cast<Comm*>(comm)->rank) return kInvalidArgument;
  return enter(comm, {"send", from, nullptr, count, type, 0, peer});
}
int ncclRecv(void* to, size_t count, int type, int peer, void* comm, void*) {
  if (peer == static_cast<Comm*>(comm)->rank) return kInvalidArgument;
  return enter(comm, {"receive", nullptr, to, count, type, 0, peer});
}

}  // extern "C"
