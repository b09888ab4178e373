#include "comm/thread_communicator.h"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "comm/reduce.h"

namespace sb {
namespace {

using Clock = std::chrono::steady_clock;

// What all ranks of the process share. One lock guards every group; data is copied outside it, between the moment all
// took part and the moment they are told.
struct World {
  World(int ranks, const ThreadCommOptions& given) : options(given), wake(ranks) {}

  const ThreadCommOptions options;
  std::mutex mutex;
  std::vector<std::condition_variable> wake;  // one a rank of the world
  std::string aborted;                        // why, once a rank ended the job
  std::map<std::pair<int, int>, Clock::time_point> link_free;

  void wake_all() {
    for (std::condition_variable& condition : wake) condition.notify_all();
  }
};

// One side's view of an operation that may be waited for.
struct Operation {
  bool running = false;  // its data is being moved right now
  bool done = false;
  Clock::time_point ready{};  // a modelled transfer is over only then
  std::string error;          // it failed, for all that took part

  virtual ~Operation() = default;
};

struct Collective : Operation {
  const char* kind = "";
  int64_t count = 0;
  CommType type = CommType::u8;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  std::vector<void*> data;  // a rank
  std::vector<bool> came;
  int arrived = 0;
};

struct Message : Operation {
  void* data = nullptr;
  int64_t bytes = 0;
};

struct Group {
  std::string name;
  std::vector<int> world_rank;  // of every member
  std::string failed;           // why it is unusable
  bool timed_out = false;       // because of a time-out
  std::map<int64_t, std::shared_ptr<Collective>> collectives;
  using Channel = std::tuple<int, int, int>;  // from, to, tag
  std::map<Channel, std::deque<std::shared_ptr<Message>>> sends, receives;

  int size() const { return static_cast<int>(world_rank.size()); }
  [[noreturn]] void refuse(const std::string& what) const {
    const std::string text = fmt::format("{}: {}", what, failed);
    if (timed_out) throw CommTimeout(text);
    throw CommAborted(text);
  }
};

// What split() asks for and gets.
struct SplitEntry {
  int color, key;
  const std::string* name;
  std::shared_ptr<Group> group;
  int rank = -1;
};

void split_group(const Group& old, const std::vector<void*>& data) {
  std::map<int, std::vector<std::pair<int, int>>> members;  // color: (key, old rank)
  for (int r = 0; r < old.size(); ++r) {
    const auto* entry = static_cast<SplitEntry*>(data[r]);
    if (entry->color >= 0) members[entry->color].emplace_back(entry->key, r);
  }
  for (auto& [color, ranks] : members) {
    std::sort(ranks.begin(), ranks.end());
    auto group = std::make_shared<Group>();
    group->name = *static_cast<SplitEntry*>(data[ranks[0].second])->name;
    for (const auto& [key, r] : ranks) {
      auto* entry = static_cast<SplitEntry*>(data[r]);
      entry->rank = group->size();
      entry->group = group;
      group->world_rank.push_back(old.world_rank[r]);
    }
  }
}

void reduce_piece(const std::vector<void*>& data, int64_t offset, int64_t count, CommType type, ReduceOp op,
                  std::vector<char>& sum) {
  const int64_t bytes = count * comm_type_bytes(type);
  sum.resize(bytes);
  std::memcpy(sum.data(), static_cast<char*>(data[0]) + offset, bytes);
  for (size_t r = 1; r < data.size(); ++r) combine(sum.data(), static_cast<char*>(data[r]) + offset, count, type, op);
}

// The work of a collective all have come to.
void perform(const Group& group, const Collective& c) {
  const std::string_view kind = c.kind;
  const int size = group.size();
  const int64_t element = comm_type_bytes(c.type), bytes = c.count * element;
  if (kind == "split") return split_group(group, c.data);
  if (kind == "barrier" || c.count == 0) return;
  constexpr int64_t kPiece = 65536;  // elements at a time, so that the partial sum stays in the cache
  std::vector<char> sum;
  if (kind == "all_reduce") {
    if (size == 1) return;
    for (int64_t begin = 0; begin < c.count; begin += kPiece) {
      const int64_t count = std::min(kPiece, c.count - begin);
      reduce_piece(c.data, begin * element, count, c.type, c.op, sum);
      for (void* data : c.data) std::memcpy(static_cast<char*>(data) + begin * element, sum.data(), count * element);
    }
  } else if (kind == "reduce_scatter") {
    if (size == 1) return;
    for (int r = 0; r < size; ++r)
      for (int64_t begin = 0; begin < c.count; begin += kPiece) {
        const int64_t count = std::min(kPiece, c.count - begin), offset = r * bytes + begin * element;
        reduce_piece(c.data, offset, count, c.type, c.op, sum);
        std::memcpy(static_cast<char*>(c.data[r]) + offset, sum.data(), count * element);
      }
  } else if (kind == "all_gather") {
    for (int from = 0; from < size; ++from)
      for (int to = 0; to < size; ++to)
        if (to != from)
          std::memcpy(static_cast<char*>(c.data[to]) + from * bytes, static_cast<char*>(c.data[from]) + from * bytes,
                      bytes);
  } else if (kind == "broadcast") {
    for (int to = 0; to < size; ++to)
      if (to != c.root) std::memcpy(c.data[to], c.data[c.root], bytes);
  } else {
    throw InternalError("no collective {}", kind);
  }
}

class ThreadRequest final : public CommRequest::State {
 public:
  // `text` names the operation: "all_reduce #812 of group dp".
  ThreadRequest(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank, std::shared_ptr<Operation> op,
                std::string text)
      : world_(std::move(world)), group_(std::move(group)), rank_(rank), op_(std::move(op)), text_(std::move(text)) {}

