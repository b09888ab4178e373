// Tensor cores. A product of a warpgroup runs by itself between its issue and the wait for it; here as late as can be:
// when no thread of the block has anything else to do, so that an operand that is given back too early is overwritten
// by then. Each warp has its 16 rows to itself: nothing says that the four of a group must have come equally far.

#include <algorithm>
#include <bit>
#include <cstring>

#include "softgpu/engine/numbers.h"
#include "softgpu/engine/state.h"

namespace softgpu {
namespace {

constexpr int kDepth = 16, kRows = 16, kMostColumns = 256;

bool unused = false;  // the product that is being done may read anything

// Eight neighbours in shared memory of an operand with 128-byte swizzle: from (row, k) along k, or along the rows where
// the operand is transposed.
const uint16_t* eight(const Block& block, uint64_t descriptor, bool transposed, int row, int k) {
  const auto start = static_cast<uint32_t>(descriptor & 0x3FFF) << 4,
             lead = static_cast<uint32_t>(descriptor >> 16 & 0x3FFF) << 4,
             stride = static_cast<uint32_t>(descriptor >> 32 & 0x3FFF) << 4;
  const auto r = static_cast<uint32_t>(row), depth = static_cast<uint32_t>(k);
  const uint32_t at = transposed ? start + r / 64 * lead + depth / 8 * stride + depth % 8 * 128 + r % 64 * 2
                                 : start + r / 8 * stride + r % 8 * 128 + depth * 2;
  const unsigned char* found = block.memory.at(swizzled(at), 16);
  if (found == nullptr) fail("a product reads at %x, beyond shared memory", swizzled(at));
  if (!unused) reads(found, 16);
  return reinterpret_cast<const uint16_t*>(found);
}

struct Operands {
  alignas(32) float a[kRows][kDepth];
  alignas(32) float b[kDepth][kMostColumns];
};

template <bool kHalf>
float number(uint32_t bits) {
  return kHalf ? from_half(bits) : from_bf16(bits);
}

template <bool kHalf>
void read_b(const Block& block, const Product& p, Operands& to) {
  if (p.transposed_b) {
    for (int k = 0; k < kDepth; ++k)
      for (int n = 0; n < p.columns; n += 8) {
        const uint16_t* from = eight(block, p.b, true, n, k);
        for (int i = 0; i < 8; ++i) to.b[k][n + i] = number<kHalf>(from[i]);
      }
    return;
  }
  // Stored along k: eight columns at a time, so that what is written lies together.
  for (int k = 0; k < kDepth; k += 8)
    for (int n = 0; n < p.columns; n += 8) {
      float columns[8][8];
      for (int j = 0; j < 8; ++j) {
        const uint16_t* from = eight(block, p.b, false, n + j, k);
        for (int i = 0; i < 8; ++i) columns[j][i] = number<kHalf>(from[i]);
      }
      for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 8; ++j) to.b[k + i][n + j] = columns[j][i];
    }
}

template <bool kHalf>
void read_a(const Block& block, const Product* const (&lanes)[32], int first_row, Operands& to) {
  const Product& p = *lanes[0];
  if (p.lanes != nullptr) {
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i & 1), k = 2 * (lane % 4) + 8 * (i >> 1);
        const uint32_t pair = lanes[lane]->lanes[i];
        to.a[row][k] = number<kHalf>(pair & 0xFFFF);
        to.a[row][k + 1] = number<kHalf>(pair >> 16);
      }
    return;
  }
  for (int row = 0; row < kRows; row += p.transposed_a ? 8 : 1)
    for (int k = 0; k < kDepth; k += p.transposed_a ? 1 : 8) {
      const uint16_t* from = eight(block, p.a, p.transposed_a, first_row + row, k);
      for (int i = 0; i < 8; ++i) (p.transposed_a ? to.a[row + i][k] : to.a[row][k + i]) = number<kHalf>(from[i]);
    }
}

