#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>

#include "comm/first_rank.h"
#include "comm/message_engine.h"
#include "tests/comm/comm_cases.h"
#include "tests/comm/memory_transport.h"
#include "tests/comm/socket_transport.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

class OnMessages : public testing::TestWithParam<std::tuple<int, CommCase>> {};

TEST_P(OnMessages, Case) {
  const auto& [ranks, test] = GetParam();
  run_message_ranks(ranks, std::chrono::seconds(60), test.body);
}

INSTANTIATE_TEST_SUITE_P(Comm, OnMessages,
                         testing::Combine(testing::Values(1, 2, 3, 5), testing::ValuesIn(comm_cases())),
                         [](const auto& param_info) {
                           return std::string(std::get<1>(param_info.param).name) + "_" +
                                  std::to_string(std::get<0>(param_info.param));
                         });

// The ends of a socket, which the tests of NCCL give to processes.
TEST(OnSockets, AllCases) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([rank, socket = ends[rank]] {
      const auto world = make_message_communicator([&] { return std::make_unique<SocketTransport>(socket, rank); },
                                                   std::chrono::seconds(60));
      for (const CommCase& test : comm_cases()) {
        test.body(*world);
        world->barrier();
      }
    });
  for (std::thread& rank : ranks) rank.join();
}

