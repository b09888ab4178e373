// The copy engine, which runs by itself: as late as a barrier or a wait lets it, at once, or at random.

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "softgpu/engine/numbers.h"
#include "softgpu/engine/state.h"

namespace softgpu {
namespace {

TensorMap read_map(const CUtensorMap* map) {
  TensorMap out;
  std::memcpy(&out, map, sizeof(out));
  if (out.magic != TensorMap::kMagic) fail("a copy of a tensor without a tensor map");
  return out;
}

uint32_t box_bytes(const TensorMap& map) {
  return map.box[0] * map.box[1] * map.box[2] * map.type_bytes;
}

void check_box(const TensorMap& map, uint32_t at) {
  if (at % (map.swizzle_bytes != 0 ? 128 : 16) != 0) fail("a box of a tensor at %x of shared memory, not aligned", at);
  if (engine.block->memory.at(at, box_bytes(map)) == nullptr)
    fail("a box of %u bytes at %x, of which the block's shared memory ends before", box_bytes(map), at);
}

// Calls row(global memory or null outside of the tensor, address in shared memory, bytes inside the tensor) for every
// row.
template <typename Row>
void each_row(const TensorMap& map, int x, int y, int z, uint32_t at, Row row) {
  const uint32_t row_bytes = map.box[0] * map.type_bytes;
  const int64_t inside = std::clamp<int64_t>(static_cast<int64_t>(map.sizes[0]) - x, 0, map.box[0]) * map.type_bytes;
  if (x < 0) fail("a box of a tensor that begins before its first element");
  for (uint32_t k = 0; k < map.box[2]; ++k)
    for (uint32_t j = 0; j < map.box[1]; ++j, at += row_bytes) {
      const int64_t gy = int64_t{y} + j, gz = int64_t{z} + k;
      const bool exists = inside > 0 && gy >= 0 && gy < static_cast<int64_t>(map.sizes[1]) && gz >= 0 &&
                          gz < static_cast<int64_t>(map.sizes[2]);
      unsigned char* memory = map.base + gz * static_cast<int64_t>(map.strides[1]) +
                              gy * static_cast<int64_t>(map.strides[0]) + int64_t{x} * map.type_bytes;
      row(exists ? memory : nullptr, at, exists ? static_cast<uint32_t>(inside) : 0);
    }
}

void check_global(const void* memory, size_t bytes) {
  if (!device_may_touch(memory, bytes))
    fail("the copy engine touches %zu bytes at %p, which are no one's", bytes, memory);
}

void load_box(const Copy& copy) {
  const uint32_t row_bytes = copy.map.box[0] * copy.map.type_bytes;
  each_row(copy.map, copy.x, copy.y, copy.z, copy.to, [&](const unsigned char* from, uint32_t to, uint32_t inside) {
    if (inside > 0) {
      check_global(from, inside);
      reads(from, inside);
    }
    for (uint32_t b = 0; b < row_bytes; b += 16) {
      unsigned char* piece = copy.block->memory.at(copy.map.swizzle_bytes != 0 ? swizzled(to + b) : to + b, 16);
      writes(piece, 16);
      const uint32_t bytes = std::min(inside - std::min(inside, b), 16u);
      std::memcpy(piece, from + b, bytes);
      std::memset(piece + bytes, 0, 16 - bytes);
    }
  });
}

void load_bytes(const Copy& copy) {
  unsigned char* to = copy.block->memory.at(copy.to, copy.bytes);
  check_global(copy.from, copy.bytes);
  reads(copy.from, copy.bytes);
  writes(to, copy.bytes);
  std::memcpy(to, copy.from, copy.bytes);
}

void run(const Copy& copy) {
  const Worker::Turn turn(next_worker());
  happens_after(copy.issued);
  (copy.tensor ? load_box : load_bytes)(copy);
  happened_before(copy.block->memory.at(copy.barrier, 8));
  mbarrier_receive(*copy.block, copy.barrier, copy.tensor ? box_bytes(copy.map) : copy.bytes);
}

void start(const Copy& copy) {
  if (engine.block->memory.at(copy.barrier, 8) == nullptr)
    fail("a copy to a barrier at %x, which is none", copy.barrier);
  if (happens_now())
    run(copy);
  else
    engine.copies.push_back(copy);
}

// --- sums ------------------------------------------------------------------------------------------------------------

void read(const Block& block, Sum& sum) {
  if (!sum.read.empty()) return;
  const Worker::Turn turn(next_worker());
  happens_after(sum.issued);
  if (!sum.tensor) {
    const unsigned char* from = block.memory.at(sum.from, sum.bytes);
    reads(from, sum.bytes);
    sum.read.resize(sum.bytes / sizeof(float));
    std::memcpy(sum.read.data(), from, sum.bytes);
    happened_before(sum.issued);
    return;
  }
  sum.read.resize(box_bytes(sum.map) / sizeof(float));
  for (uint32_t b = 0; b < box_bytes(sum.map); b += 16) {
    const unsigned char* from = block.memory.at(sum.map.swizzle_bytes != 0 ? swizzled(sum.from + b) : sum.from + b, 16);
    reads(from, 16);
    std::memcpy(&sum.read[b / sizeof(float)], from, 16);
  }
  happened_before(sum.issued);
}

void add(float* to, const float* from, size_t bytes) {
  check_global(to, bytes);
  for (size_t i = 0; i < bytes / sizeof(float); ++i) {
    // As the L2 does it: an atomic operation, which does not race with others.
    uint32_t bits = __atomic_load_n(reinterpret_cast<uint32_t*>(to + i), __ATOMIC_RELAXED);
    const float sum = std::bit_cast<float>(bits) + from[i];
    __atomic_store_n(reinterpret_cast<uint32_t*>(to + i), std::bit_cast<uint32_t>(sum), __ATOMIC_RELAXED);
  }
  adds(to, bytes / sizeof(float));
}

void write(const Block& block, const Sum& sum) {
  const Worker::Turn turn(next_worker());
  happens_after(sum.issued);
  if (!sum.tensor) {
    add(sum.to, sum.read.data(), sum.bytes);
  } else {
    each_row(sum.map, sum.x, sum.y, sum.z, 0, [&](unsigned char* to, uint32_t at, uint32_t inside) {
      if (inside > 0) add(reinterpret_cast<float*>(to), &sum.read[at / sizeof(float)], inside);
    });
  }
  ends_with_kernel(block);
}

void start(Sum&& sum) {
  Thread& thread = *engine.self;
  sum.issued = issue();
  if (happens_now()) read(*thread.block, sum);
  thread.sums.push_back(std::move(sum));
  ++thread.open_sums;
}

// How many sums the first `groups` groups have.
size_t sums_of(const Thread& thread, size_t groups) {
  return std::accumulate(thread.sum_groups.begin(), thread.sum_groups.begin() + static_cast<std::ptrdiff_t>(groups),
                         size_t{0});
}

// The first `groups` groups have read their shared memory.
void read_groups(Thread& thread, size_t groups) {
  const size_t count = sums_of(thread, groups);
  for (size_t i = 0; i < count; ++i) {
    read(*thread.block, thread.sums[i]);
    happens_after(thread.sums[i].issued);
  }
}

// And are added.
void write_groups(Thread& thread, size_t groups) {
  const size_t count = sums_of(thread, groups);
  for (size_t i = 0; i < count; ++i) write(*thread.block, thread.sums[i]);
  thread.sums.erase(thread.sums.begin(), thread.sums.begin() + static_cast<std::ptrdiff_t>(count));
  thread.sum_groups.erase(thread.sum_groups.begin(), thread.sum_groups.begin() + static_cast<std::ptrdiff_t>(groups));
}

}  // namespace

void run_copy() {
  // Copies are not ordered among each other.
  size_t pick = 0;
  if (engine.options.order == Order::reverse) pick = engine.copies.size() - 1;
  if (engine.options.order == Order::random || engine.options.copies == When::random)
    pick = engine.copies_random() % engine.copies.size();
  const Copy copy = engine.copies[pick];
  engine.copies.erase(engine.copies.begin() + static_cast<std::ptrdiff_t>(pick));
  ++engine.progress;
  run(copy);
}

void finish_copies(Thread& thread) {
  if (!thread.small_copies.empty()) fail("a thread ends while its copies to shared memory are on their way");
  if (thread.open_sums > 0) fail("a thread ends with sums of the copy engine that are in no group");
  for (const Sum& sum : thread.sums)
    if (sum.read.empty()) fail("a thread ends while the copy engine still reads its shared memory");
  write_groups(thread, thread.sum_groups.size());
}

void finish_copies(Block& block) {
  for (const Copy& copy : engine.copies)
    if (copy.block == &block) fail("a block ends while copies to its shared memory are on their way");
  block.mbarriers.clear();
}

// --- as kernels call it ----------------------------------------------------------------------------------------------

void tensor_load(uint32_t to, const CUtensorMap* map, int x, int y, int z, uint32_t barrier) {
  const Quiet quiet;
  Copy copy{.block = engine.block,
            .tensor = true,
            .map = read_map(map),
            .x = x,
            .y = y,
            .z = z,
            .to = to,
            .barrier = barrier,
            .issued = issue()};
  check_box(copy.map, to);
  start(copy);
}

void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  const Quiet quiet;
  if (to % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail("a copy of %u bytes from %p to %x of shared memory: not in pieces of 16", bytes, from, to);
  if (engine.block->memory.at(to, bytes) == nullptr) fail("a copy of %u bytes to %x, beyond shared memory", bytes, to);
  start(Copy{.block = engine.block, .from = from, .to = to, .bytes = bytes, .barrier = barrier, .issued = issue()});
}

void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  const Quiet quiet;
  if (from % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0)
    fail("a sum of %u bytes at %x of shared memory to %p: not in pieces of 16", bytes, from, static_cast<void*>(to));
  if (engine.block->memory.at(from, bytes) == nullptr)
    fail("a sum of %u bytes at %x, beyond shared memory", bytes, from);
  start(Sum{.to = to, .from = from, .bytes = bytes});
}

