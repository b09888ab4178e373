#pragma once

namespace sb {

enum class CpuIsa { avx2, avx512 };

// The best instruction set of this processor that we have code for. SB_CPU_ISA=avx2 in the environment asks for less
// (for tests). Throws UserError on a processor without AVX2 and FMA.
CpuIsa cpu_isa();

}  // namespace sb
