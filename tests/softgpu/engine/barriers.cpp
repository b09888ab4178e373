// Where threads wait for each other: barriers of a block, collectives of a warp, barriers in shared memory.

#include <algorithm>
#include <cstring>

#include "softgpu/engine/state.h"

namespace softgpu {
namespace {

void open_barrier(Barrier& barrier) {
  for (Thread* thread : barrier.waiting) make_ready(thread);
  barrier.waiting.clear();
  barrier.arrived = barrier.threads = 0;
}

Barrier& named_barrier(int id, int threads) {
  if (id < 0 || id > 15) fail("barrier %d: a block has 0 to 15", id);
  if (threads <= 0 || threads % 32 != 0) fail("barrier %d of %d threads: not whole warps", id, threads);
  Barrier& barrier = engine.block->barriers[id];
  if (barrier.threads != 0 && barrier.threads != threads)
    fail("barrier %d is waited at by %d threads and by %d", id, barrier.threads, threads);
  if (barrier.threads == 0 && barrier.arrived > 0)
    fail("barrier %d is waited at by %d threads and by __syncthreads", id, threads);
  if (threads > static_cast<int>(engine.block->threads.size()))
    fail("barrier %d of %d threads in a block of %zu", id, threads, engine.block->threads.size());
  barrier.threads = threads;
  return barrier;
}

const char* name_of(Together what) {
  switch (what) {
    case Together::sync:
      return "__syncwarp";
    case Together::shuffle:
      return "a shuffle";
    case Together::ballot:
      return "a vote";
    case Together::add:
    case Together::most:
    case Together::least:
      return "a reduction";
    case Together::match:
      return "__match_any_sync";
    case Together::load_matrix:
      return "ldmatrix";
    case Together::store_matrix:
      return "stmatrix";
    default:
      return "mma";
  }
}

}  // namespace

void sync_block() {
  const Quiet quiet;
  Block& block = *engine.block;
  Barrier& barrier = block.barriers[0];
  if (barrier.threads != 0) fail("barrier 0 is waited at by %d threads and by __syncthreads", barrier.threads);
  happened_before(&barrier);
  if (++barrier.arrived == block.alive) {
    open_barrier(barrier);
  } else {
    barrier.waiting.push_back(engine.self);
    wait_for(Waits::block_barrier);
  }
  happens_after(&barrier);
}

void named_sync(int id, int threads) {
  const Quiet quiet;
  Barrier& barrier = named_barrier(id, threads);
  happened_before(&barrier);
  if (++barrier.arrived == threads) {
    open_barrier(barrier);
  } else {
    barrier.waiting.push_back(engine.self);
    wait_for(Waits::named_barrier, static_cast<uint32_t>(id), static_cast<uint32_t>(threads));
  }
  happens_after(&barrier);
}

void named_arrive(int id, int threads) {
  const Quiet quiet;
  Barrier& barrier = named_barrier(id, threads);
  happened_before(&barrier);
  if (++barrier.arrived == threads) open_barrier(barrier);
}

// __syncthreads waits for the threads that have not ended.
void leave_barriers(Block& block, Thread&) {
  Barrier& barrier = block.barriers[0];
  if (barrier.threads == 0 && barrier.arrived > 0 && barrier.arrived == block.alive) open_barrier(barrier);
}

// Arrivals that nobody waits for any more are no mistake.
void end_barriers(Block& block) {
  for (Barrier& barrier : block.barriers) barrier.arrived = barrier.threads = 0;
  for (const Warp& warp : block.warps)
    if (!warp.open.empty()) fail("the block ends in the middle of %s of a warp", name_of(warp.open.front()->what));
}

// --- collectives -----------------------------------------------------------------------------------------------------

namespace {

// The lanes that a mask means: it may name lanes of the last warp that the block has not.
uint32_t checked_mask(uint32_t mask, const Warp& warp) {
  const Thread& self = *engine.self;
  if ((mask >> self.lane & 1) == 0) fail("a collective of the lanes %08x, called by lane %d", mask, self.lane);
  if ((mask & ~warp.alive) == 0) return mask;
  const int lanes = static_cast<int>(engine.block->threads.size()) - self.warp * 32;
  const uint32_t existing = lanes >= 32 ? ~0u : (1u << lanes) - 1;
  if ((mask & existing & ~warp.alive) != 0)
    fail("a collective of the lanes %08x, of which %08x have ended", mask, mask & existing & ~warp.alive);
  return mask & existing;
}

Collective& open_collective(Warp& warp, uint32_t mask, Together what) {
  for (Collective* open : warp.open) {
    if ((open->mask & mask) == 0) continue;
    if (open->mask != mask || open->what != what)
      fail("lanes of a warp meet in %s of the lanes %08x and in %s of %08x", name_of(open->what), open->mask,
           name_of(what), mask);
    return *open;
  }
  if (warp.free.empty()) warp.free.push_back(new Collective);
  Collective* opened = warp.free.back();
  warp.free.pop_back();
  opened->mask = mask;
  opened->what = what;
  opened->arrived = 0;
  warp.open.push_back(opened);
  return *opened;
}

}  // namespace

Given collect(uint32_t mask, const void* value, size_t bytes, Together what) {
  return collect(mask, value, bytes, what, nullptr);
}

Given collect(uint32_t mask, const void* value, size_t bytes, Together what, void (*last)(unsigned char (*given)[32])) {
  const Quiet quiet;
  Thread& self = *engine.self;
  Warp& warp = engine.block->warps[static_cast<size_t>(self.warp)];
  mask = checked_mask(mask, warp);
  Collective& here = open_collective(warp, mask, what);
  if (bytes > 0) std::memcpy(here.given[self.lane], value, bytes);
  here.arrived |= 1u << self.lane;
  // Of all of these only __syncwarp orders memory.
  if (what == Together::sync) happened_before(&here);
  if (here.arrived == mask) {
    if (last != nullptr) last(here.given);
    warp.open.erase(std::find(warp.open.begin(), warp.open.end(), &here));
    here.readers = __builtin_popcount(mask);
    Thread* const* lanes = &engine.block->threads[static_cast<size_t>(self.warp) * 32];
    for (uint32_t left = mask & ~(1u << self.lane); left != 0; left &= left - 1) make_ready(lanes[__builtin_ctz(left)]);
  } else {
    wait_for(Waits::collective, mask, static_cast<uint32_t>(what));
  }
  if (what == Together::sync) happens_after(&here);
  // It is used again once all have come here, and each reads what was given before anybody else runs.
  if (--here.readers == 0) warp.free.push_back(&here);
  return here.given;
}

// --- barriers in shared memory: the state is in their 8 bytes, so that whoever overwrites it is found
// -------------------

namespace {

struct MemoryBarrier {
  // Bits 0 to 9 say that this is a barrier; 10: phase; 11 to 21: arrivals of a phase; 22 to 32: those still to come in
  // this one; 33 to 63: bytes still to come.
  uint64_t bits;
  static constexpr uint64_t kMark = 0x2A5;
  static constexpr int kMostArrivals = 0x7FF;

