#include "core/cpu_isa.h"

#include <cstdlib>
#include <string_view>

#include "core/errors.h"

namespace sb {
namespace {

CpuIsa detect() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx2) throw UserError("this processor lacks AVX2 or FMA; the CPU backend needs both");
  const char* wish = std::getenv("SB_CPU_ISA");
  if (wish == nullptr || std::string_view(wish).empty()) return avx512 ? CpuIsa::avx512 : CpuIsa::avx2;
  if (std::string_view(wish) == "avx2") return CpuIsa::avx2;
  if (std::string_view(wish) == "avx512") {
    SB_USER_CHECK(avx512, "SB_CPU_ISA=avx512, but this processor has no AVX-512 (F, BW, DQ, VL)");
    return CpuIsa::avx512;
  }
  throw UserError("SB_CPU_ISA={}: must be avx2 or avx512", wish);
}

}  // namespace

CpuIsa cpu_isa() {
  static const CpuIsa isa = detect();
  return isa;
}

}  // namespace sb