void tensor_add(const CUtensorMap* map, int x, int y, int z, uint32_t from) {
  const Quiet quiet;
  Sum sum{.tensor = true, .map = read_map(map), .x = x, .y = y, .z = z, .from = from};
  if (sum.map.is_float == 0) fail("a sum of a tensor that is not fp32");
  check_box(sum.map, from);
  start(std::move(sum));
}

void bulk_commit() {
  const Quiet quiet;
  Thread& thread = *engine.self;
  thread.sum_groups.push_back(thread.open_sums);
  thread.open_sums = 0;
}
void bulk_wait_read(int groups_left) {
  const Quiet quiet;
  constexpr size_t kMostRead = 16;  // they take memory until they are added
  Thread& thread = *engine.self;
  const size_t groups = thread.sum_groups.size(), left = static_cast<size_t>(groups_left);
  if (groups <= left) return;
  read_groups(thread, groups - left);
  if (happens_now() || groups - left > kMostRead) write_groups(thread, groups - left);
}
void bulk_wait() {
  const Quiet quiet;
  Thread& thread = *engine.self;
  read_groups(thread, thread.sum_groups.size());
  write_groups(thread, thread.sum_groups.size());
}

namespace {

void run(const SmallCopy& copy) {
  happens_after(copy.issued);
  writes(copy.to, 16);
  if (!copy.exists) {
    std::memset(copy.to, 0, 16);
    return;
  }
  check_global(copy.from, 16);
  reads(copy.from, 16);
  std::memcpy(copy.to, copy.from, 16);
}

void run_small_copies(Thread& thread) {
  const Worker::Turn turn(next_worker());
  for (const SmallCopy& copy : thread.small_copies) run(copy);
  thread.small_copies.clear();
  happened_before(&thread.small_copies);
}

}  // namespace

void copy_async(void* to, const void* from, bool exists) {
  const Quiet quiet;
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || (exists && reinterpret_cast<uintptr_t>(from) % 16 != 0))
    fail("a copy of 16 bytes from %p to %p, not aligned", from, to);
  if (engine.block->memory.at(window(to), 16) == nullptr) fail("a copy to %p, beyond shared memory", to);
  engine.self->small_copies.push_back({to, from, exists, issue()});
  if (happens_now()) run_small_copies(*engine.self);
}
void copies_wait() {
  const Quiet quiet;
  run_small_copies(*engine.self);
  happens_after(&engine.self->small_copies);
}

}  // namespace softgpu
