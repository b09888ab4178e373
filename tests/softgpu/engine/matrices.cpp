// Matrices that the lanes of a warp load, store and multiply together (ldmatrix, stmatrix, mma). The lane that comes
// last does it for all.

#include <cstring>

#include "softgpu/engine/numbers.h"
#include "softgpu/engine/state.h"

namespace softgpu {
namespace {

using Rows = unsigned char (*)[32];

unsigned char* row_of_matrix(Rows given, int matrix, int row) {
  uint32_t address;
  std::memcpy(&address, given[matrix * 8 + row], sizeof(address));
  return static_cast<unsigned char*>(from_window(address, 16));
}

// Leaves for every lane its pair of elements of each of the four matrices.
template <bool kTransposed>
void load(Rows given) {
  uint16_t elements[4][8][8];
  for (int m = 0; m < 4; ++m)
    for (int row = 0; row < 8; ++row) {
      const unsigned char* from = row_of_matrix(given, m, row);
      reads(from, 16);
      std::memcpy(elements[m][row], from, 16);
    }
  for (int lane = 0; lane < 32; ++lane) {
    const int row = lane / 4, column = 2 * (lane % 4);
    uint16_t own[4][2];
    for (int m = 0; m < 4; ++m)
      for (int e = 0; e < 2; ++e) own[m][e] = kTransposed ? elements[m][column + e][row] : elements[m][row][column + e];
    std::memcpy(given[lane], own, sizeof(own));
  }
}

struct ToStore {
  uint32_t address, words[4];
};

void store(Rows given) {
  for (int m = 0; m < 4; ++m)
    for (int row = 0; row < 8; ++row) {
      unsigned char* to = row_of_matrix(given, m, row);
      writes(to, 16);
      for (int i = 0; i < 4; ++i)
        std::memcpy(to + 4 * i, given[row * 4 + i] + offsetof(ToStore, words) + 4 * m, sizeof(uint32_t));
    }
}

struct Operands {
  uint32_t a[4], b[2];
};

// A [16 × 16] by B [16 × 8]: for every lane columns 2·(lane % 4) and the next of rows lane / 4 and 8 below.
void multiply(Rows given) {
  alignas(32) float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    Operands own;
    std::memcpy(&own, given[lane], sizeof(own));
    const int row = lane / 4, k = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
      float* to = &a[row + 8 * (i & 1)][k + 8 * (i >> 1)];
      to[0] = from_bf16(own.a[i] & 0xFFFF);
      to[1] = from_bf16(own.a[i] >> 16);
    }
    for (int i = 0; i < 2; ++i) {
      b[k + 8 * i][row] = from_bf16(own.b[i] & 0xFFFF);
      b[k + 8 * i + 1][row] = from_bf16(own.b[i] >> 16);
    }
  }
  alignas(32) float sums[16][8];
  for (int row = 0; row < 16; row += 8) {
    Eight sum[8] = {};
    for (int k = 0; k < 16; ++k) {
      const Eight& of_b = *reinterpret_cast<const Eight*>(b[k]);
      for (int r = 0; r < 8; ++r) sum[r] += a[row + r][k] * of_b;
    }
    std::memcpy(sums[row], sum, sizeof(sum));
  }
  for (int lane = 0; lane < 32; ++lane)
    for (int h = 0; h < 2; ++h) std::memcpy(given[lane] + 8 * h, &sums[lane / 4 + 8 * h][2 * (lane % 4)], 8);
}

}  // namespace

void load_matrices(uint32_t (&to)[4], uint32_t address, bool transposed) {
  const Quiet quiet;
  const Given given =
      collect(~0u, &address, sizeof(address), Together::load_matrix, transposed ? load<true> : load<false>);
  std::memcpy(to, given[engine.self->lane], sizeof(to));
}

void store_matrices(uint32_t address, const uint32_t (&from)[4]) {
  const ToStore own{address, {from[0], from[1], from[2], from[3]}};
  collect(~0u, &own, sizeof(own), Together::store_matrix, store);
}

void multiply_bf16(float* c, const uint32_t* a, uint32_t b0, uint32_t b1) {
  const Quiet quiet;
  const Operands own{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Given given = collect(~0u, &own, sizeof(own), Together::multiply, multiply);
  float sums[4];
  std::memcpy(sums, given[engine.self->lane], sizeof(sums));
  for (int i = 0; i < 4; ++i) c[i] += sums[i];
}

}  // namespace softgpu
