#include "run/common_directory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include "comm/thread_communicator.h"
#include "tests/run/scratch_directory.h"
#include "tests/train/tiny_run.h"

namespace sb {
namespace {

namespace fs = std::filesystem;

// What the ranks say when rank r names directories[r].
std::string refusal(const std::vector<fs::path>& directories) {
  return user_error_of([&] {
    run_thread_ranks(static_cast<int>(directories.size()), [&](Communicator& world) {
      check_common_directory(world, directories[static_cast<size_t>(world.rank())]);
      world.barrier();
    });
  });
}

TEST(CommonDirectory, OneThatAllSeeIsMadeAndLeftEmpty) {
  ScratchDirectory scratch;
  const fs::path run = scratch / "a/run";
  EXPECT_EQ(refusal({run, run, run}), "");
  EXPECT_TRUE(fs::is_empty(run));
}

// A path that every host has for itself, as ranks on hosts without a common file system see it.
TEST(CommonDirectory, OneThatARankDoesNotSeeIsRefusedWithRankHostAndCure) {
  ScratchDirectory scratch;
  const fs::path run = scratch / "run", other = scratch / "other";
  char host[256] = {};
  gethostname(host, sizeof host - 1);
  for (const bool there : {false, true}) {
    if (there) fs::create_directories(other);
    const std::string error = refusal({run, run, other});
    EXPECT_NE(error.find("train.output_dir " + run.string() + ": rank 2 on " + host + " does not see what rank 0"),
              std::string::npos)
        << error;
    EXPECT_NE(error.find("on a file system that all hosts share"), std::string::npos) << error;
    EXPECT_TRUE(fs::is_empty(run));
  }
}

}  // namespace
}  // namespace sb
