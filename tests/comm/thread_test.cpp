#include "comm/thread_communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "comm/self_communicator.h"
#include "tests/comm/comm_cases.h"
#include "tests/core/message_of.h"

namespace sb {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

class OnThreads : public testing::TestWithParam<std::tuple<int, CommCase>> {};

TEST_P(OnThreads, Case) {
  const auto& [ranks, test] = GetParam();
  run_thread_ranks(ranks, test.body);
}

INSTANTIATE_TEST_SUITE_P(Comm, OnThreads,
                         testing::Combine(testing::Values(1, 2, 3, 4, 8), testing::ValuesIn(comm_cases())),
                         [](const auto& param_info) {
                           return std::string(std::get<1>(param_info.param).name) + "_" +
                                  std::to_string(std::get<0>(param_info.param));
                         });

class OnSelf : public testing::TestWithParam<CommCase> {};

TEST_P(OnSelf, Case) {
  const auto self = make_self_communicator();
  GetParam().body(*self);
}

INSTANTIATE_TEST_SUITE_P(Comm, OnSelf, testing::ValuesIn(comm_cases()),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

TEST(SelfCommunicator, HasTheNameItIsGiven) {
  const auto self = make_self_communicator("dp", milliseconds(100));
  EXPECT_EQ(self->name(), "dp");
  EXPECT_EQ(self->size(), 1);
  int value = 0;
  CommRequest request = self->receive_async(&value, sizeof value, 0, 0);
  try {
    request.wait();
    FAIL() << "nobody sent anything";
  } catch (const CommTimeout& timeout) {
    EXPECT_THAT(timeout.what(), HasSubstr("rank 0 waited 0.1 s for receive #1 of group dp"));
  }
}

const ThreadCommOptions kImpatient{milliseconds(500), {}};

TEST(ThreadTimeout, NamesRankOperationNumberAndGroup) {
  std::atomic<int> timed_out = 0;
  run_thread_ranks(
      3,
      [&](Communicator& world) {
        const auto dp = world.split(0, 0, "dp");
        dp->barrier();
        if (dp->rank() == 1) {
          while (timed_out < 2) std::this_thread::yield();
          world.barrier();
          EXPECT_THAT(message_of<CommTimeout>([&] { dp->barrier(); }), HasSubstr("group dp is unusable"));
          return;
        }
        const std::string text = message_of<CommTimeout>([&] { dp->all_reduce(1.0f); });
        EXPECT_THAT(text, HasSubstr("waited 0.5 s for all_reduce #2 of group dp; not there: 1"));
        ++timed_out;
        world.barrier();  // only that group is lost
      },
      kImpatient);
}

TEST(ThreadTimeout, EndsTheWaitForAMessage) {
  EXPECT_THAT(message_of<CommTimeout>([] {
                run_thread_ranks(
                    2,
                    [](Communicator& world) {
                      int value = 0;
                      if (world.rank() == 1) world.receive_async(&value, sizeof value, 0, 5).wait();
                    },
                    kImpatient);
              }),
              HasSubstr("rank 1 waited 0.5 s for receive #1 of group world (from rank 0, tag 5, 4 bytes)"));
}

TEST(ThreadFailure, ReachesTheOthersAtOnce) {
  // Time-outs of a minute: the test would not end in time if they had to pass.
  EXPECT_THAT(message_of<UserError>([] {
                run_thread_ranks(4, [](Communicator& world) {
                  if (world.rank() == 2) throw UserError("no such file");
                  EXPECT_THAT(message_of<CommAborted>([&] { world.barrier(); }),
                              HasSubstr("rank 2 ended the job: no such file"));
                });
              }),
              HasSubstr("no such file"));
}

TEST(ThreadFailure, LeavesNoRequestBehind) {
  EXPECT_THAT(message_of<UserError>([] {
                run_thread_ranks(2, [](Communicator& world) {
                  std::vector<float> data(1000);
                  CommRequest request = world.all_reduce_async(data.data(), data.size(), CommType::f32, ReduceOp::sum);
                  if (world.rank() == 0) throw UserError("lost interest");
                  std::this_thread::sleep_for(milliseconds(20));
                  request.wait();
                  // The next one finds that rank 0 is gone.
                  world.all_reduce(std::span<float>(data));
                });
              }),
              HasSubstr("lost interest"));
}

TEST(ThreadFailure, AbortEndsAllGroups) {
  std::atomic<int> ended = 0;
  EXPECT_THAT(message_of<CommAborted>([&] {
                run_thread_ranks(4, [&](Communicator& world) {
                  const auto pair = world.split(world.rank() / 2, 0, "pair");
                  if (world.rank() == 3) pair->abort("a bad gradient");
                  EXPECT_THAT(message_of<CommAborted>([&] { world.barrier(); }), HasSubstr("rank 3 ended the job"));
                  EXPECT_THAT(message_of<CommAborted>([&] { pair->barrier(); }), HasSubstr("a bad gradient"));
                  ++ended;
                });
              }),
              HasSubstr("rank 3 ended the job: a bad gradient"));
  EXPECT_EQ(ended, 3);
}

TEST(ThreadMismatch, OfOperationsIsSaid) {
  EXPECT_THAT(message_of<InternalError>([] {
                run_thread_ranks(2, [](Communicator& world) {
                  if (world.rank() == 0)
                    world.barrier();
                  else
                    world.all_reduce(1);
                });
              }),
              testing::AllOf(HasSubstr("#1 of group world"), HasSubstr("barrier"), HasSubstr("all_reduce")));
}

TEST(ThreadMismatch, OfSizesIsSaid) {
  EXPECT_THAT(message_of<InternalError>([] {
                run_thread_ranks(2, [](Communicator& world) {
                  std::vector<float> data(10);
                  world.all_reduce(std::span<float>(data.data(), 5 + world.rank()));
                });
              }),
              testing::AllOf(HasSubstr("5 elements"), HasSubstr("6 elements")));
  EXPECT_THAT(message_of<InternalError>([] {
                run_thread_ranks(2, [](Communicator& world) {
                  char data[8] = {};
                  if (world.rank() == 0)
                    world.send_async(data, 8, 1, 0).wait();
                  else
                    world.receive_async(data, 4, 0, 0).wait();
                });
              }),
              testing::AllOf(HasSubstr("8 bytes"), HasSubstr("4 bytes")));
}

// The clock of the link model: two messages over one link follow each other, over two links they go side by side.
TEST(ThreadLinks, TakeTheTimeTheyAreGiven) {
  ThreadCommOptions options;
  options.transfer_time = [](int from, int to, int64_t bytes) {
    return std::chrono::nanoseconds(milliseconds(from == 0 ? bytes : 0));
  };
  run_thread_ranks(
      3,
      [](Communicator& world) {
        std::vector<char> data(100);
        std::vector<CommRequest> requests;
        world.barrier();
        const auto begin = std::chrono::steady_clock::now();
        if (world.rank() == 0) {
          requests.push_back(world.send_async(data.data(), 40, 1, 0));
          requests.push_back(world.send_async(data.data() + 40, 30, 1, 0));
          requests.push_back(world.send_async(data.data(), 50, 2, 0));
        } else if (world.rank() == 1) {
          requests.push_back(world.receive_async(data.data(), 40, 0, 0));
          requests.push_back(world.receive_async(data.data() + 40, 30, 0, 0));
        } else {
          requests.push_back(world.receive_async(data.data(), 50, 0, 0));
        }
        EXPECT_FALSE(requests.back().done());
        for (CommRequest& request : requests) request.wait();
        const auto took = std::chrono::steady_clock::now() - begin;
        EXPECT_GE(took, milliseconds(world.rank() == 2 ? 50 : 70));
      },
      options);
}

}  // namespace
}  // namespace sb
