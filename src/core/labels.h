#pragma once

#include <cstdint>

namespace sb {

// What a label holds where the position does not count in the loss; the value of PyTorch and Hugging Face.
inline constexpr int32_t kIgnoredLabel = -100;

}  // namespace sb
