#include "comm/message_communicator.h"

#include <algorithm>

#include "comm/host_name.h"
#include "comm/message_engine.h"
#include "comm/reduce.h"

namespace sb {
namespace {

// Tags: 9 bits of context (which group), 3 bits of kind, 16 bits of the message's own tag or the collective's number.
// Ranks that call different collectives therefore never take each other's data; they time out and say what they did.
enum class WireKind { message, all_reduce, reduce_scatter, all_gather, broadcast, barrier };
constexpr int kContexts = 512, kTags = 1 << 16;
constexpr const char* kKindNames[] = {"message", "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"};

int wire_tag(int context, WireKind kind, int64_t low) {
  return (context << 19) | (static_cast<int>(kind) << 16) | static_cast<int>(low % kTags);
}
static_assert((kContexts << 19) - 1 <= Transport::kLargestTag);

class MessageRequest final : public CommRequest::State {
 public:
  MessageRequest(std::shared_ptr<MessageEngine> engine, std::shared_ptr<MessageOperation> operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}
  void wait() override { engine_->wait(*operation_); }
  bool done() override { return engine_->done(*operation_); }
  void abandon() override { engine_->abandon(*operation_); }

 private:
  std::shared_ptr<MessageEngine> engine_;
  std::shared_ptr<MessageOperation> operation_;
};

class MessageCommunicator final : public Communicator {
 public:
  MessageCommunicator(std::shared_ptr<MessageEngine> engine, std::shared_ptr<const MessageGroup> group)
      : engine_(std::move(engine)), group_(std::move(group)) {}

  int rank() const override { return group_->rank; }
  int size() const override { return static_cast<int>(group_->world_rank.size()); }
  const std::string& name() const override { return group_->name; }
  std::chrono::milliseconds timeout() const override { return engine_->timeout(); }

  std::unique_ptr<Communicator> split(int color, int key, const std::string& name) override {
    struct Entry {
      int color, key, next_context;
    };
    std::vector<Entry> entries(size());
    entries[rank()] = {color, key, engine_->next_context()};
    all_gather_async(entries.data(), sizeof(Entry), CommType::u8).wait();
    int context = 0;
    for (const Entry& entry : entries) context = std::max(context, entry.next_context);
    SB_CHECK(context < kContexts, "more than {} groups made by split", kContexts - 1);
    engine_->use_context(context);
    if (color < 0) return nullptr;
    std::vector<std::pair<int, int>> members;  // (key, old rank)
    for (int r = 0; r < size(); ++r)
      if (entries[r].color == color) members.emplace_back(entries[r].key, r);
    std::sort(members.begin(), members.end());
    auto group = std::make_shared<MessageGroup>();
    group->name = name;
    group->context = context;
    for (const auto& [member_key, r] : members) {
      if (r == rank()) group->rank = static_cast<int>(group->world_rank.size());
      group->world_rank.push_back(group_->world_rank[r]);
    }
    return std::make_unique<MessageCommunicator>(engine_, std::move(group));
  }

  CommRequest all_reduce_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    check_count("all_reduce", count);
    return collective(WireKind::all_reduce, all_reduce_steps(rank(), size(), data, count, type, op));
  }
  CommRequest reduce_scatter_async(void* data, int64_t count, CommType type, ReduceOp op) override {
    check_count("reduce_scatter", count);
    return collective(WireKind::reduce_scatter,
                      reduce_scatter_steps(rank(), equal_pieces(data, count, size(), type), type, op));
  }
  CommRequest all_gather_async(void* data, int64_t count, CommType type) override {
    check_count("all_gather", count);
    return collective(WireKind::all_gather, all_gather_steps(rank(), equal_pieces(data, count, size(), type), type));
  }
  CommRequest broadcast_async(void* data, int64_t count, CommType type, int root) override {
    SB_CHECK(root >= 0 && root < size(), "broadcast from rank {} of group {} of {}", root, name(), size());
    check_count("broadcast", count);
    return collective(WireKind::broadcast, broadcast_steps(rank(), size(), data, count * comm_type_bytes(type), root));
  }
  CommRequest barrier_async() override { return collective(WireKind::barrier, barrier_steps(rank(), size())); }

