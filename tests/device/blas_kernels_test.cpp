#include "device/blas_kernels.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "core/random.h"
#include "device/blas.h"

namespace sb {
namespace {

constexpr CpuIsa kAvx2 = CpuIsa::avx2, kAvx512 = CpuIsa::avx512;

// `own`: what the named release of OpenBLAS chooses on the processor, by its sources (driver/others/dynamic.c).
TEST(BlasKernels, EveryProcessorGetsKernelsOfItsWidth) {
  struct Row {
    const char* processor;
    CpuIsa isa;
    const char *own, *chosen;
  };
  for (const Row& row : std::vector<Row>{
           {"Haswell laptop", kAvx2, "Haswell", "Haswell"},
           {"Raptor Lake, 0.3.21", kAvx2, "Prescott", "Haswell"},
           {"Skylake-SP", kAvx512, "SkylakeX", "SkylakeX"},
           {"Cascade Lake", kAvx512, "SkylakeX", "SkylakeX"},
           {"Cooper Lake", kAvx512, "Cooperlake", "Cooperlake"},
           {"Ice Lake server", kAvx512, "SkylakeX", "SkylakeX"},
           {"Sapphire Rapids, 0.3.21", kAvx512, "Cooperlake", "Cooperlake"},
           {"Sapphire Rapids, 0.3.28", kAvx512, "SapphireRapids", "SapphireRapids"},
           {"Emerald Rapids, 0.3.21", kAvx512, "Prescott", "SkylakeX"},
           {"Granite Rapids, 0.3.21", kAvx512, "Cooperlake", "Cooperlake"},
           {"Zen 2", kAvx2, "Zen", "Zen"},
           {"Zen 3", kAvx2, "Zen", "Zen"},
           {"Zen 4, 0.3.20", kAvx512, "Zen", "SkylakeX"},
           {"Zen 4, 0.3.21", kAvx512, "Cooperlake", "Cooperlake"},
           {"Zen 5, 0.3.20", kAvx512, "Barcelona", "SkylakeX"},
           {"Zen 5, 0.3.21", kAvx512, "Cooperlake", "Cooperlake"},
           {"Zen 5, taken for older", kAvx512, "Haswell", "SkylakeX"},
           {"no known maker, AVX2", kAvx2, "Prescott", "Haswell"},
           {"no known maker, AVX-512", kAvx512, "Prescott", "SkylakeX"},
           {"AVX-512 that is not to be used", kAvx2, "Cooperlake", "Haswell"},
       })
    EXPECT_EQ(choose_blas_kernels(row.isa, row.own), row.chosen) << row.processor;
}

TEST(BlasKernels, WordsSayWhoChose) {
  EXPECT_EQ(describe({"SkylakeX", false}), "OpenBLAS for SkylakeX");
  EXPECT_EQ(describe({"Haswell", true}), "OpenBLAS for Haswell (by OPENBLAS_CORETYPE)");
}

TEST(BlasKernels, NarrowOnesAreWarnedOf) {
  EXPECT_EQ(
      warn_of_narrow({"Haswell", true}, kAvx512),
      "matmuls use OpenBLAS' kernels for Haswell, by OPENBLAS_CORETYPE in the environment, although this processor "
      "has the instructions of SkylakeX: `sparsebalance doctor` measures what that costs");
  EXPECT_EQ(warn_of_narrow({"Prescott", false}, kAvx2),
            "matmuls use OpenBLAS' kernels for Prescott, although this processor has the instructions of Haswell: "
            "`sparsebalance doctor` measures what that costs");
  for (const char* wide : {"SkylakeX", "Cooperlake", "SapphireRapids"}) {
    EXPECT_EQ(warn_of_narrow({wide, true}, kAvx512), "") << wide;
    EXPECT_EQ(warn_of_narrow({wide, true}, kAvx2), "") << wide;
  }
  EXPECT_EQ(warn_of_narrow({"Zen", false}, kAvx2), "");
}

TEST(BlasKernels, ThisProcessHasWhatWasChosen) {
  const BlasKernels kernels = blas_kernels();
  const char* variable = std::getenv("OPENBLAS_CORETYPE");
  ASSERT_EQ(kernels.by_variable, variable != nullptr && *variable != '\0');
  if (kernels.by_variable) return;
  EXPECT_EQ(kernels.name, choose_blas_kernels(cpu_isa(), kernels.name));
}

std::vector<float> product_of(const std::vector<float>& a, const std::vector<float>& b, int64_t side) {
  std::vector<float> c(a.size());
  sgemm({.m = side,
         .n = side,
         .k = side,
         .a = a.data(),
         .lda = side,
         .b = b.data(),
         .ldb = side,
         .c = c.data(),
         .ldc = side});
  return c;
}

// There and back: the same bits as before, and the environment as it was.
TEST(BlasKernels, OthersCanBeTriedAndLeftAgain) {
  constexpr int64_t kSide = 150;
  Random random(1);
  std::vector<float> a(kSide * kSide), b(a.size());
  for (float& x : a) x = static_cast<float>(random.uniform() - 0.5);
  for (float& x : b) x = static_cast<float>(random.uniform() - 0.5);
  const char* variable = std::getenv("OPENBLAS_CORETYPE");
  const std::string before = blas_kernels().name, environment = variable ? variable : "unset";
  const std::vector<float> expected = product_of(a, b, kSide);

  EXPECT_FALSE(use_blas_kernels("no such processor"));
  EXPECT_EQ(blas_kernels().name, before);
  if (!use_blas_kernels("Haswell")) GTEST_SKIP() << "this OpenBLAS is built for one processor";
  EXPECT_EQ(blas_kernels().name, "Haswell");
  const std::vector<float> other = product_of(a, b, kSide);
  for (size_t i = 0; i < other.size(); ++i) ASSERT_NEAR(other[i], expected[i], 1e-4) << i;
  EXPECT_TRUE(use_blas_kernels(before));
  EXPECT_EQ(product_of(a, b, kSide), expected);
  const char* after = std::getenv("OPENBLAS_CORETYPE");
  EXPECT_EQ(after ? after : "unset", environment);
}

}  // namespace
}  // namespace sb
