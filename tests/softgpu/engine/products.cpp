// Tensor cores. A product of a warpgroup runs by itself between its issue and the wait for it; here as late as can be:
// when no thread of the block has anything else to do, so that an operand that is given back too early is overwritten
// by then. Each warp has its 16 rows to itself: nothing says that the four of a group must have come equally far.

#include <algorithm>
#include <bit>
#include <cstring>

#include <cuda_fp16.h>

#include "softgpu/engine/state.h"

namespace softgpu {
namespace {

constexpr int kDepth = 16, kRows = 16, kMostColumns = 256;

float from_bf16(uint32_t bits) {
  return std::bit_cast<float>(bits << 16);
}
float from_half(uint32_t bits) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
}

uint32_t swizzled(uint32_t address) {
  return address ^ ((address >> 7 & 7) << 4);
}

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
  reads(found, 16);
  return reinterpret_cast<const uint16_t*>(found);
}

struct Operands {
  float a[kRows][kDepth];
  float b[kDepth][kMostColumns];
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
  for (int k = 0; k < kDepth; k += 8)
    for (int n = 0; n < p.columns; ++n) {
      const uint16_t* from = eight(block, p.b, false, n, k);
      for (int i = 0; i < 8; ++i) to.b[k + i][n] = number<kHalf>(from[i]);
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
  if (p.columns % 8 != 0 || p.columns > kMostColumns) fail("a product of %d columns", p.columns);
  for (const Product* other : lanes)
    if (other->a != p.a || other->b != p.b || other->columns != p.columns || other->accumulate != p.accumulate ||
        other->half != p.half || (other->lanes == nullptr) != (p.lanes == nullptr))
      fail("lanes of a warp issue different products");
}

void multiply(const Block& block, const Product* const (&lanes)[32], int warp_of_group) {
  check(lanes);
  const Product& p = *lanes[0];
  static Operands operands;
  static float sums[kRows][kMostColumns];
  if (p.half) {
    read_b<true>(block, p, operands);
    read_a<true>(block, lanes, warp_of_group * kRows, operands);
  } else {
    read_b<false>(block, p, operands);
    read_a<false>(block, lanes, warp_of_group * kRows, operands);
  }
  for (int row = 0; row < kRows; ++row) {
    float* sum = sums[row];
    std::fill_n(sum, p.columns, 0.f);
    for (int k = 0; k < kDepth; ++k) {
      const float a = operands.a[row][k];
      const float* b = operands.b[k];
      for (int n = 0; n < p.columns; ++n) sum[n] += a * b[n];
    }
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
  for (size_t i = 0; i < count; ++i) {
    const Product* lanes[32];
    for (int lane = 0; lane < 32; ++lane) lanes[lane] = &threads[lane]->products[i];
    multiply(block, lanes, warp % 4);
  }
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
  if (options().order == Order::reverse) pick = engine.products.size() - 1;
  if (options().order == Order::random) pick = engine.order_random() % engine.products.size();
  const ProductWait wait = engine.products[pick];
  engine.products.erase(engine.products.begin() + static_cast<std::ptrdiff_t>(pick));
  Warp& warp = wait.block->warps[static_cast<size_t>(wait.warp)];
  Thread* const* threads = &wait.block->threads[static_cast<size_t>(wait.warp) * 32];
  enter(threads[0]);  // whom a message names
  finish(*wait.block, wait.warp, warp.product_groups_left);
  warp.product_waiters = 0;
  happened_before(&warp);
  for (int lane = 0; lane < 32; ++lane) make_ready(threads[lane]);
}

void check_products(const Thread& thread) {
  if (!thread.products.empty()) fail("a thread ends while its products run");
}

void product(const Product& product) {
  engine.self->products.push_back(product);
  ++engine.self->open_products;
}
void product_commit() {
  engine.self->product_groups.push_back(engine.self->open_products);
  engine.self->open_products = 0;
}

void product_wait(int groups_left) {
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
  happened_before(&warp);
  if (warp.product_waiters == ~0u) {
    if (options().copies == When::random && happens_now()) {
      finish(block, self.warp, left);
      warp.product_waiters = 0;
      happened_before(&warp);
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

// --- matrices of a warp ----------------------------------------------------------------------------------------------

// Every lane multiplies what it holds of the result by itself.
void multiply_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  const uint32_t own[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const Given given = collect(~0u, own, sizeof(own), Together::multiply);
  const int lane = engine.self->lane, row = lane / 4, column = 2 * (lane % 4);
  const auto word = [&](int of, int i) {
    uint32_t x;
    std::memcpy(&x, given[of] + 4 * i, 4);
    return x;
  };
  float sums[4] = {};
  for (int quarter = 0; quarter < 4; ++quarter) {  // k = 2·quarter and the next, and 8 further
    for (int far = 0; far < 2; ++far) {
      const uint32_t top = word(row * 4 + quarter, 2 * far), bottom = word(row * 4 + quarter, 2 * far + 1);
      for (int e = 0; e < 2; ++e) {
        const uint32_t b = word((column + e) * 4 + quarter, 4 + far);
        sums[e] += from_bf16(top & 0xFFFF) * from_bf16(b & 0xFFFF) + from_bf16(top >> 16) * from_bf16(b >> 16);
        sums[2 + e] +=
            from_bf16(bottom & 0xFFFF) * from_bf16(b & 0xFFFF) + from_bf16(bottom >> 16) * from_bf16(b >> 16);
      }
    }
  }
  for (int i = 0; i < 4; ++i) c[i] += sums[i];
}

namespace {

unsigned char* row_of_matrix(Given given, int matrix, int row) {
  uint32_t address;
  std::memcpy(&address, given[matrix * 8 + row], sizeof(address));
  return static_cast<unsigned char*>(from_window(address, 16));
}

}  // namespace

void load_matrices(uint32_t (&to)[4], uint32_t address, bool transposed) {
  const Given given = collect(~0u, &address, sizeof(address), Together::load_matrix);
  const int lane = engine.self->lane;
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int row = transposed ? 2 * (lane % 4) + e : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + e;
      const unsigned char* from = row_of_matrix(given, m, row) + 2 * column;
      reads(from, 2);
      std::memcpy(&pair[e], from, 2);
    }
    to[m] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}

void store_matrices(uint32_t address, const uint32_t (&from)[4]) {
  const Given given = collect(~0u, &address, sizeof(address), Together::store_matrix);
  const int lane = engine.self->lane;
  for (int m = 0; m < 4; ++m) {
    unsigned char* to = row_of_matrix(given, m, lane / 4) + 4 * (lane % 4);
    writes(to, 4);
    std::memcpy(to, &from[m], 4);
  }
}

}  // namespace softgpu
