#pragma once

#include <array>

namespace sb {

// The head dimensions that attention on GPUs is compiled for in bf16. fp32 takes any up to the largest that its tiles
// hold; GPUs with little shared memory hold fewer.
inline constexpr std::array kBf16HeadDims = {16, 32, 64, 96, 128};
inline constexpr int kMaxFp32HeadDim = 256;
// Coverage is measured four channels at a time.
inline constexpr int kCoverageHeadDimUnit = 4;

}  // namespace sb
