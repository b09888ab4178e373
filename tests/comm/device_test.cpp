// Communicators of device memory: by way of the host, and NCCL. Without a GPU "device" memory is the host's and NCCL a
// library of the tests' own; the same cases run on a GPU where there is one.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <thread>

#include "comm/device/device_communicator.h"
#include "comm/self_communicator.h"
#include "comm/thread_communicator.h"
#include "device/cuda.h"
#include "tests/comm/comm_cases.h"
#include "tests/comm/device_twins.h"
#include "tests/comm/memory_transport.h"

namespace sb {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

// Next to the test itself.
std::filesystem::path fake_library() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / "fake_nccl.so";
}

constexpr DeviceCommOptions kHostMemory{DeviceKind::cpu, nullptr};
// Small, so that operations have many.
constexpr int64_t kPieceBytes = 40'000;

enum class Way { staged, nccl };
std::string name_of(Way way) {
  return way == Way::staged ? "staged" : "nccl";
}

std::unique_ptr<Communicator> make(Way way, Communicator& host, const DeviceCommOptions& options = kHostMemory) {
  if (way == Way::staged) return make_staged_communicator(host, options, kPieceBytes);
  return make_nccl_communicator(host, options, fake_library());
}

class OnHostMemory : public testing::TestWithParam<std::tuple<Way, int, CommCase>> {};

TEST_P(OnHostMemory, Case) {
  const auto& [way, ranks, test] = GetParam();
  run_thread_ranks(ranks, [&, way = way, &body = test.body](Communicator& host) {
    const auto world = make(way, host);
    EXPECT_EQ(world->name(), "world");
    body(*world);
  });
}

INSTANTIATE_TEST_SUITE_P(Device, OnHostMemory,
                         testing::Combine(testing::Values(Way::staged, Way::nccl), testing::Values(1, 2, 3),
                                          testing::ValuesIn(comm_cases())),
                         [](const auto& given) {
                           return name_of(std::get<0>(given.param)) + "_" + std::get<2>(given.param).name + "_" +
                                  std::to_string(std::get<1>(given.param));
                         });

class DeviceFailures : public testing::TestWithParam<Way> {
 protected:
  void TearDown() override { behave("", ""); }