  void wait() override {
    std::unique_lock lock(world_->mutex);
    const Clock::time_point deadline = Clock::now() + world_->options.timeout;
    for (;;) {
      if (op_->running) {
        wake().wait(lock);
        continue;
      }
      const Clock::time_point now = Clock::now();
      if (finished(now)) return settle();
      if (!op_->done && now >= deadline) return time_out();
      wake().wait_until(lock, op_->done ? op_->ready : deadline);
    }
  }

  bool done() override {
    std::lock_guard lock(world_->mutex);
    return !op_->running && finished(Clock::now());
  }

  // This rank is on its way out with an error: nobody may touch its data afterwards.
  void abandon() override {
    std::unique_lock lock(world_->mutex);
    wake().wait(lock, [&] { return !op_->running; });
    if (op_->done || !world_->aborted.empty() || !group_->failed.empty()) return;
    group_->failed = fmt::format("rank {} failed and left {}", rank_, text_);
    world_->wake_all();
  }

 private:
  std::condition_variable& wake() { return world_->wake[group_->world_rank[rank_]]; }

  bool finished(Clock::time_point now) const {
    if (op_->done) return now >= op_->ready;
    return !world_->aborted.empty() || !group_->failed.empty();
  }

  void settle() {
    if (op_->done && op_->error.empty()) return;
    if (op_->done) throw InternalError("{}", op_->error);
    if (!world_->aborted.empty()) throw CommAborted(world_->aborted);
    group_->refuse(fmt::format("{} of rank {} ended", text_, rank_));
  }

  void time_out() {
    group_->failed = fmt::format("rank {} waited {:g} s for {}", rank_,
                                 std::chrono::duration<double>(world_->options.timeout).count(), text_);
    if (const auto* collective = dynamic_cast<const Collective*>(op_.get())) {
      group_->failed += "; not there:";
      for (int r = 0; r < group_->size(); ++r)
        if (!collective->came[r]) group_->failed += fmt::format(" {}", r);
    }
    group_->timed_out = true;
    world_->wake_all();
    throw CommTimeout(group_->failed);
  }

  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  const int rank_;
  std::shared_ptr<Operation> op_;
  const std::string text_;
};

class ThreadCommunicator final : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<World> world, std::shared_ptr<Group> group, int rank)
      : world_(std::move(world)), group_(std::move(group)), rank_(rank) {}

