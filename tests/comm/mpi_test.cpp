// Starts itself under mpirun: `comm_mpi_test --as-rank CASE` is what each rank does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <thread>

#include "comm/host_name.h"
#include "comm/world.h"
#include "tests/comm/comm_cases.h"

namespace sb {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::Not;

volatile sig_atomic_t got_signal = 0;

int run_as_rank(const std::string& what) {
  if (what == "exit") return 7;
  const bool second = std::getenv("OMPI_COMM_WORLD_RANK") == std::string("1");
  if (what == "late" && second) std::this_thread::sleep_for(milliseconds(3000));
  const bool impatient = what == "timeout" || what == "mismatch";
  const auto world = open_world_communicator(
      {.timeout = milliseconds(impatient ? 500 : 60'000),
       .start_timeout = milliseconds(what == "late" ? 500 : 60'000),
       .lost = [](const LostRank& lost) { std::cerr << "lost " << lost.rank << " at " << lost.place << "\n"; }});
  if (what == "cases") {
    for (const CommCase& test : comm_cases()) {
      test.body(*world);
      world->barrier();
    }
    const bool failed = world->all_reduce(int{testing::UnitTest::GetInstance()->Failed()}, ReduceOp::max) != 0;
    if (world->rank() == 0) std::cerr << "cases ran on " << world->size() << " ranks\n";
    return failed ? 1 : 0;
  }
  if (what == "abort") {
    if (world->rank() == 1) world->abort("the file is damaged");
    world->barrier();
  } else if (what == "throw") {
    try {
      if (world->rank() == 1) throw UserError("no such key");
      world->barrier();
    } catch (const UserError& error) {
      world->abort(error.what());
    }
  } else if (what == "leave") {
    if (world->rank() == 1) _exit(3);
    world->barrier();
  } else if (what == "compute") {
    if (world->rank() == 2) _exit(3);
    for (;;) std::this_thread::sleep_for(milliseconds(50));
  } else if (what == "peace") {
    std::this_thread::sleep_for(milliseconds(200 * ((world->rank() + 2) % 4)));
  } else if (what == "timeout") {
    if (world->rank() == 1) std::this_thread::sleep_for(milliseconds(5000));
    const auto dp = world->split(0, 0, "dp");
  } else if (what == "mismatch") {
    std::vector<float> data(100);
    if (world->rank() == 0)
      world->broadcast(std::span<float>(data), 1);
    else
      world->all_reduce(std::span<float>(data));
  } else if (what == "signal") {
    signal(SIGTERM, [](int) { got_signal = 1; });
    world->barrier();
    if (world->rank() == 0) kill(std::atoi(std::getenv("SB_TEST_LAUNCHER")), SIGTERM);
    while (!got_signal) std::this_thread::sleep_for(milliseconds(5));
    std::this_thread::sleep_for(milliseconds(2500));  // saves a checkpoint
    std::ofstream(std::string(std::getenv("SB_TEST_FOLDER")) + "/saved" + std::to_string(world->rank()));
    world->barrier();
    return 5;
  }
  return 0;
}

struct Outcome {
  int code;
  std::string text;
};

Outcome launch(int ranks, const std::string& what) {
  testing::internal::CaptureStderr();
  const int code = launch_local_ranks(ranks, {"", "--as-rank", what}).exit_code;
  return {code, testing::internal::GetCapturedStderr()};
}

TEST(Mpi, CasesOnTwoRanks) {
  const auto [code, text] = launch(2, "cases");
  EXPECT_EQ(code, 0) << text;
  EXPECT_THAT(text, HasSubstr("cases ran on 2 ranks"));
}

TEST(Mpi, CasesOnFourRanks) {
  const auto [code, text] = launch(4, "cases");
  EXPECT_EQ(code, 0) << text;
  EXPECT_THAT(text, HasSubstr("cases ran on 4 ranks"));
}

TEST(Mpi, AbortEndsTheJobAndNamesTheRank) {
  const auto [code, text] = launch(3, "abort");
  EXPECT_NE(code, 0);
  EXPECT_THAT(text, HasSubstr("rank 1 on " + host_name() + " ended the job: the file is damaged"));
}

TEST(Mpi, ErrorOfOneRankEndsTheJob) {
  const auto [code, text] = launch(2, "throw");
  EXPECT_NE(code, 0);
  EXPECT_THAT(text, HasSubstr("rank 1 on " + host_name() + " ended the job: no such key"));
}

TEST(Mpi, RankThatVanishesEndsTheJob) {
  const auto [code, text] = launch(2, "leave");
  EXPECT_EQ(code, 3) << text;
  EXPECT_THAT(text, HasSubstr("rank 1 on " + host_name() + " ended without a word"));
  EXPECT_THAT(text, HasSubstr("lost 1 at " + host_name()));
}

// Nobody talks to anybody, and the launcher is not asked: the connection alone tells.
TEST(Mpi, RanksThatComputeLearnOfADeadOne) {
  const auto [code, text] = launch(4, "compute");
  EXPECT_EQ(code, 3) << text;
  EXPECT_THAT(text, HasSubstr("rank 2 on " + host_name() + " ended without a word"));
}

// Everybody says good-bye, in whatever order they leave: none of them is taken for lost.
TEST(Mpi, RanksThatEndInPeaceAreNotLost) {
  const auto [code, text] = launch(4, "peace");
  EXPECT_EQ(code, 0) << text;
  EXPECT_THAT(text, Not(HasSubstr("without a word")));
}

TEST(Mpi, TheStartHasALimitOfItsOwn) {
  const auto [code, text] = launch(2, "late");
  EXPECT_EQ(code, 1) << text;
  EXPECT_THAT(text, HasSubstr("did not find each other within 0.5 s (parallel.start_timeout)"));
}

TEST(Mpi, TimeoutNamesRankOperationNumberAndGroup) {
  const auto [code, text] = launch(2, "timeout");
  EXPECT_NE(code, 0);
  EXPECT_THAT(text, testing::ContainsRegex("rank 0 on " + host_name() +
                                           " waited 0.5 s for all_gather #[0-9]+ of group world; nothing came "
                                           "from rank 1 on " +
                                           host_name()));
}

TEST(Mpi, DifferentCollectivesTimeOut) {
  const auto [code, text] = launch(2, "mismatch");
  EXPECT_NE(code, 0);
  EXPECT_THAT(text, testing::ContainsRegex("waited 0.5 s for (broadcast|all_reduce) #[0-9]+ of group world"));
}

TEST(Launch, GivesTheExitCode) {
  EXPECT_EQ(launch(2, "exit").code, 7);
}

TEST(Launch, PassesSignalsOnAndWaits) {
  const std::filesystem::path folder =
      std::filesystem::temp_directory_path() / ("comm_mpi_test." + std::to_string(getpid()));
  std::filesystem::create_directory(folder);
  setenv("SB_TEST_LAUNCHER", std::to_string(getpid()).c_str(), 1);
  setenv("SB_TEST_FOLDER", folder.c_str(), 1);
  const auto [code, text] = launch(2, "signal");
  EXPECT_EQ(code, 5) << text;
  EXPECT_TRUE(std::filesystem::exists(folder / "saved0"));
  EXPECT_TRUE(std::filesystem::exists(folder / "saved1"));
  std::filesystem::remove_all(folder);
}

TEST(Launch, SaysThatMpirunIsMissing) {
  const std::string path = std::getenv("PATH");
  setenv("PATH", "/nowhere", 1);
  EXPECT_THROW(launch_local_ranks(2, {"", "--as-rank", "exit"}), UserError);
  setenv("PATH", path.c_str(), 1);
}

TEST(World, IsAloneWithoutALauncher) {
  EXPECT_EQ(launched_ranks(), 1);
  const auto world = open_world_communicator({.timeout = milliseconds(1000)});
  EXPECT_EQ(world->size(), 1);
  EXPECT_EQ(world->timeout(), milliseconds(1000));
}

TEST(World, ReadsTheLaunchersEnvironment) {
  setenv("OMPI_COMM_WORLD_SIZE", "6", 1);
  EXPECT_EQ(launched_ranks(), 6);
  setenv("OMPI_COMM_WORLD_SIZE", "many", 1);
  EXPECT_THROW(launched_ranks(), UserError);
  unsetenv("OMPI_COMM_WORLD_SIZE");
  setenv("SLURM_STEP_NUM_TASKS", "4", 1);
  EXPECT_THROW(launched_ranks(), UserError);  // not connected
  setenv("PMIX_RANK", "2", 1);
  EXPECT_EQ(launched_ranks(), 4);
  unsetenv("PMIX_RANK");
  unsetenv("SLURM_STEP_NUM_TASKS");
  setenv("PMI_SIZE", "3", 1);
  EXPECT_EQ(launched_ranks(), 3);
  unsetenv("PMI_SIZE");
}

// Its processes would otherwise train alone, all of them into the same folder.
TEST(World, RefusesTheProcessesOfTorchrun) {
  setenv("TORCHELASTIC_RUN_ID", "none", 1);
  setenv("WORLD_SIZE", "1", 1);
  EXPECT_EQ(launched_ranks(), 1);
  setenv("WORLD_SIZE", "4", 1);
  EXPECT_THROW(launched_ranks(), UserError);
  unsetenv("TORCHELASTIC_RUN_ID");
  EXPECT_EQ(launched_ranks(), 1) << "a variable of somebody else's";
  unsetenv("WORLD_SIZE");
}

// srun --mpi=pmi2, of which Open MPI would say only that it was not built with Slurm's PMI.
TEST(World, RefusesPmiWhereItsMpiTakesPmix) {
  setenv("PMI_SIZE", "2", 1);
  setenv("PMI_RANK", "0", 1);
  try {
    open_world_communicator();
    ADD_FAILURE() << "opened";
  } catch (const UserError& error) {
    EXPECT_THAT(error.what(), HasSubstr("start with srun --mpi=pmix"));
  }
  unsetenv("PMI_SIZE");
  unsetenv("PMI_RANK");
}

// mpiexec of another MPI than the module's: each process would take itself for the whole run.
TEST(World, RefusesRanksThatItsMpiDoesNotKnow) {
  setenv("PMI_SIZE", "2", 1);
  EXPECT_EXIT(
      {
        try {
          open_world_communicator({.timeout = milliseconds(1000)});
        } catch (const UserError& error) {
          std::cerr << error.what();
          std::_Exit(7);
        }
      },
      testing::ExitedWithCode(7), "the launcher started 2 ranks, but MPI knows of 1");
  unsetenv("PMI_SIZE");
}

}  // namespace
}  // namespace sb

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc == 3 && std::string(argv[1]) == "--as-rank") {
    try {
      return sb::run_as_rank(argv[2]);
    } catch (const sb::Error& error) {
      std::cerr << error.what() << "\n";
      return 1;
    }
  }
  return RUN_ALL_TESTS();
}