  CommRequest send_async(const void* data, int64_t bytes, int to, int tag) override {
    check_message(bytes, to, tag);
    return begin(wire_tag(group_->context, WireKind::message, tag),
                 fmt::format("send #{} of group {} (to rank {}, tag {}, {} bytes)", ++messages_, name(),
                             group_->world_rank[to], tag, bytes),
                 send_steps(data, bytes, to));
  }
  CommRequest receive_async(void* data, int64_t bytes, int from, int tag) override {
    check_message(bytes, from, tag);
    return begin(wire_tag(group_->context, WireKind::message, tag),
                 fmt::format("receive #{} of group {} (from rank {}, tag {}, {} bytes)", ++messages_, name(),
                             group_->world_rank[from], tag, bytes),
                 receive_steps(data, bytes, from));
  }

  void place_ranks(std::vector<std::string> places) override { engine_->set_places(std::move(places)); }
  void set_timeout(std::chrono::milliseconds timeout) override { engine_->set_timeout(timeout); }
  void check_usable() const override { engine_->check_usable(*group_); }
  [[noreturn]] void abort(const std::string& why, int exit_code) override {
    engine_->abort(fmt::format("{} ended the job: {}", engine_->name(engine_->rank()), why), exit_code);
  }

 private:
  void check_message(int64_t bytes, int other, int tag) const {
    SB_CHECK(other >= 0 && other < size(), "a message to or from rank {} of group {} of {}", other, name(), size());
    SB_CHECK(bytes >= 0, "a message of {} bytes", bytes);
    SB_CHECK(tag >= 0 && tag < kTags, "a message's tag is below {}, got {}", kTags, tag);
  }

  static void check_count(const char* kind, int64_t count) { SB_CHECK(count >= 0, "{} of {} elements", kind, count); }

  CommRequest collective(WireKind kind, std::unique_ptr<MessageSteps> steps) {
    const char* kind_name = kKindNames[static_cast<int>(kind)];
    const int64_t number = ++collectives_;
    return begin(wire_tag(group_->context, kind, number), fmt::format("{} #{} of group {}", kind_name, number, name()),
                 std::move(steps));
  }

  CommRequest begin(int tag, std::string text, std::unique_ptr<MessageSteps> steps) {
    auto operation = std::make_shared<MessageOperation>();
    operation->group = group_;
    operation->text = std::move(text);
    operation->tag = tag;
    operation->steps = std::move(steps);
    engine_->begin(operation);
    return CommRequest(std::make_unique<MessageRequest>(engine_, std::move(operation)));
  }

  std::shared_ptr<MessageEngine> engine_;
  std::shared_ptr<const MessageGroup> group_;
  int64_t collectives_ = 0, messages_ = 0;
};

std::unique_ptr<MessageCommunicator> make_world(const std::shared_ptr<MessageEngine>& engine) {
  auto group = std::make_shared<MessageGroup>();
  group->name = "world";
  group->rank = engine->rank();
  for (int r = 0; r < engine->size(); ++r) group->world_rank.push_back(r);
  return std::make_unique<MessageCommunicator>(engine, std::move(group));
}

}  // namespace

std::unique_ptr<Communicator> make_message_communicator(const std::function<std::unique_ptr<Transport>()>& open,
                                                        std::chrono::milliseconds timeout) {
  return make_world(std::make_shared<MessageEngine>(open, timeout));
}

std::unique_ptr<Communicator> make_watched_communicator(const std::function<std::unique_ptr<Transport>()>& open,
                                                        const WorldOptions& options) {
  const auto engine = std::make_shared<MessageEngine>(open, options.start_timeout);
  std::unique_ptr<MessageCommunicator> world = make_world(engine);
  engine->set_places(host_names(*world));
  engine->watch_peers(*world, options);
  engine->set_timeout(options.timeout);
  return world;
}

}  // namespace sb