  bool is_one() const { return (bits & 0x3FF) == kMark; }
  uint32_t phase() const { return bits >> 10 & 1; }
  int arrivals() const { return static_cast<int>(bits >> 11 & 0x7FF); }
  int pending() const { return static_cast<int>(bits >> 22 & 0x7FF); }
  int64_t bytes() const { return static_cast<int64_t>(bits) >> 33; }
  void set(uint32_t phase, int arrivals, int pending, int64_t bytes) {
    bits = kMark | uint64_t{phase} << 10 | static_cast<uint64_t>(arrivals) << 11 |
           static_cast<uint64_t>(pending) << 22 | static_cast<uint64_t>(bytes) << 33;
  }
};

MemoryBarrier& barrier_at(const Block& block, uint32_t at) {
  auto* barrier = reinterpret_cast<MemoryBarrier*>(block.memory.at(at, 8));
  if (barrier == nullptr || at % 8 != 0) fail("a barrier at %x, where the block's shared memory has none", at);
  if (!barrier->is_one()) fail("the barrier at %x of shared memory is not initialised, or is overwritten", at);
  return *barrier;
}

void settle(Block& block, uint32_t at, MemoryBarrier& barrier, int pending, int64_t bytes) {
  if (pending < 0) fail("more arrivals at the barrier at %x than the %d it waits for", at, barrier.arrivals());
  if (pending > 0 || bytes != 0) return barrier.set(barrier.phase(), barrier.arrivals(), pending, bytes);
  barrier.set(barrier.phase() ^ 1, barrier.arrivals(), barrier.arrivals(), 0);
  for (auto& [address, waiting] : block.mbarriers) {
    if (address != at) continue;
    for (Thread* thread : waiting) make_ready(thread);
    waiting.clear();
  }
}

}  // namespace

void mbarrier_init(uint32_t at, uint32_t arrivals) {
  const Quiet quiet;
  if (arrivals == 0 || arrivals > MemoryBarrier::kMostArrivals) fail("a barrier of %u arrivals", arrivals);
  auto* barrier = static_cast<MemoryBarrier*>(from_window(at, 8));
  writes(barrier, 8);
  barrier->set(0, static_cast<int>(arrivals), static_cast<int>(arrivals), 0);
}

void mbarrier_arrive(uint32_t at, uint32_t expected_bytes) {
  const Quiet quiet;
  Block& block = *engine.block;
  MemoryBarrier& barrier = barrier_at(block, at);
  reads(&barrier, 8);  // that it is one
  happened_before(&barrier);
  settle(block, at, barrier, barrier.pending() - 1, barrier.bytes() + expected_bytes);
}

void mbarrier_receive(Block& block, uint32_t at, uint32_t bytes) {
  MemoryBarrier& barrier = barrier_at(block, at);
  settle(block, at, barrier, barrier.pending(), barrier.bytes() - bytes);
}

void mbarrier_wait(uint32_t at, uint32_t parity) {
  const Quiet quiet;
  Block& block = *engine.block;
  reads(&barrier_at(block, at), 8);
  for (;;) {
    const MemoryBarrier& barrier = barrier_at(block, at);
    if (barrier.phase() != parity) {
      happens_after(&barrier);
      return;
    }
    auto found = std::find_if(block.mbarriers.begin(), block.mbarriers.end(), [&](auto& b) { return b.first == at; });
    if (found == block.mbarriers.end()) found = block.mbarriers.insert(found, {at, {}});
    found->second.push_back(engine.self);
    wait_for(Waits::mbarrier, at, parity);
  }
}

std::string mbarrier_state(const Block& block, uint32_t at) {
  const auto* barrier = reinterpret_cast<const MemoryBarrier*>(block.memory.at(at, 8));
  if (barrier == nullptr || !barrier->is_one()) return "no barrier any more";
  return std::to_string(barrier->pending()) + " of " + std::to_string(barrier->arrivals()) + " arrivals and " +
         std::to_string(barrier->bytes()) + " bytes are missing";
}

}  // namespace softgpu