TEST(MessageTimeout, NamesRankOperationNumberAndGroup) {
  std::atomic<int> gone = 0;
  run_message_ranks(3, milliseconds(600), [&](Communicator& world) {
    const auto dp = world.split(0, 0, "dp");
    if (world.rank() == 1) {
      while (gone < 2) std::this_thread::yield();
      return;
    }
    std::vector<float> data(10'000);
    EXPECT_THAT(
        message_of<CommTimeout>([&] { dp->all_reduce(std::span<float>(data)); }),
        testing::AllOf(HasSubstr("waited 0.6 s for all_reduce #1 of group dp"), HasSubstr("nothing came from rank 1")));
    EXPECT_THAT(message_of<CommTimeout>([&] { world.barrier(); }), HasSubstr("group world is unusable"));
    ++gone;
  });
}

// Different collectives never take each other's data.
TEST(MessageMismatch, OfOperationsTimesOut) {
  run_message_ranks(2, milliseconds(600), [&](Communicator& world) {
    std::vector<float> data(10, 1.0f);
    const std::string text = message_of<CommTimeout>([&] {
      if (world.rank() == 0)
        world.broadcast(std::span<float>(data), 1);
      else
        world.all_reduce(std::span<float>(data));
    });
    EXPECT_THAT(text, HasSubstr(world.rank() == 0 ? "broadcast #1 of group world" : "all_reduce #1 of group world"));
    EXPECT_EQ(data[0], 1.0f);
  });
}

TEST(MessageMismatch, OfSizesIsSaid) {
  std::atomic<int> gone = 0;
  run_message_ranks(2, milliseconds(3000), [&](Communicator& world) {
    char data[8] = {};
    if (world.rank() == 0) {
      world.send_async(data, 4, 1, 0).wait();
    } else {
      EXPECT_THAT(message_of<InternalError>([&] { world.receive_async(data, 8, 0, 0).wait(); }),
                  testing::AllOf(HasSubstr("receive #1 of group world"), HasSubstr("4 bytes came, 8 were expected")));
    }
    ++gone;
    while (gone < 2) std::this_thread::yield();
  });
}

// Its work takes longer than anybody waits for a message.
TEST(FirstRank, TheOthersWaitForItHoweverLongItTakes) {
  std::atomic<bool> done = false;
  run_message_ranks(3, milliseconds(1000), [&](Communicator& world) {
    on_first_rank(world, [&] {
      EXPECT_EQ(world.rank(), 0);
      std::this_thread::sleep_for(milliseconds(2500));
      done = true;
    });
    EXPECT_TRUE(done);
    world.barrier();
  });
}

TEST(AllRanks, WaitForTheSlowestHoweverLongItTakes) {
  std::atomic<int> done = 0;
  run_message_ranks(3, milliseconds(1000), [&](Communicator& world) {
    on_all_ranks(world, [&] {
      if (world.rank() == 1) std::this_thread::sleep_for(milliseconds(2500));
      ++done;
    });
    EXPECT_EQ(done, 3);
    world.barrier();
  });
}

TEST(MessageFailure, OfTheTransportIsARankThatWasLost) {
  std::atomic<int> gone = 0;
  run_message_ranks(2, milliseconds(3000), [&](Communicator& world) {
    char data[8] = {};
    if (world.rank() == 0)
      world.send_async(data, 8, 1, 0).wait();
    else
      EXPECT_THAT(message_of<CommAborted>([&] { world.receive_async(data, 4, 0, 0).wait(); }),
                  testing::AllOf(HasSubstr("receive #1 of group world"), HasSubstr("message truncated")));
    ++gone;
    while (gone < 2) std::this_thread::yield();
  });
}

TEST(MessageFailure, OfARankEndsItsRequests) {
  std::atomic<bool> gone = false;
  run_message_ranks(2, milliseconds(30'000), [&](Communicator& world) {
    if (world.rank() == 1) {
      while (!gone) std::this_thread::yield();
      return;
    }
    EXPECT_EQ(message_of<UserError>([&] {
                int value = 0;
                CommRequest request = world.receive_async(&value, sizeof value, 1, 0);
                throw UserError("no such file");
              }),
              "no such file");
    EXPECT_THAT(message_of<CommAborted>([&] { world.barrier(); }), HasSubstr("rank 0 failed and left receive #1"));
    gone = true;
  });
}

TEST(MessageOpen, SaysWhyItCannot) {
  EXPECT_THAT(message_of<UserError>([] {
                make_message_communicator(
                    []() -> std::unique_ptr<Transport> { throw std::runtime_error("no network"); }, milliseconds(100));
              }),
              HasSubstr("no network"));
}

// Writes down what is sent and lets all of it be over at once, without touching the data.
class CountingTransport final : public Transport {
 public:
  explicit CountingTransport(std::vector<int64_t>& sizes) : sizes_(sizes) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  int64_t send(const void* data, int64_t bytes, int to, int tag) override { return post(bytes); }
  int64_t receive(void* data, int64_t bytes, int from, int tag) override { return post(bytes); }
  void poll(std::vector<Finished>& finished) override {
    finished.insert(finished.end(), finished_.begin(), finished_.end());
    finished_.clear();
  }
  void close() override {}
  void abort(int) override {}

 private:
  int64_t post(int64_t bytes) {
    EXPECT_LE(bytes, kLargestMessage);
    sizes_.push_back(bytes);
    finished_.push_back({++ticket_, bytes, ""});
    return ticket_;
  }
  std::vector<int64_t>& sizes_;
  std::vector<Finished> finished_;
  int64_t ticket_ = 0;
};

TEST(MessageSizes, BeyondWhatALibraryTakesGoInParts) {
  const int64_t huge = (int64_t{3} << 30) + 123, parts = huge / Transport::kLargestMessage + 1;
  void* addresses = mmap(nullptr, huge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);  // nobody reads them
  ASSERT_NE(addresses, MAP_FAILED);
  std::vector<int64_t> sizes;
  const auto world =
      make_message_communicator([&] { return std::make_unique<CountingTransport>(sizes); }, milliseconds(5000));
  world->send_async(addresses, huge, 1, 3).wait();
  EXPECT_EQ(std::ssize(sizes), parts);
  world->broadcast_async(addresses, huge / 8, CommType::f64, 0).wait();
  EXPECT_EQ(std::ssize(sizes), 2 * parts);
  int64_t sum = 0;
  for (const int64_t bytes : sizes) sum += bytes;
  EXPECT_EQ(sum, huge + huge / 8 * 8);
  munmap(addresses, huge);
}

// Nothing ever moves; counts how often somebody looks.
class SilentTransport final : public Transport {
 public:
  explicit SilentTransport(std::atomic<int>& looks) : looks_(looks) {}
  int rank() const override { return 0; }
  int size() const override { return 2; }
  int64_t send(const void*, int64_t, int, int) override { return ++tickets_; }
  int64_t receive(void*, int64_t, int, int) override { return ++tickets_; }
  void poll(std::vector<Finished>&) override { ++looks_; }
  void close() override {}
  void abort(int) override {}

 private:
  std::atomic<int>& looks_;
  int64_t tickets_ = 0;
};

std::shared_ptr<MessageOperation> one_byte(std::unique_ptr<MessageSteps> steps) {
  auto operation = std::make_shared<MessageOperation>();
  operation->group = std::make_shared<MessageGroup>(MessageGroup{"world", {0, 1}});
  operation->steps = std::move(steps);
  return operation;
}

// While nobody wants a message the model computes, and the thread that moves messages looks rarely. It looks more often
// while somebody asks whether one is there, as a device's group does while the device may be waiting for it, and while
// something is to be sent, for which the other side may be waiting.
TEST(MessageEngine, TakesShorterNapsWhileSomebodyMayWait) {
  std::atomic<int> looks = 0;
  MessageEngine engine([&] { return std::make_unique<SilentTransport>(looks); }, std::chrono::seconds(60));
  const auto nap_after_looks = [&](int count) {
    for (const int end = looks + count; looks < end;) std::this_thread::sleep_for(milliseconds(1));
    return engine.nap();
  };
  constexpr int kEnough = 30;  // for naps that become longer one by one
  char data = 0;
  const auto receive = one_byte(receive_steps(&data, 1, 1));
  engine.begin(receive);
  const auto longest = nap_after_looks(kEnough);
  EXPECT_EQ(nap_after_looks(kEnough), longest);

  bool shorter = false;
  for (const int end = looks + 2000; !shorter && looks < end;) {
    EXPECT_FALSE(engine.done(*receive));
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    shorter = engine.nap() < longest;
  }
  EXPECT_TRUE(shorter);
  EXPECT_EQ(nap_after_looks(kEnough), longest) << "nobody asks any more";

  const auto send = one_byte(send_steps(&data, 1, 1));
  engine.begin(send);
  EXPECT_LT(nap_after_looks(kEnough), longest);
  engine.abandon(*send);
}

}  // namespace
}  // namespace sb