  static void behave(const char* hangs, const char* fails) {
    void* library = dlopen(fake_library().c_str(), RTLD_NOW | RTLD_LOCAL);
    ASSERT_NE(library, nullptr) << dlerror();
    reinterpret_cast<void (*)(const char*, const char*)>(dlsym(library, "fake_nccl_behave"))(hangs, fails);
    dlclose(library);
  }
  static std::string take_calls() {
    void* library = dlopen(fake_library().c_str(), RTLD_NOW | RTLD_LOCAL);
    std::vector<char> text(100'000);
    reinterpret_cast<void (*)(char*, size_t)>(dlsym(library, "fake_nccl_take_calls"))(text.data(), text.size());
    dlclose(library);
    return text.data();
  }

  // What rank 0 hears.
  template <typename Exception>
  std::string message_of_rank_0(int ranks, milliseconds timeout, const std::function<void(Communicator&)>& body) {
    std::string message;
    ThreadCommOptions options;
    options.timeout = timeout;
    run_thread_ranks(
        ranks,
        [&](Communicator& host) {
          const auto world = make(GetParam(), host);
          try {
            body(*world);
            EXPECT_NE(world->rank(), 0) << "nothing was thrown";
          } catch (const Error& error) {
            if (world->rank() != 0) return;
            EXPECT_NE(dynamic_cast<const Exception*>(&error), nullptr) << error.what();
            message = error.what();
          }
        },
        options);
    return message;
  }
};

INSTANTIATE_TEST_SUITE_P(Device, DeviceFailures, testing::Values(Way::staged, Way::nccl),
                         [](const auto& given) { return name_of(given.param); });

TEST_P(DeviceFailures, WhoWaitsTooLongSaysForWhat) {
  const std::string collective = message_of_rank_0<CommTimeout>(2, milliseconds(150), [](Communicator& world) {
    const auto dp = world.split(0, world.rank(), "dp");
    std::vector<float> values(100);
    if (world.rank() == 1) return std::this_thread::sleep_for(milliseconds(600));
    dp->all_reduce(std::span<float>(values));
  });
  EXPECT_THAT(collective, HasSubstr("rank 0 waited 0.15 s for all_reduce #1 of group dp"));
  const std::string message = message_of_rank_0<CommTimeout>(2, milliseconds(150), [](Communicator& world) {
    std::vector<float> values(100);
    if (world.rank() == 1) return std::this_thread::sleep_for(milliseconds(600));
    CommRequest early = world.receive_async(values.data(), 40, 1, 3);
    world.receive_async(values.data() + 10, 80, 1, 4).wait();
  });
  EXPECT_THAT(message, HasSubstr("receive #2 of group world (from rank 1, tag 4, 80 bytes)"));
}

// Data that is asked for long before it is needed may come late.
TEST_P(DeviceFailures, OnlyWhoWaitsCanWaitTooLong) {
  ThreadCommOptions options;
  options.timeout = milliseconds(200);
  run_thread_ranks(
      2,
      [&](Communicator& host) {
        const auto world = make(GetParam(), host);
        int64_t value = 0;
        if (world->rank() == 0) {
          CommRequest request = world->receive_async(&value, sizeof value, 1, 0);
          std::this_thread::sleep_for(milliseconds(500));
          request.wait();
          EXPECT_EQ(value, 17);
        } else {
          value = 17;
          std::this_thread::sleep_for(milliseconds(450));
          world->send_async(&value, sizeof value, 0, 0).wait();
        }
      },
      options);
}

TEST_P(DeviceFailures, AGroupThatFailedRefusesWhatComesAfter) {
  const std::string message = message_of_rank_0<CommTimeout>(2, milliseconds(100), [](Communicator& world) {
    std::vector<float> values(100);
    if (world.rank() == 1) return std::this_thread::sleep_for(milliseconds(400));
    try {
      world.all_reduce(std::span<float>(values));
      ADD_FAILURE() << "nobody else was there";
    } catch (const CommTimeout&) {
    }
    EXPECT_THROW(world.check_usable(), CommTimeout);
    world.broadcast(std::span<float>(values), 0);
  });
  EXPECT_THAT(message, HasSubstr("broadcast #2 of group world cannot begin: rank 0 waited 0.1 s for all_reduce #1"));
}

// A rank that fails in the middle of an operation leaves nothing behind that writes into its memory.
TEST_P(DeviceFailures, ARankThatFailsLeavesItsOperations) {
  EXPECT_THROW(run_thread_ranks(2,
                                [&](Communicator& host) {
                                  const auto world = make(GetParam(), host);
                                  std::vector<float> values(100'000);
                                  const CommRequest request = world->all_reduce_async(values.data(), std::ssize(values),
                                                                                      CommType::f32, ReduceOp::sum);
                                  if (world->rank() == 1) throw UserError("a bad key");
                                  std::vector<float> more(10);
                                  world->all_reduce(std::span<float>(more));
                                }),
               Error);
}

// Also of those that have met already and wait for the library alone.
TEST_P(DeviceFailures, ARankThatFailsEndsWhatOthersWaitFor) {
  std::string heard;
  ThreadCommOptions options;
  options.timeout = milliseconds(5000);
  const auto body = [&](Communicator& host) {
    const auto world = make(GetParam(), host);
    std::vector<float> values(10);
    try {
      world->all_reduce(std::span<float>(values));
      if (world->rank() == 1) {
        std::this_thread::sleep_for(milliseconds(50));  // the other one waits for the second by then
        throw UserError("a bad key");
      }
      world->all_reduce(std::span<float>(values));
    } catch (const CommAborted& error) {
      heard = error.what();
      throw;
    }
  };
  EXPECT_THROW(run_thread_ranks(2, body, options), UserError);
  EXPECT_THAT(heard, HasSubstr("a bad key"));
}

TEST_P(DeviceFailures, MessagesOfOtherLengthsAreRefused) {
  const std::string message = message_of_rank_0<Error>(2, milliseconds(2000), [](Communicator& world) {
    std::vector<char> bytes(100);
    if (world.rank() == 1)
      world.send_async(bytes.data(), 60, 0, 0).wait();
    else
      world.receive_async(bytes.data(), 50, 1, 0).wait();
  });
  EXPECT_THAT(message, HasSubstr("bytes"));
}

class NcclFailures : public DeviceFailures {};
INSTANTIATE_TEST_SUITE_P(Nccl, NcclFailures, testing::Values(Way::nccl),
                         [](const auto& given) { return name_of(given.param); });

TEST_P(NcclFailures, WhatHangsIsAborted) {
  behave("reduce_scatter", "");
  take_calls();
  const std::string message = message_of_rank_0<CommTimeout>(2, milliseconds(150), [](Communicator& world) {
    std::vector<float> values(200);
    world.reduce_scatter(std::span<float>(values), 100);
  });
  EXPECT_THAT(message, HasSubstr("rank 0 waited 0.15 s for reduce_scatter #1 of group world"));
  const std::string calls = take_calls();
  EXPECT_THAT(calls, HasSubstr("init 2\n"));
  EXPECT_THAT(calls, HasSubstr("reduce_scatter 100\n"));
  EXPECT_THAT(calls, HasSubstr("abort\n"));
}

TEST_P(NcclFailures, WhatTheLibraryReportsIsTold) {
  behave("", "all_gather");
  const std::string message = message_of_rank_0<CommAborted>(1, milliseconds(2000), [](Communicator& world) {
    std::vector<float> values(100);
    world.all_gather(std::span<float>(values), 100);
  });
  EXPECT_THAT(message, HasSubstr("all_gather #1 of group world failed: NCCL: invalid usage: the cable is loose"));
}

// Nor does the device of a rank that is far ahead spin for one that is not there yet, though MPI lets short messages go
// at once.
TEST_P(NcclFailures, BothSidesAreThereBeforeAMessageGoes) {
  take_calls();
  run_message_ranks(
      2, milliseconds(20'000),
      [](Communicator& host) {
        const auto world = make(Way::nccl, host);
        std::vector<char> bytes(5000, static_cast<char>(world->rank()));
        for (const int sender : {0, 1}) {
          if (world->rank() == sender) {
            CommRequest send = world->send_async(bytes.data(), 5000, 1 - sender, 3);
            std::this_thread::sleep_for(milliseconds(50));
            EXPECT_EQ(take_calls(), "");
            host.barrier();
            send.wait();
          } else {
            host.barrier();
            world->receive_async(bytes.data(), 5000, sender, 3).wait();
            EXPECT_EQ(bytes, std::vector<char>(5000, static_cast<char>(sender)));
            bytes.assign(5000, static_cast<char>(world->rank()));
          }
          world->barrier();
          if (world->rank() == sender) {
            EXPECT_THAT(take_calls(), testing::AllOf(HasSubstr("send 5000"), HasSubstr("receive 5000")));
          }
          host.barrier();
        }
      },
      1000);
}

// A ring of so many ranks in which messages go both ways, and collectives.
DeviceLines ring_lines(const Communicator& world) {
  const int next = (world.rank() + 1) % world.size(), previous = (world.rank() + world.size() - 1) % world.size();
  return {true, {{next, 3}, {next, 5}, {previous, 5}}, {{previous, 3}, {previous, 5}, {next, 5}}};
}

// Whatever was connected makes nothing more later, and what it carried is not in the way of what comes.
TEST_P(NcclFailures, WhatIsConnectedIsThereFromThenOn) {
  for (const int ranks : {2, 3, 4, 5}) {
    take_calls();
    run_thread_ranks(ranks, [&](Communicator& host) {
      const auto world = make(Way::nccl, host);
      connect_group(*world, DeviceKind::cpu, ring_lines(*world));
      host.barrier();
      if (host.rank() == 0) {
        const std::string calls = take_calls();
        const auto made = [&](int of) {
          const std::string text = "init " + std::to_string(of) + "\n";
          int count = 0;
          for (size_t at = calls.find(text); at != std::string::npos; at = calls.find(text, at + 1)) ++count;
          return count;
        };
        // Where there are two ranks, those before and after are one, and all communicators are of two.
        EXPECT_EQ(made(ranks), ranks == 2 ? 2 + 2 * 2 * 2 : ranks);
        EXPECT_TRUE(ranks == 2 || made(2) == 2 * 3 * ranks) << calls;
      }
      host.barrier();
      std::vector<int64_t> values(static_cast<size_t>(ranks));
      values[static_cast<size_t>(host.rank())] = host.rank();
      world->all_gather(std::span(values), 1);
      int64_t from_previous = -1;
      CommRequest sent = world->send_async(&values[static_cast<size_t>(host.rank())], 8, (host.rank() + 1) % ranks, 3);
      world->receive_async(&from_previous, 8, (host.rank() + ranks - 1) % ranks, 3).wait();
      sent.wait();
      EXPECT_EQ(from_previous, (host.rank() + ranks - 1) % ranks);
      EXPECT_EQ(values.back(), ranks - 1);
      host.barrier();
      if (host.rank() == 0) {
        EXPECT_THAT(take_calls(), testing::Not(HasSubstr("init")));
      }
    });
  }
}

TEST_P(NcclFailures, WhoCannotConnectIsNamed) {
  behave("", "init");
  const std::string message = message_of_rank_0<CommAborted>(2, milliseconds(2000), [](Communicator& world) {
    connect_group(*world.split(0, world.rank(), "dp"), DeviceKind::cpu, {.collectives = true});
  });
  EXPECT_THAT(message, HasSubstr("group dp"));
  EXPECT_THAT(message, HasSubstr("rank 0: ncclCommInitRankConfig failed: NCCL: invalid usage: the cable is loose"));
}

// A rank that never comes, too.
TEST_P(DeviceFailures, WhoDoesNotConnectIsWaitedForInVain) {
  const std::string message = message_of_rank_0<CommTimeout>(2, milliseconds(150), [](Communicator& world) {
    if (world.rank() == 1) return std::this_thread::sleep_for(milliseconds(600));
    connect_group(world, DeviceKind::cpu, {false, {{1, 7}}, {}});
  });
  EXPECT_THAT(message, HasSubstr("rank 0 waited 0.15 s for send #1 of group world (to rank 1, tag 7"));
}

// A line to itself is sent and received at the same time.
TEST_P(DeviceFailures, ARankConnectsToItselfToo) {
  run_thread_ranks(2, [&](Communicator& host) {
    const auto world = make(GetParam(), host);
    connect_group(*world, DeviceKind::cpu, {false, {{host.rank(), 4}}, {{host.rank(), 4}}});
    world->barrier();
  });
}

// No connection is made in the middle of a step, unless the user wants it.
TEST(Nccl, CommunicatorsConnectWhenTheyAreMade) {
  EXPECT_DEATH(
      {
        const auto self = make_self_communicator();
        EXPECT_THROW(make_nccl_communicator(*self, kHostMemory, "libnccl-that-is-not-there.so"), UserError);
        std::fprintf(stderr, "it is %s", std::getenv("NCCL_RUNTIME_CONNECT"));
        std::abort();
      },
      "it is 0");
}

TEST(Nccl, AMissingLibraryIsTheUsersToInstall) {
  const auto self = make_self_communicator();
  try {
    make_nccl_communicator(*self, kHostMemory, "libnccl-that-is-not-there.so");
    FAIL() << "nothing was thrown";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("libnccl-that-is-not-there.so"));
    EXPECT_THAT(error.what(), HasSubstr("parallel.backend: staged"));
  }
}

class OnCuda : public testing::TestWithParam<CommCase> {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
};

TEST_P(OnCuda, StagedCase) {
  for (const int ranks : {1, 2, 3})
    run_thread_ranks(ranks, [&](Communicator& host) {
      const std::shared_ptr<void> stream = cuda::make_stream();
      Twins world(make_staged_communicator(host, {DeviceKind::cuda, stream.get()}, kPieceBytes), stream.get());
      GetParam().body(world);
    });
}

// As many ranks as there are GPUs: NCCL refuses two on one.
TEST_P(OnCuda, NcclCase) {
  const int ranks = std::min(cuda::device_count(), 2);
  if (ranks == 1) std::printf("one GPU: NCCL runs with one rank\n");
  run_thread_ranks(ranks, [&](Communicator& host) {
    cuda::use_device(host.rank());
    const std::shared_ptr<void> stream = cuda::make_stream();
    Twins world(make_nccl_communicator(host, {DeviceKind::cuda, stream.get()}), stream.get());
    GetParam().body(world);
  });
}

INSTANTIATE_TEST_SUITE_P(Device, OnCuda, testing::ValuesIn(comm_cases()),
                         [](const auto& given) { return std::string(given.param.name); });

// Work queued before an operation is in its data, and work queued after its wait() sees the result, without the host
// waiting in between.
TEST(CudaOrder, OperationsStandInTheOrderOfTheStream) {
  if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  run_thread_ranks(2, [&](Communicator& host) {
    const std::shared_ptr<void> stream = cuda::make_stream();
    const auto world = make_staged_communicator(host, {DeviceKind::cuda, stream.get()}, 1 << 20);
    constexpr int64_t kCount = 5'000'003;
    const auto a = cuda::allocate("a", kCount * 4), b = cuda::allocate("b", kCount * 4);
    std::vector<float> ones(kCount, 1.0f + static_cast<float>(host.rank())), got(kCount);
    const auto pinned = cuda::allocate_host(kCount * 4);
    std::copy(ones.begin(), ones.end(), static_cast<float*>(pinned.get()));
    for (int round = 0; round < 5; ++round) {
      cuda::copy(stream.get(), pinned.get(), b.get(), kCount * 4);
      cuda::copy(stream.get(), b.get(), a.get(), kCount * 4);
      CommRequest request = world->all_reduce_async(a.get(), kCount, CommType::f32, ReduceOp::sum);
      cuda::zero(stream.get(), b.get(), kCount * 4);
      request.wait();
      cuda::copy(stream.get(), a.get(), b.get(), kCount * 4);
      cuda::zero(stream.get(), a.get(), kCount * 4);
    }
    cuda::synchronize(stream.get());
    cuda::copy_and_wait(b.get(), got.data(), kCount * 4);
    EXPECT_EQ(std::count(got.begin(), got.end(), 3.0f), kCount);
  });
}

// A barrier's end says that what came before is over on the device: another stream sees it, without waiting for
// anything. Copies of 128 MiB take much longer than the host's own barrier.
TEST(CudaOrder, ABarrierEndsWhatWasWaitedFor) {
  if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  run_thread_ranks(2, [&](Communicator& host) {
    const std::shared_ptr<void> stream = cuda::make_stream(), other = cuda::make_stream();
    constexpr int64_t kBytes = int64_t{128} << 20;
    const auto world = make_staged_communicator(host, {DeviceKind::cuda, stream.get()}, kBytes);
    const auto data = cuda::allocate("data", kBytes), ones = cuda::allocate_host(kBytes);
    const auto last = cuda::allocate_host(1);
    std::memset(ones.get(), 1, kBytes);
    for (const bool message : {true, false}) {
      if (host.rank() == 0)
        cuda::copy(stream.get(), ones.get(), data.get(), kBytes);
      else
        cuda::zero(stream.get(), data.get(), kBytes);
      cuda::synchronize(stream.get());
      if (!message)
        world->broadcast(std::span<char>(static_cast<char*>(data.get()), kBytes), 0);
      else if (host.rank() == 0)
        world->send_async(data.get(), kBytes, 1, 0).wait();
      else
        world->receive_async(data.get(), kBytes, 0, 0).wait();
      world->barrier();
      cuda::copy(other.get(), static_cast<char*>(data.get()) + kBytes - 1, last.get(), 1);
      cuda::synchronize(other.get());
      EXPECT_EQ(*static_cast<char*>(last.get()), 1) << (message ? "message" : "broadcast");
      host.barrier();
    }
  });
}

}  // namespace
}  // namespace sb
