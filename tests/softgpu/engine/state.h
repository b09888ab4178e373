#pragma once

// What the engine knows while kernels run. One kernel after the other (or a chain of early ones) is on the device, and
// one thread of the host runs all of it, so that all of this belongs to one thread at a time.

#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "softgpu/cuda/engine.h"
#include "softgpu/engine/fibre.h"
#include "softgpu/engine/quiet.h"
#include "softgpu/engine/shared_memory.h"
#include "softgpu/engine/worker.h"
#include "softgpu/interface/kernel.h"
#include "softgpu/interface/options.h"
#include "softgpu/interface/tensor_map.h"

extern "C" void softgpu_switch(void** save, void* to);

namespace softgpu {

struct Block;
struct Grid;
struct Thread;

// A copy of the copy engine into shared memory.
struct Copy {
  Block* block = nullptr;
  bool tensor = false;  // a box of a tensor, else bytes in a row
  TensorMap map = {};
  int x = 0, y = 0, z = 0;
  const void* from = nullptr;
  uint32_t to = 0, bytes = 0, barrier = 0;
  const void* issued = nullptr;  // see worker.h
};
// A sum of the copy engine into global memory, in a group of the thread that issued it.
struct Sum {
  bool tensor = false;
  TensorMap map = {};
  int x = 0, y = 0, z = 0;
  float* to = nullptr;
  uint32_t from = 0, bytes = 0;
  std::vector<float> read = {};  // what shared memory held, from when it was read until it is added
  const void* issued = nullptr;
};
struct SmallCopy {
  void* to;
  const void* from;
  bool exists;
  const void* issued;
};

enum class Waits { nothing, block_barrier, named_barrier, collective, mbarrier, products, previous_kernel };

struct Thread {
  Fibre fibre;
  Block* block = nullptr;
  uint3 place{};
  int index = 0, warp = 0, lane = 0;
  bool done = true;
  // What it waits for: a barrier's number or address and phase; a collective's mask.
  Waits waits = Waits::nothing;
  uint32_t waits_at = 0, waits_parity = 0;

  std::vector<SmallCopy> small_copies;
  std::vector<Sum> sums;           // not yet added, in the order of their issue
  std::vector<size_t> sum_groups;  // how many of them each group has, the oldest first
  size_t open_sums = 0;            // of no group yet: the last ones
  std::vector<Product> products;   // not yet done
  std::vector<size_t> product_groups;
  size_t open_products = 0;
  size_t issued_products = 0;
  // For the thread sanitizer: it has executed a fence; the atomic that it did last.
  bool fenced = false, results_unused = false;
  const void* last_atomic = nullptr;
};

struct Collective {
  uint32_t mask = 0, arrived = 0;
  Together what = Together::sync;
  int readers = 0;  // that have not gone on yet
  unsigned char given[32][32];
};

struct Warp {
  std::vector<Collective*> open, free;
  uint32_t alive = 0;
  uint32_t product_waiters = 0;  // lanes that wait for products
  size_t product_groups_left = 0;
  Worker tensor_core;
  std::deque<const void*> issued;  // for the thread sanitizer: of the products not yet done
  size_t finished_products = 0;
};

struct Barrier {
  int arrived = 0, threads = 0;
  std::vector<Thread*> waiting;
};

struct Block {
  Grid* grid = nullptr;
  uint3 index{};
  std::vector<Thread*> threads;
  std::deque<Warp> warps;
  int alive = 0;
  SharedMemory memory;
  Barrier barriers[16];                                              // 0: __syncthreads
  std::vector<std::pair<uint32_t, std::vector<Thread*>>> mbarriers;  // who waits, by address
  bool triggered = false;  // the next kernel may start as far as this block is concerned
  bool held = false;       // until the next kernel has started
  std::vector<Thread*> held_threads;
};

// A kernel that runs.
struct Grid {
  const Kernel* kernel = nullptr;
  uint64_t launch = 0;  // no other has this number
  uint64_t blocks = 0;
  std::vector<uint64_t> order;         // of its blocks, where that is not their own
  uint64_t started = 0, finished = 0;  // blocks
  uint64_t triggered = 0;              // blocks that have triggered or ended
  int resident_at_first = 1;           // that run together although nobody waits for another
  std::vector<Block*> resident;
  std::vector<Thread*> waiting;  // of the next grid, for this one's end
  Grid* next = nullptr;          // the early one behind it
  Grid* previous = nullptr;
  char end = 0;  // for the thread sanitizer: what all of it did
  SharedLayout layout;
  size_t known_static_shared = 0;  // from earlier launches of the kernel
  bool complete() const { return finished == blocks; }
  bool may_start_next() const { return triggered == blocks; }
};

// A warp of which all lanes wait for products.
struct ProductWait {
  Block* block;
  int warp;
};

struct Engine {
  const Options options = softgpu::options();
  Fibre main;
  Thread* self = nullptr;  // who runs
  Block* block = nullptr;  // whose
  std::vector<Thread*> ready;
  size_t ready_head = 0;
  std::vector<Thread*> spinning;
  uint64_t progress = 0;     // of others than those who spin
  std::vector<Copy> copies;  // not yet done
  std::vector<ProductWait> products;
  std::vector<Grid*> grids;  // the chain
  std::vector<Thread*> free_threads;
  std::vector<Block*> free_blocks;
  std::mt19937 order_random{options.order_seed}, copies_random{options.copies_seed};
  bool running = false;
};
// Lives until the end of the process, whatever is torn down before: its threads and blocks are kept for the next
// kernel.
union EngineForLife {
  Engine engine;
  EngineForLife() : engine() {}
  ~EngineForLife() {}
};
extern EngineForLife engine_for_life;
inline constexpr Engine& engine = engine_for_life.engine;

// --- scheduler.cpp ---------------------------------------------------------------------------------------------------
void make_ready(Thread* thread);
// How many blocks of a kernel the device has room for at a time.
int resident_most(const Grid& grid);
// What the caller did is over when the kernel is.
void ends_with_kernel(const Block& block);
// The calling thread goes on when somebody makes it ready.
void wait_for(Waits what, uint32_t at = 0, uint32_t parity = 0);
// Makes what is global in a kernel that of a thread.
void enter(Thread* thread);

// --- barriers.cpp ----------------------------------------------------------------------------------------------------
void leave_barriers(Block& block, Thread& thread);  // a thread ends
void end_barriers(Block& block);                    // a block ends
void mbarrier_receive(Block& block, uint32_t at, uint32_t bytes);
// The lane that comes last does for all of them what is to be done with what they gave.
Given collect(uint32_t mask, const void* value, size_t bytes, Together what, void (*last)(unsigned char (*given)[32]));
std::string mbarrier_state(const Block& block, uint32_t at);

// --- copies.cpp ------------------------------------------------------------------------------------------------------
void run_copy();  // one that waits
void finish_copies(Thread& thread);
void finish_copies(Block& block);

// --- products.cpp ----------------------------------------------------------------------------------------------------
void run_products();  // of one warp that waits
void check_products(const Thread& thread);

// --- report.cpp ------------------------------------------------------------------------------------------------------
[[noreturn]] void report_deadlock();

// Whether something that the device may do now or later happens now.
bool happens_now();

}  // namespace softgpu
