#include "core/arena.h"

#include <gtest/gtest.h>

#include "core/memory_plan.h"

namespace sb {
namespace {

TEST(Arena, AlignsAndCountsHighWater) {
  Arena arena("test", 1024);
  const TensorView a = arena.allocate(DType::f32, {3});
  const TensorView b = arena.allocate(DType::f32, {5});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.raw()) % Arena::kAlignment, 0u);
  EXPECT_EQ(static_cast<char*>(b.raw()) - static_cast<char*>(a.raw()), 64);
  EXPECT_EQ(arena.used(), 128);
  arena.release(64);
  EXPECT_EQ(arena.used(), 64);
  EXPECT_EQ(arena.high_water(), 128);
}

TEST(Arena, ScopeGivesBack) {
  Arena arena("test", 1024);
  {
    const ArenaScope scope(arena);
    arena.allocate_array<double>(16);
    EXPECT_EQ(arena.used(), 128);
  }
  EXPECT_EQ(arena.used(), 0);
}

TEST(Arena, RefusesMoreThanItHolds) {
  Arena arena("activations", 128);
  arena.allocate_bytes(100);
  try {
    arena.allocate_bytes(1);
    FAIL();
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("activations"), std::string::npos);
  }
  EXPECT_THROW(arena.release(4096), InternalError);
}

TEST(Arena, EmptyArenaAllocatesNothing) {
  Arena arena("empty", 0);
  EXPECT_EQ(arena.allocate(DType::f32, {0, 7}).elements(), 0);
  EXPECT_THROW(arena.allocate_bytes(1), OutOfMemory);
}

TEST(MemoryPlan, TableTotalsAndLimit) {
  MemoryPlan plan;
  plan.add("weights", 1 << 20);
  plan.add("moments", 2 << 20);
  EXPECT_EQ(plan.total(), 3 << 20);
  EXPECT_NE(plan.table().find("weights"), std::string::npos);
  EXPECT_NE(plan.table(8 << 20).find("8.00 MiB"), std::string::npos);
  EXPECT_NO_THROW(plan.check_fits(0, ""));
  EXPECT_NO_THROW(plan.check_fits(3 << 20, ""));
  try {
    plan.check_fits(1 << 20, "lower batch.micro_batch_tokens");
    FAIL();
  } catch (const OutOfMemory& error) {
    EXPECT_NE(std::string(error.what()).find("lower batch.micro_batch_tokens"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("moments"), std::string::npos);
  }
}

TEST(MemoryPlan, FormatsBytes) {
  EXPECT_EQ(format_bytes(0), "0 B");
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(1536), "1.50 KiB");
  EXPECT_EQ(format_bytes(int64_t{3} << 40), "3.00 TiB");
}

}  // namespace
}  // namespace sb
