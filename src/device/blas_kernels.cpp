#include "device/blas_kernels.h"

#include <cblas.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <optional>

// OpenBLAS' own: forgets its kernels, and chooses them. Weak, since builds for one processor do not have them.
extern "C" {
__attribute__((weak)) void gotoblas_dynamic_quit();
__attribute__((weak)) void gotoblas_dynamic_init();
}

namespace sb {
namespace {

constexpr const char* kVariable = "OPENBLAS_CORETYPE";

bool can_choose() {
  return gotoblas_dynamic_quit != nullptr && gotoblas_dynamic_init != nullptr;
}

bool variable_is_set() {
  const char* value = std::getenv(kVariable);
  return value != nullptr && *value != '\0';
}

std::string current() {
  return openblas_get_corename();
}

// OpenBLAS reads the variable when it chooses. The environment is left as it was.
void set_kernels(std::string_view name) {
  const char* value = std::getenv(kVariable);
  const std::optional<std::string> before = value ? std::optional<std::string>(value) : std::nullopt;
  ::setenv(kVariable, std::string(name).c_str(), 1);
  gotoblas_dynamic_quit();
  gotoblas_dynamic_init();
  before ? ::setenv(kVariable, before->c_str(), 1) : ::unsetenv(kVariable);
}

// Whether the environment made the choice.
bool choose_once() {
  static const bool by_variable = [] {
    if (variable_is_set()) return true;
    if (const std::string own = current(); can_choose() && choose_blas_kernels(cpu_isa(), own) != own)
      set_kernels(choose_blas_kernels(cpu_isa(), own));
    return false;
  }();
  return by_variable;
}

}  // namespace

std::string_view choose_blas_kernels(CpuIsa isa, std::string_view own) {
  // OpenBLAS knows processors by their model numbers. Those that came after it may get SSE kernels (0.3.21 on Emerald
  // Rapids: "Prescott"), with which forward and backward of attention took 1.4 times as long.
  constexpr std::string_view kAvx512[] = {"SkylakeX", "Cooperlake", "SapphireRapids"}, kAvx2[] = {"Haswell", "Zen"};
  if (isa == CpuIsa::avx512) return std::ranges::count(kAvx512, own) > 0 ? own : kAvx512[0];
  return std::ranges::count(kAvx2, own) > 0 ? own : kAvx2[0];
}

BlasKernels blas_kernels() {
  const bool by_variable = choose_once();
  return {current(), by_variable};
}

std::string describe(const BlasKernels& kernels) {
  return fmt::format("OpenBLAS for {}{}", kernels.name, kernels.by_variable ? fmt::format(" (by {})", kVariable) : "");
}

std::string warn_of_narrow(const BlasKernels& kernels, CpuIsa isa) {
  const std::string_view wide = choose_blas_kernels(isa, kernels.name);
  if (kernels.name == wide || kernels.name == choose_blas_kernels(CpuIsa::avx512, kernels.name)) return {};
  return fmt::format(
      "matmuls use OpenBLAS' kernels for {}{}, although this processor has the instructions of {}: `sparsebalance "
      "doctor` measures what that costs",
      kernels.name, kernels.by_variable ? fmt::format(", by {} in the environment", kVariable) : "", wide);
}

bool use_blas_kernels(const std::string& name) {
  const std::string before = blas_kernels().name;
  if (name == before) return true;
  if (!can_choose()) return false;
  set_kernels(name);
  if (current() == name) return true;
  set_kernels(before);
  return false;
}

}  // namespace sb
