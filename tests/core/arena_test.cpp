#include "core/arena.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

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

TEST(Arena, EveryTypeAndOddSizesAreAligned) {
  Arena arena("test", 1 << 12);
  int64_t expected = 0;
  for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::i32, DType::i64}) {
    for (const int64_t count : {0, 1, 15, 16, 17, 33}) {
      const TensorView view = arena.allocate(dtype, {count});
      EXPECT_EQ(reinterpret_cast<uintptr_t>(view.raw()) % 64, 0u);
      EXPECT_EQ(view.bytes(), count * dtype_bytes(dtype));
      expected += (view.bytes() + 63) / 64 * 64;
      ASSERT_EQ(arena.used(), expected) << dtype_name(dtype) << " " << count;
      std::memset(view.raw(), 0xff, static_cast<size_t>(view.bytes()));  // a sanitizer sees what is not there
    }
  }
  EXPECT_EQ(arena.high_water(), expected);
}

TEST(Arena, ScopesWithinScopesAndExceptions) {
  Arena arena("test", 1024);
  void* const first = arena.allocate_bytes(64);
  void* inner = nullptr;
  try {
    const ArenaScope outer(arena);
    inner = arena.allocate_bytes(64);
    {
      const ArenaScope scope(arena);
      arena.allocate_bytes(512);
      EXPECT_EQ(arena.used(), 640);
    }
    EXPECT_EQ(arena.used(), 128);
    arena.allocate_bytes(4096);
    FAIL();
  } catch (const OutOfMemory& error) {
    // What was asked for, what is in use and what there is.
    for (const char* part : {"4096", "128", "1024"})
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
  EXPECT_EQ(arena.used(), 64);
  EXPECT_EQ(arena.high_water(), 640) << "what did not fit was never there";
  EXPECT_EQ(arena.allocate_bytes(64), inner) << "the same memory again";
  EXPECT_NE(first, inner);
}

TEST(Arena, ExactlyFullAndNothingMore) {
  for (const int64_t capacity : {1, 64, 65, 1000}) {
    Arena arena("test", capacity);
    EXPECT_EQ(arena.capacity(), (capacity + 63) / 64 * 64) << "rounded up";
    arena.allocate_bytes(arena.capacity());
    EXPECT_NO_THROW(arena.allocate_bytes(0));
    EXPECT_THROW(arena.allocate_bytes(1), OutOfMemory);
    arena.release(0);
    EXPECT_NO_THROW(arena.allocate_bytes(capacity));
  }
}

TEST(Arena, NegativeSizesAreMistakesOfTheProgram) {
  EXPECT_THROW(Arena("test", -64), InternalError);
  Arena arena("test", 64);
  EXPECT_THROW(arena.allocate_bytes(-1), InternalError);
  EXPECT_THROW(arena.release(-1), InternalError);
  EXPECT_THROW(arena.release(1), InternalError);
  EXPECT_EQ(arena.used(), 0);
}

TEST(Arena, MemoryOfSomebodyElse) {
  alignas(64) char block[256] = {};
  Arena slice("slice", block + 64, 128, DeviceKind::cpu);
  EXPECT_EQ(slice.allocate_bytes(100), block + 64);
  EXPECT_THROW(slice.allocate_bytes(1), OutOfMemory);
  // Memory that comes with its owner lives as long as the arena.
  const auto owner = std::make_shared<std::vector<char>>(128);
  std::weak_ptr<std::vector<char>> alive = owner;
  {
    const Arena owned("owned", std::shared_ptr<void>(owner, owner->data()), 128, DeviceKind::cuda);
    EXPECT_EQ(owner.use_count(), 2);
    EXPECT_EQ(Arena(owned).allocate(DType::f32, {4}).device(), DeviceKind::cuda);
  }
  EXPECT_EQ(owner.use_count(), 1);
}

TEST(MemoryPlan, HostMemoryIsListedAndNotCounted) {
  MemoryPlan plan;
  plan.add("weights", 1024);
  plan.add_on_host("moments", 4096);
  plan.add_on_host("nothing", 0);
  EXPECT_EQ(plan.total(), 1024);
  EXPECT_EQ(plan.host_total(), 4096);
  EXPECT_EQ(plan.items().size(), 1u);
  EXPECT_NO_THROW(plan.check_fits(1024, ""));
  EXPECT_THROW(plan.check_fits(1023, ""), OutOfMemory);
  const std::string table = plan.table();
  EXPECT_NE(table.find("4.00 KiB  in host memory\n"), std::string::npos) << table;
  EXPECT_EQ(table.find("nothing"), std::string::npos) << table;
  EXPECT_EQ(table.find(" of "), std::string::npos) << "no limit is known: " << table;
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 3);
  EXPECT_THROW(plan.add("weights", -1), InternalError);
  EXPECT_THROW(plan.add_on_host("moments", -1), InternalError);
}

TEST(MemoryPlan, AnEmptyPlanFitsAnywhere) {
  const MemoryPlan plan;
  EXPECT_EQ(plan.total(), 0);
  EXPECT_NO_THROW(plan.check_fits(1, ""));
  EXPECT_NE(plan.table().find("0 B"), std::string::npos);
}

TEST(MemoryPlan, BytesAtTheBordersOfUnits) {
  for (int unit = 0; unit < 4; ++unit) {
    const char* names[] = {"KiB", "MiB", "GiB", "TiB"};
    const int64_t one = int64_t{1} << 10 * (unit + 1);
    EXPECT_EQ(format_bytes(one), std::string("1.00 ") + names[unit]);
    EXPECT_EQ(format_bytes(one + one / 4), std::string("1.25 ") + names[unit]);
    EXPECT_EQ(format_bytes(512 * one), std::string("512.00 ") + names[unit]);
  }
  EXPECT_EQ(format_bytes(int64_t{5000} << 40), "5000.00 TiB");
}

}  // namespace
}  // namespace sb
