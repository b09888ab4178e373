#include "plan/schedule/vector_kernels.h"

#include "core/cpu_isa.h"

namespace sb {
namespace {

bool wide() {
  static const bool wide = cpu_isa() == CpuIsa::avx512;
  return wide;
}

}  // namespace

void exp_all(double* x, size_t count) {
  (wide() ? avx512::exp_all : avx2::exp_all)(x, count);
}

void log_all(const int32_t* x, size_t count, double* out) {
  (wide() ? avx512::log_all : avx2::log_all)(x, count, out);
}

void read_curve(const double* share, double shift, const double* depth, size_t count, double* out) {
  (wide() ? avx512::read_curve : avx2::read_curve)(share, shift, depth, count, out);
}

void blend_lanes(const double* value, size_t rows, size_t levels, const double* weight, double* out) {
  (wide() ? avx512::blend_lanes : avx2::blend_lanes)(value, rows, levels, weight, out);
}

void run_lanes(const Schedule::Node* nodes, size_t count, int stages, const double* forward, const double* backward,
               const double* forward_transfer, const double* backward_transfer, bool transfers_by_lane, double* end) {
  (wide() ? avx512::run_lanes : avx2::run_lanes)(nodes, count, stages, forward, backward, forward_transfer,
                                                 backward_transfer, transfers_by_lane, end);
}

}  // namespace sb
