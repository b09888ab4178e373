#include "parallel/grid.h"

#include <gtest/gtest.h>

#include "comm/self_communicator.h"
#include "comm/thread_communicator.h"
#include "core/thread_pool.h"

namespace sb {
namespace {

TEST(Grid, EveryRankHasItsPlaceAndItsGroups) {
  const GridShape shape{2, 3, 2, 2};
  run_thread_ranks(shape.ranks(), [&](Communicator& world) {
    Grid grid(world, shape);
    EXPECT_EQ(grid.rank_of(grid.dp_rank(), grid.stage(), grid.cp_rank(), grid.tp_rank()), world.rank());
    EXPECT_EQ(grid.replicas().size(), 4);
    EXPECT_EQ(grid.replicas().rank(), grid.dp_rank() * 2 + grid.cp_rank());
    EXPECT_EQ(grid.pipeline().size(), 3);
    EXPECT_EQ(grid.pipeline().rank(), grid.stage());
    EXPECT_EQ(grid.context().size(), 2);
    EXPECT_EQ(grid.context().rank(), grid.cp_rank());
    EXPECT_EQ(grid.tensor().size(), 2);
    EXPECT_EQ(grid.tensor().rank(), world.rank() % 2);  // side by side
    EXPECT_EQ(grid.ends() != nullptr, grid.stage() != 1);
    if (grid.ends()) {
      EXPECT_EQ(grid.ends()->size(), 2);
    }
    // Those who talk to each other are those who should.
    const auto expect_alike = [](Communicator& group, int64_t place) {
      EXPECT_EQ(group.all_reduce(place), group.size() * place) << group.name();
    };
    expect_alike(grid.replicas(), 10 * grid.stage() + grid.tp_rank());
    expect_alike(grid.pipeline(), 100 * grid.dp_rank() + 10 * grid.cp_rank() + grid.tp_rank());
    expect_alike(grid.context(), 100 * grid.dp_rank() + 10 * grid.stage() + grid.tp_rank());
    expect_alike(grid.tensor(), 100 * grid.dp_rank() + 10 * grid.stage() + grid.cp_rank());
  });
}

TEST(Grid, OneRankHasNoEnds) {
  const auto world = make_self_communicator();
  Grid grid(*world, {1, 1, 1});
  EXPECT_TRUE(grid.first_stage() && grid.last_stage());
  EXPECT_EQ(grid.ends(), nullptr);
}

TEST(Grid, AnotherNumberOfRanksIsRefusedWithTheCure) {
  try {
    check_grid({2, 3, 1}, 4);
    FAIL();
  } catch (const UserError& error) {
    const std::string text = error.what();
    for (const char* part : {"dp 2 x pp 3 x cp 1 x tp 1 need 6 ranks, but 4 were started", "--ranks 6", "mpirun -n 6"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

TEST(Machine, RanksShareTheCoresThatTheyMayUse) {
  const std::vector<int> all{0, 1, 2, 3, 4, 5, 6, 7};
  EXPECT_EQ(core_share({all}, 0), 8);
  EXPECT_EQ(core_share({all, all, all}, 2), 2);
  // Bound to cores of their own, and to sockets that two share.
  EXPECT_EQ(core_share({{0, 1, 2}, {3, 4, 5}}, 1), 3);
  EXPECT_EQ(core_share({{0, 1, 2, 3}, {4, 5, 6, 7}, {0, 1, 2, 3}, {4, 5, 6, 7}}, 0), 2);
  EXPECT_EQ(core_share({{0}, {0}, {0}}, 1), 1);  // never none
  run_thread_ranks(2, [&](Communicator& world) {
    EXPECT_EQ(ranks_on_this_machine(world).cores, std::max(1, available_cores() / 2));
  });
}

TEST(Texts, TravelWithTheirLength) {
  run_thread_ranks(3, [&](Communicator& world) {
    const std::string own(static_cast<size_t>(7 * world.rank()), static_cast<char>('a' + world.rank()));
    EXPECT_EQ(broadcast_text(world, own, 2), "cccccccccccccc");
    EXPECT_EQ(broadcast_text(world, own, 0), "");
    const std::vector<std::string> all = gather_texts(world, own, 1);
    if (world.rank() == 1) {
      EXPECT_EQ(all, (std::vector<std::string>{"", "bbbbbbb", "cccccccccccccc"}));
    } else {
      EXPECT_TRUE(all.empty());
    }
    EXPECT_EQ(ranks_on_this_machine(world).count, 3);
    EXPECT_EQ(ranks_on_this_machine(world).index, world.rank());
  });
}

}  // namespace
}  // namespace sb