// What one lane holds of a row of sums: columns 8j + 2·(lane % 4) and the next, of rows lane / 4 and 8 below.
void store_sums(const float (&sums)[kRows][kMostColumns], const Product* const (&lanes)[32]) {
  const Product& p = *lanes[0];
  for (int lane = 0; lane < 32; ++lane)
    for (int j = 0; j < p.columns / 8; ++j)
      for (int h = 0; h < 2; ++h) {
        const float* sum = &sums[lane / 4 + 8 * h][8 * j + 2 * (lane % 4)];
        if (!p.half) {
          float* to = static_cast<float*>(lanes[lane]->d) + 4 * j + 2 * h;
          for (int e = 0; e < 2; ++e) to[e] = sum[e] + (p.accumulate ? to[e] : 0.f);
          continue;
        }
        uint32_t* to = static_cast<uint32_t*>(lanes[lane]->d) + 2 * j + h;
        const float before[2] = {p.accumulate ? from_half(*to & 0xFFFF) : 0.f,
                                 p.accumulate ? from_half(*to >> 16) : 0.f};
        *to = static_cast<uint32_t>(__half_as_ushort(__float2half_rn(sum[0] + before[0]))) |
              static_cast<uint32_t>(__half_as_ushort(__float2half_rn(sum[1] + before[1]))) << 16;
      }
}

void check(const Product* const (&lanes)[32]) {
  const Product& p = *lanes[0];
  constexpr uint64_t kSwizzle128 = 1;
  if ((p.lanes == nullptr && p.a >> 62 != kSwizzle128) || p.b >> 62 != kSwizzle128)
    fail("a product of operands without 128-byte swizzle");
  if (p.columns % 16 != 0 || p.columns > kMostColumns) fail("a product of %d columns", p.columns);
  for (const Product* other : lanes)
    if (other->a != p.a || other->b != p.b || other->columns != p.columns || other->accumulate != p.accumulate ||
        other->half != p.half || (other->lanes == nullptr) != (p.lanes == nullptr))
      fail("lanes of a warp issue different products");
}

void multiply(const Block& block, const Product* const (&lanes)[32], int warp_of_group) {
  check(lanes);
  const Product& p = *lanes[0];
  unused = p.unused;
  if constexpr (kThreadSanitizer)
    for (const Product* lane : lanes) {
      if (lane->lanes != nullptr) reads(lane->lanes, 4 * sizeof(uint32_t));
      writes(lane->d, static_cast<size_t>(lane->columns) * (lane->half ? 1 : 2));
    }
  static Operands operands;
  static float sums[kRows][kMostColumns];
  if (p.half) {
    read_b<true>(block, p, operands);
    read_a<true>(block, lanes, warp_of_group * kRows, operands);
  } else {
    read_b<false>(block, p, operands);
    read_a<false>(block, lanes, warp_of_group * kRows, operands);
  }
  // Four rows by sixteen columns at a time, which the registers of the host hold.
  for (int n = 0; n < p.columns; n += 16)
    for (int row = 0; row < kRows; row += 4) {
      Eight sum[4][2] = {};
      for (int k = 0; k < kDepth; ++k) {
        const auto* b = reinterpret_cast<const Eight*>(&operands.b[k][n]);
        for (int r = 0; r < 4; ++r)
          for (int half = 0; half < 2; ++half) sum[r][half] += operands.a[row + r][k] * b[half];
      }
      for (int r = 0; r < 4; ++r) std::memcpy(&sums[row + r][n], sum[r], sizeof(sum[r]));
    }
  store_sums(sums, lanes);
}

