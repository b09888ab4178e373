#pragma once

#include <string>
#include <string_view>

#include "core/cpu_isa.h"

namespace sb {

// OpenBLAS names its kernels after the processor that they were written for: "Haswell", "SkylakeX". These are the ones
// to multiply with, given those that it chose itself: its own where they have the width of `isa`, else its plain ones
// of that width. Of the processor and the library alone, and never of a measurement: kernels differ in the order of
// their sums, and the ranks of a run, and a run repeated, must have the same bits.
std::string_view choose_blas_kernels(CpuIsa isa, std::string_view own);

struct BlasKernels {
  std::string name;          // OpenBLAS' own
  bool by_variable = false;  // OPENBLAS_CORETYPE in the environment overrode the choice
};
// The kernels of this process; the first call chooses them.
BlasKernels blas_kernels();
// "OpenBLAS for SkylakeX", or "OpenBLAS for Haswell (by OPENBLAS_CORETYPE)".
std::string describe(const BlasKernels& kernels);
// What to say of kernels that are narrower than `isa`; empty where they are not.
std::string warn_of_narrow(const BlasKernels& kernels, CpuIsa isa);

// Multiplies with other kernels from now on, for comparisons: no product may be running. False, and nothing is changed,
// where the library does not have them. This processor must have their instructions.
bool use_blas_kernels(const std::string& name);

}  // namespace sb
