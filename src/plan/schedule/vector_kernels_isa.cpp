#include <bit>

#include "plan/schedule/vector_kernels.h"

namespace sb::SB_ISA {

constexpr size_t kLanes = Schedule::kLanes;

// Eight doubles: one or two registers. Nothing outside this file sees them, so how they would be passed is no matter.
#pragma GCC diagnostic ignored "-Wpsabi"
typedef double Lanes __attribute__((vector_size(kLanes * sizeof(double))));
static Lanes load(const double* from) {
  Lanes lanes;
  __builtin_memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
static void store(double* to, const Lanes& lanes) {
  __builtin_memcpy(to, &lanes, sizeof lanes);
}

// The coefficient of the highest power comes first.
template <typename... Coefficients>
static double polynomial(double x, double highest, Coefficients... others) {
  double sum = highest;
  ((sum = sum * x + others), ...);
  return sum;
}

// Neither has a branch or a table, so that the loops vectorise.
void exp_all(double* x, size_t count) {
  constexpr double kLog2e = 1.4426950408889634, kLn2High = 0x1.62e42fefa3800p-1, kLn2Low = 0x1.ef35793c76730p-45;
  // Adding 1.5·2^52 rounds to an integer and leaves it in the low bits.
  constexpr double kRound = 0x1.8p52;
  for (size_t i = 0; i < count; ++i) {
    const double shifted = x[i] * kLog2e + kRound;
    const double whole = shifted - kRound;
    const double r = (x[i] - whole * kLn2High) - whole * kLn2Low;  // |r| ≤ ½ ln 2: the series ends at r^13
    const double sum = polynomial(r, 1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                  1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0);
    x[i] = std::bit_cast<double>(std::bit_cast<uint64_t>(sum) + (std::bit_cast<uint64_t>(shifted) << 52));
  }
}

void log_all(const int32_t* x, size_t count, double* out) {
  constexpr double kLn2 = 0.6931471805599453;
  constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1, kOne = uint64_t{1023} << 52, kInteger = uint64_t{0x433} << 52;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bits = std::bit_cast<uint64_t>(static_cast<double>(x[i]));
    // x = 2^exponent · m with m in 1 … 2; the exponent becomes a double by the bits of 2^52 + exponent.
    const double exponent = std::bit_cast<double>(kInteger | (bits >> 52)) - (0x1p52 + 1023);
    const double m = std::bit_cast<double>((bits & kMantissa) | kOne);
    const double upper = m > 1.4142135623730951 ? 1.0 : 0.0;
    const double near = m * (1.0 - 0.5 * upper);              // √½ … √2
    const double s = (near - 1.0) / (near + 1.0), z = s * s;  // log m = 2 (s + s³/3 + …), z ≤ 0.0295
    const double sum =
        polynomial(z, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9, 1.0 / 7, 0.2, 1.0 / 3, 1.0);
    out[i] = (exponent + upper) * kLn2 + 2.0 * s * sum;
  }
}

void read_curve(const double* share, double shift, const double* depth, size_t count, double* out) {
  for (size_t i = 0; i < count; ++i) {
    const double at = depth[i] + shift > 0.0 ? depth[i] + shift : 0.0;
    const auto point = static_cast<int>(at);
    out[i] = share[point] + (share[point + 1] - share[point]) * (at - point);
  }
}

void blend_lanes(const double* value, size_t rows, size_t levels, const double* weight, double* out) {
  for (size_t row = 0; row < rows; ++row) {
    Lanes sum{};
    for (size_t q = 0; q < levels; ++q) sum += value[row * levels + q] * load(weight + q * kLanes);
    store(out + row * kLanes, sum);
  }
}

enum class Transfers { none, alike, by_lane };

template <Transfers kTransfers>
static void run_lanes_with(const Schedule::Node* nodes, size_t count, int stages, const double* forward,
                           const double* backward, const double* forward_transfer, const double* backward_transfer,
                           double* end) {
  double* ends = end + static_cast<size_t>(stages) * kLanes;
  constexpr auto kStride = static_cast<ptrdiff_t>(kLanes);
  for (size_t id = 0; id < count; ++id) {
    const Schedule::Node node = nodes[id];
    const auto index = static_cast<size_t>(node.position * stages + node.stage);
    Lanes ready = load(ends + node.dependency * kStride);
    if constexpr (kTransfers == Transfers::alike)
      ready += (node.backward ? backward_transfer : forward_transfer)[index];
    else if constexpr (kTransfers == Transfers::by_lane)
      ready += load((node.backward ? backward_transfer : forward_transfer) + index * kLanes);
    const Lanes free = load(ends + node.previous * kStride);
    store(ends + id * kLanes,
          (free > ready ? free : ready) + load((node.backward ? backward : forward) + index * kLanes));
  }
}

void run_lanes(const Schedule::Node* nodes, size_t count, int stages, const double* forward, const double* backward,
               const double* forward_transfer, const double* backward_transfer, bool transfers_by_lane, double* end) {
  const auto run = forward_transfer == nullptr ? run_lanes_with<Transfers::none>
                   : transfers_by_lane         ? run_lanes_with<Transfers::by_lane>
                                               : run_lanes_with<Transfers::alike>;
  run(nodes, count, stages, forward, backward, forward_transfer, backward_transfer, end);
}

}  // namespace sb::SB_ISA
