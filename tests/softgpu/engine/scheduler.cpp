// Which thread goes on, and which block starts, when the one that runs waits.

#include <algorithm>
#include <chrono>
#include <numeric>

#include "softgpu/engine/state.h"
#include "softgpu/engine/statistics.h"
#include "softgpu/interface/device.h"

namespace softgpu {

EngineForLife engine_for_life;

namespace {

char kernels_begin;  // for the thread sanitizer: what came before a chain of kernels

void thread_main();

// The bytes of shared variables of kernels that have run: they are known when they are first named.
std::map<const void*, size_t>& static_shared() {
  static auto* bytes = new std::map<const void*, size_t>;  // never destroyed, as the engine
  return *bytes;
}

size_t shared_of_block(const Grid& grid) {
  return grid.kernel->dynamic_shared + std::max(grid.known_static_shared, grid.layout.static_bytes) +
         device_limits().shared_of_system_per_block;
}

// Whether the multiprocessors have room for another block, beside those of all kernels that are there.
bool has_room(const Grid& grid) {
  if (static_cast<int>(grid.resident.size()) >= resident_most(grid)) return false;
  size_t threads = 0, shared = 0, blocks = 0;
  const DeviceLimits& limits = device_limits();
  const auto each = [&](const Grid& of, size_t count) {
    const dim3& block = of.kernel->block;
    threads += count * block.x * block.y * block.z;
    shared += count * shared_of_block(of);
    blocks += count;
  };
  for (const Grid* other : engine.grids) each(*other, other->resident.size());
  if (blocks == 0) return true;
  each(grid, 1);
  const auto multiprocessors = static_cast<size_t>(limits.multiprocessors);
  return threads <= multiprocessors * static_cast<size_t>(limits.threads_per_multiprocessor) &&
         shared <= multiprocessors * limits.shared_per_multiprocessor &&
         blocks <= multiprocessors * static_cast<size_t>(limits.blocks_per_multiprocessor);
}

Grid make_grid(const Kernel& kernel) {
  static uint64_t launches = 0;
  Grid grid;
  grid.kernel = &kernel;
  grid.launch = ++launches;
  grid.blocks = uint64_t{kernel.grid.x} * kernel.grid.y * kernel.grid.z;
  if (const auto known = static_shared().find(kernel.function); known != static_shared().end())
    grid.known_static_shared = known->second;
  grid.layout.dynamic_bytes = kernel.dynamic_shared;
  if (engine.options.order == Order::forward) return grid;
  grid.order.resize(grid.blocks);
  std::iota(grid.order.begin(), grid.order.end(), uint64_t{0});
  if (engine.options.order == Order::reverse) {
    std::reverse(grid.order.begin(), grid.order.end());
  } else {
    std::shuffle(grid.order.begin(), grid.order.end(), engine.order_random);
    grid.resident_at_first = 1 + static_cast<int>(engine.order_random() % std::min(resident_most(grid), 4));
  }
  return grid;
}

Thread* new_thread() {
  if (engine.free_threads.empty()) return new Thread;
  Thread* thread = engine.free_threads.back();
  engine.free_threads.pop_back();
  return thread;
}

void start_block(Grid& grid) {
  const Kernel& kernel = *grid.kernel;
  const uint64_t number = grid.order.empty() ? grid.started : grid.order[grid.started];
  ++grid.started;
  Block* block = nullptr;
  if (engine.free_blocks.empty()) {
    block = new Block;
  } else {
    block = engine.free_blocks.back();
    engine.free_blocks.pop_back();
  }
  grid.resident.push_back(block);
  block->grid = &grid;
  block->index = uint3{static_cast<unsigned>(number % kernel.grid.x),
                       static_cast<unsigned>(number / kernel.grid.x % kernel.grid.y),
                       static_cast<unsigned>(number / kernel.grid.x / kernel.grid.y)};
  block->triggered = block->held = false;
  block->alive = static_cast<int>(kernel.block.x * kernel.block.y * kernel.block.z);
  block->memory.start(grid.layout);
  // They keep their collectives for the next block.
  if (const size_t warps = static_cast<size_t>(block->alive + 31) / 32; block->warps.size() < warps)
    block->warps.resize(warps);
  for (Warp& warp : block->warps) {
    warp.alive = 0;
    warp.finished_products = 0;
  }
  for (int i = 0; i < block->alive; ++i) {
    Thread* thread = new_thread();
    block->threads.push_back(thread);
    thread->block = block;
    thread->index = i;
    thread->warp = i / 32;
    thread->lane = i % 32;
    const auto at = static_cast<unsigned>(i);
    thread->place =
        uint3{at % kernel.block.x, at / kernel.block.x % kernel.block.y, at / (kernel.block.x * kernel.block.y)};
    thread->done = false;
    thread->issued_products = 0;
    thread->fenced = thread->results_unused = false;
    thread->last_atomic = nullptr;
    thread->fibre.prepare(&thread_main, i);
    block->warps[static_cast<size_t>(thread->warp)].alive |= 1u << thread->lane;
    make_ready(thread);
  }
  ++engine.progress;
  ++statistics().blocks;
}

void trigger(Block& block) {
  if (block.triggered) return;
  block.triggered = true;
  ++block.grid->triggered;
}

void end_block(Block& block) {
  happens_after(&block.grid->end);
  end_barriers(block);
  finish_copies(block);
  trigger(block);
  Grid& grid = *block.grid;
  ++grid.finished;
  if (grid.complete()) {
    for (Thread* thread : grid.waiting) make_ready(thread);
    grid.waiting.clear();
  }
  block.memory.end();
  for (Thread* thread : block.threads) engine.free_threads.push_back(thread);
  block.threads.clear();
  grid.resident.erase(std::find(grid.resident.begin(), grid.resident.end(), &block));
  engine.free_blocks.push_back(&block);
  engine.block = nullptr;
}

Thread* next_ready() {
  const size_t count = engine.ready.size() - engine.ready_head;
  if (count == 0) return nullptr;
  Thread* thread = nullptr;
  if (engine.options.order == Order::forward) {
    thread = engine.ready[engine.ready_head];
    if (++engine.ready_head == 4096) {
      engine.ready.erase(engine.ready.begin(), engine.ready.begin() + 4096);
      engine.ready_head = 0;
    }
    return thread;
  }
  const size_t pick = engine.options.order == Order::reverse ? engine.ready.size() - 1
                                                             : engine.ready_head + engine.order_random() % count;
  thread = engine.ready[pick];
  engine.ready[pick] = engine.ready.back();
  engine.ready.pop_back();
  return thread;
}

// The fibre that runs gives way, to a thread that is ready or to the main loop, which finds something to do.
void give_way(bool ends) {
  Thread* const own = engine.self;
  const bool copy_now =
      engine.options.copies == When::random && !engine.copies.empty() && engine.copies_random() % 64 == 0;
  Thread* const next = copy_now || ends ? nullptr : next_ready();
  if (next == own) return enter(own);
  ++statistics().switches;
  if (next != nullptr) {
    enter(next);
    own->fibre.switch_to(next->fibre);
  } else {
    own->fibre.switch_to(engine.main, ends);
  }
}

void end_thread() {
  Thread& thread = *engine.self;
  finish_copies(thread);
  check_products(thread);
  thread.done = true;
  ++engine.progress;
  Block& block = *thread.block;
  --block.alive;
  block.warps[static_cast<size_t>(thread.warp)].alive &= ~(1u << thread.lane);
  leave_barriers(block, thread);
  happened_before(&block.grid->end);
}

void thread_main() {
  engine.self->fibre.entered();
  happens_after(&kernels_begin);
  // The kernel before this one may still run; those before that one are over when all its blocks have waited for them.
  const Grid& grid = *engine.self->block->grid;
  if (grid.previous != nullptr)
    for (const Grid* over = grid.previous->previous; over != nullptr; over = over->previous)
      if (over->complete()) happens_after(&over->end);
  grid.kernel->body();
  be_quiet();
  end_thread();
  be_seen();
  give_way(true);
  std::abort();
}

// Those who spin look again, once everybody else has done what could be done.
bool wake_spinning() {
  static uint64_t progress_seen = 0;
  if (engine.spinning.empty() || progress_seen == engine.progress) return false;
  progress_seen = engine.progress;
  for (Thread* thread : engine.spinning) engine.ready.push_back(thread);
  engine.spinning.clear();
  return true;
}

bool start_blocks() {
  for (Grid* grid : engine.grids) {
    if (grid->previous != nullptr && !grid->previous->may_start_next()) return false;
    if (grid->started == grid->blocks) continue;
    if (has_room(*grid)) {
      start_block(*grid);
      return true;
    }
  }
  return false;
}

// Blocks that have said that the next kernel may start wait until it has, or until nothing else can happen.
bool release_held() {
  for (Grid* grid : engine.grids)
    for (Block* block : grid->resident)
      if (block->held) {
        block->held = false;
        for (Thread* thread : block->held_threads) engine.ready.push_back(thread);
        block->held_threads.clear();
        return true;
      }
  return false;
}

// The first blocks of each kernel that may run.
void fill() {
  for (Grid* grid : engine.grids) {
    if (grid->previous != nullptr && !grid->previous->may_start_next()) return;
    const auto moving = [&] {
      return static_cast<int>(
          std::count_if(grid->resident.begin(), grid->resident.end(), [](const Block* block) { return !block->held; }));
    };
    while (grid->started < grid->blocks && moving() < grid->resident_at_first && has_room(*grid)) start_block(*grid);
  }
}

void run() {
  for (;;) {
    fill();
    Thread* thread = nullptr;
    if (engine.copies.empty() || engine.options.copies != When::random || engine.copies_random() % 64 != 0)
      thread = next_ready();
    if (thread != nullptr) {
      ++statistics().switches;
      enter(thread);
      engine.main.switch_to(thread->fibre);
      if (engine.self->done && engine.self->block->alive == 0) end_block(*engine.self->block);
      continue;
    }
    // Nothing is ready: what may happen as late as this happens now, one thing at a time.
    if (!engine.products.empty() &&
        (engine.copies.empty() || engine.options.copies != When::random || engine.copies_random() % 2 == 0)) {
      run_products();
    } else if (!engine.copies.empty()) {
      run_copy();
    } else if (wake_spinning() || start_blocks() || release_held()) {
      continue;
    } else if (std::all_of(engine.grids.begin(), engine.grids.end(), [](const Grid* g) { return g->complete(); })) {
      return;
    } else {
      report_deadlock();
    }
  }
}

}  // namespace

int resident_most(const Grid& grid) {
  const DeviceLimits& limits = device_limits();
  const dim3& block = grid.kernel->block;
  const auto threads = static_cast<int>(block.x * block.y * block.z);
  const int whole_warps = (threads + 31) / 32 * 32;
  const auto shared = static_cast<int>(limits.shared_per_multiprocessor / shared_of_block(grid));
  const int each =
      std::min({limits.threads_per_multiprocessor / whole_warps, shared, limits.blocks_per_multiprocessor});
  return std::max(1, each) * limits.multiprocessors;
}

bool happens_now() {
  const Options& o = engine.options;
  return o.copies == When::eager || (o.copies == When::random && engine.copies_random() % 2 == 0);
}

void ends_with_kernel(const Block& block) {
  happened_before(&block.grid->end);
}

void make_ready(Thread* thread) {
  thread->waits = Waits::nothing;
  ++engine.progress;
  (thread->block->held ? thread->block->held_threads : engine.ready).push_back(thread);
}

void enter(Thread* thread) {
  engine.self = thread;
  threadIdx = thread->place;
  if (thread->block == engine.block) return;
  engine.block = thread->block;
  blockIdx = thread->block->index;
  blockDim = thread->block->grid->kernel->block;
  gridDim = thread->block->grid->kernel->grid;
}

void wait_for(Waits what, uint32_t at, uint32_t parity) {
  Thread& thread = *engine.self;
  ++engine.progress;
  thread.waits = what;
  thread.waits_at = at;
  thread.waits_parity = parity;
  give_way(false);
}

// Atomics order nothing by themselves: what came before a fence is over for whoever finds what the atomic behind it
// wrote, and executes a fence.
void fence() {
  if constexpr (!kThreadSanitizer) return;
  Thread& thread = *engine.self;
  if (thread.last_atomic != nullptr) happens_after(thread.last_atomic);
  thread.fenced = true;
}
void note_atomic(const void* at) {
  Thread& thread = *engine.self;
  if (thread.fenced) happened_before(at);
  thread.last_atomic = at;
}

int lane() {
  return engine.self->lane;
}

void spin() {
  const Quiet quiet;
  engine.spinning.push_back(engine.self);
  give_way(false);
}

void wait_for_previous_kernel() {
  const Quiet quiet;
  Grid* const previous = engine.block->grid->previous;
  if (previous == nullptr) return;
  if (!previous->complete()) {
    previous->waiting.push_back(engine.self);
    wait_for(Waits::previous_kernel);
  }
  happens_after(&previous->end);
}

// The next kernel starts at the worst moment: with this block's threads where they are now.
void launch_next_kernel() {
  const Quiet quiet;
  Block& block = *engine.block;
  if (block.triggered) return;
  trigger(block);
  if (block.grid->next == nullptr) return;
  block.held = true;
  auto& ready = engine.ready;
  const auto begin = ready.begin() + static_cast<std::ptrdiff_t>(engine.ready_head);
  const auto own = std::stable_partition(begin, ready.end(), [&](const Thread* t) { return t->block != &block; });
  block.held_threads.assign(own, ready.end());
  ready.erase(own, ready.end());
  block.held_threads.push_back(engine.self);
  give_way(false);
}

bool in_kernel() {
  return engine.running && engine.block != nullptr;
}

void run_kernels(std::span<const Kernel> chain) {
  if (engine.running) fail("a kernel is started while another runs");
  const Quiet quiet;
  engine.running = true;
  engine.main.adopt_thread();
  std::vector<Grid> grids;
  grids.reserve(chain.size());
  for (const Kernel& kernel : chain) grids.push_back(make_grid(kernel));
  engine.grids.clear();
  for (Grid& grid : grids) {
    if (&grid != &grids.front()) {
      grid.previous = &grid - 1;
      (&grid - 1)->next = &grid;
    }
    engine.grids.push_back(&grid);
  }
  happened_before(&kernels_begin);
  const auto begin = std::chrono::steady_clock::now();
  run();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  for (const Grid& grid : grids) {
    happens_after(&grid.end);
    if (grid.layout.static_bytes > grid.known_static_shared)
      static_shared()[grid.kernel->function] = grid.layout.static_bytes;
  }
  note_kernels(chain, seconds.count());
  engine.grids.clear();
  engine.ready.clear();
  engine.ready_head = 0;
  engine.block = nullptr;
  engine.running = false;
}

}  // namespace softgpu