// The oldest groups of a warp's products, until so many are left.
void finish(Block& block, int warp, size_t groups_left) {
  Thread* const* threads = &block.threads[static_cast<size_t>(warp) * 32];
  Thread& first = *threads[0];
  if (first.product_groups.size() <= groups_left) return;
  const size_t groups = first.product_groups.size() - groups_left;
  size_t count = 0;
  for (size_t i = 0; i < groups; ++i) count += first.product_groups[i];
  for (int lane = 0; lane < 32; ++lane)
    if (threads[lane]->product_groups != first.product_groups ||
        threads[lane]->products.size() != first.products.size())
      fail("lanes of a warp issued different products");
  Warp& of = block.warps[static_cast<size_t>(warp)];
  const Worker::Turn turn(of.tensor_core);
  for (size_t i = 0; i < count; ++i) {
    if constexpr (kThreadSanitizer) {
      happens_after(of.issued.front());
      of.issued.pop_front();
    }
    const Product* lanes[32];
    for (int lane = 0; lane < 32; ++lane) lanes[lane] = &threads[lane]->products[i];
    multiply(block, lanes, warp % 4);
  }
  of.finished_products += count;
  happened_before(&of);
  for (int lane = 0; lane < 32; ++lane) {
    Thread& thread = *threads[lane];
    thread.products.erase(thread.products.begin(), thread.products.begin() + static_cast<std::ptrdiff_t>(count));
    thread.product_groups.erase(thread.product_groups.begin(),
                                thread.product_groups.begin() + static_cast<std::ptrdiff_t>(groups));
  }
}

}  // namespace

void run_products() {
  size_t pick = 0;
  if (engine.options.order == Order::reverse) pick = engine.products.size() - 1;
  if (engine.options.order == Order::random) pick = engine.order_random() % engine.products.size();
  const ProductWait wait = engine.products[pick];
  engine.products.erase(engine.products.begin() + static_cast<std::ptrdiff_t>(pick));
  Warp& warp = wait.block->warps[static_cast<size_t>(wait.warp)];
  Thread* const* threads = &wait.block->threads[static_cast<size_t>(wait.warp) * 32];
  enter(threads[0]);  // whom a message names
  finish(*wait.block, wait.warp, warp.product_groups_left);
  warp.product_waiters = 0;
  for (int lane = 0; lane < 32; ++lane) make_ready(threads[lane]);
}

void check_products(const Thread& thread) {
  if (!thread.products.empty()) fail("a thread ends while its products run");
}

// The lanes of a warp issue a product one after the other: the first of them begins its entry.
void note_issue(Thread& thread) {
  Warp& warp = thread.block->warps[static_cast<size_t>(thread.warp)];
  const size_t behind = thread.issued_products++ - warp.finished_products;
  if (behind == warp.issued.size())
    warp.issued.push_back(issue());
  else
    happened_before(warp.issued[behind]);
}

void product(const Product& product) {
  const Quiet quiet;
  if constexpr (kThreadSanitizer) note_issue(*engine.self);
  engine.self->products.push_back(product);
  engine.self->products.back().unused = engine.self->results_unused;
  ++engine.self->open_products;
}
void results_unused(bool from_here) {
  engine.self->results_unused = from_here;
}
void product_commit() {
  const Quiet quiet;
  engine.self->product_groups.push_back(engine.self->open_products);
  engine.self->open_products = 0;
}

void product_wait(int groups_left) {
  const Quiet quiet;
  Thread& self = *engine.self;
  const auto left = static_cast<size_t>(groups_left);
  if (self.product_groups.size() <= left) return;
  Block& block = *engine.block;
  Warp& warp = block.warps[static_cast<size_t>(self.warp)];
  if (warp.alive != ~0u) fail("a wait for products of a warp of which only the lanes %08x run", warp.alive);
  if (warp.product_waiters != 0 && warp.product_groups_left != left)
    fail("lanes of a warp wait for different products");
  warp.product_groups_left = left;
  warp.product_waiters |= 1u << self.lane;
  if (warp.product_waiters == ~0u) {
    if (engine.options.copies == When::random && happens_now()) {
      finish(block, self.warp, left);
      warp.product_waiters = 0;
      Thread* const* threads = &block.threads[static_cast<size_t>(self.warp) * 32];
      for (int lane = 0; lane < 32; ++lane)
        if (lane != self.lane) make_ready(threads[lane]);
      happens_after(&warp);
      return;
    }
    engine.products.push_back({&block, self.warp});
  }
  wait_for(Waits::products, static_cast<uint32_t>(groups_left));
  happens_after(&warp);
}

}  // namespace softgpu