  int rank() const override { return rank_; }
  int size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name; }
  std::chrono::milliseconds timeout() const override { return world_->options.timeout; }

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    SplitEntry entry{color, key, &name, nullptr};
    collective("split", &entry, 0, CommType::u8, ReduceOp::sum, 0).wait();
    if (color < 0) return nullptr;
    return std::make_unique<ThreadCommunicator>(world_, entry.group, entry.rank);
  }

  CommRequest all_reduce_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    return collective("all_reduce", data, count, type, op, 0);
  }
  CommRequest reduce_scatter_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    return collective("reduce_scatter", data, count, type, op, 0);
  }
  CommRequest all_gather_async(void* data, int64_t count, CommType type) override {
    return collective("all_gather", data, count, type, ReduceOp::sum, 0);
  }
  CommRequest broadcast_async(void* data, int64_t count, CommType type, int root) override {
    SB_CHECK(root >= 0 && root < size(), "broadcast from rank {} of group {} of {}", root, name(), size());
    return collective("broadcast", data, count, type, ReduceOp::sum, root);
  }
  CommRequest barrier_async() override { return collective("barrier", nullptr, 0, CommType::u8, ReduceOp::sum, 0); }

  CommRequest send_async(const void* data, int64_t bytes, int to, int tag) override {
    return message(true, const_cast<void*>(data), bytes, to, tag);
  }
  CommRequest receive_async(void* data, int64_t bytes, int from, int tag) override {
    return message(false, data, bytes, from, tag);
  }

  void check_usable() const override {
    std::lock_guard lock(world_->mutex);
    check_usable_locked();
  }

  [[noreturn]] void abort(const std::string& why, int exit_code) override {
    std::lock_guard lock(world_->mutex);
    if (world_->aborted.empty()) {
      world_->aborted = fmt::format("rank {} ended the job: {}", group_->world_rank[rank_], why);
      world_->wake_all();
    }
    throw CommAborted(world_->aborted);
  }

 private:
  void check_usable_locked() const {
    if (!world_->aborted.empty()) throw CommAborted(world_->aborted);
    if (!group_->failed.empty()) group_->refuse(fmt::format("group {} is unusable", group_->name));
  }

  CommRequest collective(const char* kind, void* data, int64_t count, CommType type, ReduceOp op, int root) {
    SB_CHECK(count >= 0, "{} of {} elements", kind, count);
    std::unique_lock lock(world_->mutex);
    check_usable_locked();
    const int64_t number = ++number_;
    std::shared_ptr<Collective>& slot = group_->collectives[number];
    if (!slot) {
      slot = std::make_shared<Collective>();
      slot->kind = kind;
      slot->count = count;
      slot->type = type;
      slot->op = op;
      slot->root = root;
      slot->data.resize(size());
      slot->came.resize(size());
    }
    const std::shared_ptr<Collective> entry = slot;
    const std::string text = fmt::format("{} #{} of group {}", kind, number, name());
    entry->data[rank_] = data;
    entry->came[rank_] = true;
    ++entry->arrived;
    const bool fits = std::string_view(entry->kind) == kind && entry->count == count && entry->type == type &&
                      entry->op == op && entry->root == root;
    if (!fits && entry->error.empty()) {
      entry->error =
          fmt::format("rank {} calls {} of {} elements, but others {} of {} elements (or another type, root)", rank_,
                      text, count, entry->kind, entry->count);
      group_->failed = entry->error;
      entry->done = true;
      world_->wake_all();
    } else if (entry->arrived == size()) {
      group_->collectives.erase(number);
      entry->running = true;
      lock.unlock();
      std::string error;
      try {
        perform(*group_, *entry);
      } catch (const std::exception& failure) {
        error = fmt::format("{}: {}", text, failure.what());
      }
      lock.lock();
      entry->error = error;
      entry->running = false;
      entry->done = true;
      for (const int r : group_->world_rank) world_->wake[r].notify_all();
    }
    return request(entry, text);
  }

  CommRequest message(bool sends, void* data, int64_t bytes, int other, int tag) {
    SB_CHECK(other >= 0 && other < size(), "a message to or from rank {} of group {} of {}", other, name(), size());
    SB_CHECK(bytes >= 0, "a message of {} bytes", bytes);
    std::unique_lock lock(world_->mutex);
    check_usable_locked();
    const Group::Channel channel = sends ? std::tuple(rank_, other, tag) : std::tuple(other, rank_, tag);
    const std::string text =
        fmt::format("{} #{} of group {} ({} rank {}, tag {}, {} bytes)", sends ? "send" : "receive", ++messages_,
                    name(), sends ? "to" : "from", other, tag, bytes);
    auto mine = std::make_shared<Message>();
    mine->data = data;
    mine->bytes = bytes;
    std::deque<std::shared_ptr<Message>>& waiting = (sends ? group_->receives : group_->sends)[channel];
    if (waiting.empty()) {
      (sends ? group_->sends : group_->receives)[channel].push_back(mine);
      return request(mine, text);
    }
    const std::shared_ptr<Message> theirs = waiting.front();
    waiting.pop_front();
    if (theirs->bytes != bytes) {
      mine->error = theirs->error =
          fmt::format("rank {}: {}, but the other side has {} bytes", rank_, text, theirs->bytes);
      group_->failed = mine->error;
    } else {
      mine->running = theirs->running = true;
      lock.unlock();
      if (bytes > 0) std::memcpy(sends ? theirs->data : data, sends ? data : theirs->data, bytes);
      lock.lock();
      mine->running = theirs->running = false;
      mine->ready = theirs->ready = end_of_transfer(std::get<0>(channel), std::get<1>(channel), bytes);
    }
    mine->done = theirs->done = true;
    world_->wake[group_->world_rank[other]].notify_all();
    return request(mine, text);
  }

  Clock::time_point end_of_transfer(int from, int to, int64_t bytes) {
    if (!world_->options.transfer_time) return {};
    from = group_->world_rank[from];
    to = group_->world_rank[to];
    Clock::time_point& free = world_->link_free[{from, to}];
    free = std::max(free, Clock::now()) + world_->options.transfer_time(from, to, bytes);
    return free;
  }

  CommRequest request(std::shared_ptr<Operation> op, std::string text) {
    return CommRequest(std::make_unique<ThreadRequest>(world_, group_, rank_, std::move(op), std::move(text)));
  }

  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  const int rank_;
  int64_t number_ = 0, messages_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Communicator>> make_thread_communicators(int ranks, const ThreadCommOptions& options) {
  SB_CHECK(ranks > 0, "a world of {} ranks", ranks);
  auto world = std::make_shared<World>(ranks, options);
  auto group = std::make_shared<Group>();
  group->name = "world";
  for (int r = 0; r < ranks; ++r) group->world_rank.push_back(r);
  std::vector<std::unique_ptr<Communicator>> members;
  for (int r = 0; r < ranks; ++r) members.push_back(std::make_unique<ThreadCommunicator>(world, group, r));
  return members;
}

void run_thread_ranks(int ranks, const std::function<void(Communicator& world)>& body,
                      const ThreadCommOptions& options) {
  std::vector<std::unique_ptr<Communicator>> members = make_thread_communicators(ranks, options);
  std::mutex mutex;
  std::exception_ptr first;
  bool first_is_echo = false;  // a rank may hear of another's failure before that one has recorded it
  const auto record = [&](bool echo) {
    std::lock_guard lock(mutex);
    if (first && (!first_is_echo || echo)) return;
    first = std::current_exception();
    first_is_echo = echo;
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r)
    threads.emplace_back([&, r] {
      try {
        body(*members[r]);
      } catch (const std::exception& failure) {
        record(dynamic_cast<const CommAborted*>(&failure) != nullptr);
        try {
          members[r]->abort(failure.what());
        } catch (const CommAborted&) {  // the others know now
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace sb
