// NCCL itself between two ranks. On one GPU: processes, each on a machine of its own by NCCL_HOSTID, so that NCCL lets
// them share the GPU and takes the data through sockets; the test starts itself: `nccl_ranks_test --as-rank RANK SOCKET
// WHAT FILE`. Where each has a GPU they are threads.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <fstream>
#include <iostream>
#include <thread>

#include "comm/device/device_communicator.h"
#include "comm/message_communicator.h"
#include "comm/thread_communicator.h"
#include "core/errors.h"
#include "device/cuda.h"
#include "tests/comm/comm_cases.h"
#include "tests/comm/device_twins.h"
#include "tests/comm/socket_transport.h"
#include "tests/data/temporary_folder.h"
#include "tests/train/cuda_run.h"
#include "train/training_run.h"

namespace sb::test {
namespace {

constexpr int kRanks = 2;

void train_on(const RunConfig& config, Communicator& world) {
  std::FILE* out = std::fopen("/dev/null", "w");
  run_training(config, out, false, [] { return false; }, {&world, kRanks, world.rank()});
  std::fclose(out);
}

// Exit code.
int do_as_rank(Communicator& world, const std::string& what, const std::string& file) {
  if (what == "train") {
    std::ifstream in(file);
    train_on(parse_run_config({std::istreambuf_iterator<char>(in), {}}, file, {}), world);
    return 0;
  }
  const std::shared_ptr<void> stream = cuda::make_stream();
  Twins twins(make_nccl_communicator(world, {DeviceKind::cuda, stream.get()}), stream.get());
  for (const CommCase& test : comm_cases()) {
    const auto begun = std::chrono::steady_clock::now();
    test.body(twins);
    world.barrier();
    if (world.rank() == 0)
      std::cout << test.name << " " << std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count()
                << " s" << std::endl;
  }
  const int failed = testing::UnitTest::GetInstance()->Failed() ? 1 : 0;
  return world.all_reduce(failed, ReduceOp::max);
}

int run_as_rank(int rank, int socket, const std::string& what, const std::string& file) {
  const auto world = make_message_communicator([&] { return std::make_unique<SocketTransport>(socket, rank); },
                                               std::chrono::seconds(120));
  return do_as_rank(*world, what, file);
}

// A device each.
testing::AssertionResult run_threads(const std::string& what, const std::string& file) {
  std::atomic<int> code = 0;
  run_thread_ranks(kRanks, [&](Communicator& world) {
    cuda::use_device(world.rank());
    code |= do_as_rank(world, what, file);
  });
  return code == 0 ? testing::AssertionSuccess() : testing::AssertionFailure();
}

// Exit code 0 of both ranks, in time; what they said otherwise.
testing::AssertionResult run_ranks(const std::string& what, const std::string& file, const std::string& log) {
  // The NCCL of a software device knows threads alone.
  if (test::on_software_device()) return run_threads(what, file);
  int ends[kRanks];
  SB_CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair: {}", std::strerror(errno));
  std::array<pid_t, kRanks> processes;
  for (int rank = 0; rank < kRanks; ++rank) {
    processes[static_cast<size_t>(rank)] = fork();
    if (processes[static_cast<size_t>(rank)] != 0) continue;
    setenv("NCCL_HOSTID", ("host-" + std::to_string(rank)).c_str(), 1);
    setenv("NCCL_SOCKET_IFNAME", "lo", 1);
    setenv("NCCL_NET", "Socket", 1);
    setenv("NCCL_DEBUG", "WARN", 1);
    const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    ::close(ends[1 - rank]);
    const std::string number = std::to_string(rank), socket = std::to_string(ends[rank]);
    execl("/proc/self/exe", "nccl_ranks_test", "--as-rank", number.c_str(), socket.c_str(), what.c_str(), file.c_str(),
          nullptr);
    _exit(127);
  }
  for (const int end : ends) ::close(end);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(240);
  std::string problem;
  for (int rank = 0; rank < kRanks; ++rank) {
    const pid_t process = processes[static_cast<size_t>(rank)];
    int status = 0;
    while (waitpid(process, &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) kill(process, SIGKILL);
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
      problem +=
          fmt::format("rank {} ended with {}\n", rank, WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  std::ifstream in(log);
  const std::string said{std::istreambuf_iterator<char>(in), {}};
  if (problem.empty()) return testing::AssertionSuccess() << said;
  return testing::AssertionFailure() << problem << said;
}

class NcclRanks : public testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::problem().empty()) GTEST_SKIP() << cuda::problem();
  }
  // Bit by bit the same with the same batches: the sums of two numbers have one order.
  RunConfig config_of(const std::string& name, std::vector<std::string> more) const {
    more.push_back(fmt::format("train.max_steps={}", last_));
    for (const char* option : {"device=cuda", "train.save_steps=0", "train.threads=1", "train.deterministic=true",
                               sized("data.synthetic.length=700", "data.synthetic.length=270"),
                               sized("data.synthetic.min_length=400", "data.synthetic.min_length=150")})
      more.emplace_back(option);
    return small_run(folder_.path(name), more);
  }
  TemporaryFolder folder_;
  const int64_t last_ = sized(6, 2);
};

// Collectives of every type, messages, groups: what the other communicators do.
TEST_F(NcclRanks, AllCommunicatorCases) {
  const testing::AssertionResult result = run_ranks("cases", "", folder_.path("log"));
  EXPECT_TRUE(result) << result.message();
  std::printf("%s", result.message());
}

// Against ranks that are threads and go through host memory, to the last bit.
TEST_F(NcclRanks, TrainAsOverHostMemory) {
  for (const char* precision : {"float32", "auto"})
    for (const char* layout : {"parallel.dp=2", "parallel.pp=2", "parallel.cp=2", "parallel.tp=2"}) {
      SCOPED_TRACE(fmt::format("{}, {}", precision, layout));
      const std::string name = fmt::format("{}-{}", precision, layout),
                        type = fmt::format("train.precision={}", precision);
      const RunConfig staged = config_of("staged-" + name, {type, layout});
      run_thread_ranks(kRanks, [&](Communicator& world) { train_on(staged, world); });
      const auto expected = losses_by_step(staged);
      ASSERT_EQ(expected.size(), static_cast<size_t>(last_));

      const RunConfig nccl = config_of("nccl-" + name, {type, layout, "parallel.backend=nccl"});
      const std::string file = folder_.path("run-" + name + ".yaml");
      std::ofstream(file) << print_run_config(nccl);
      const testing::AssertionResult result = run_ranks("train", file, folder_.path("log-" + name));
      ASSERT_TRUE(result) << result.message();
      EXPECT_EQ(losses_by_step(nccl), expected);
      std::printf("%s: loss %.6f over NCCL, %.6f through host memory\n", name.c_str(), losses_by_step(nccl).at(last_),
                  expected.at(last_));
    }
}

}  // namespace
}  // namespace sb::test

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc == 6 && std::string(argv[1]) == "--as-rank") {
    try {
      return sb::test::run_as_rank(std::stoi(argv[2]), std::stoi(argv[3]), argv[4], argv[5]);
    } catch (const std::exception& error) {
      std::cerr << "rank " << argv[2] << ": " << error.what() << std::endl;
      return 1;
    }
  }
  return RUN_ALL_TESTS();
}
