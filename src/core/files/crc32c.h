#pragma once

#include <cstddef>
#include <cstdint>

namespace sb {

// CRC-32C (Castagnoli), the checksum of TensorBoard records and of our checkpoints. Continue a running value with
// `crc32c(crc32c(0, a, n), b, m)`. Uses the processor's instruction (every processor with AVX2 has it).
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);
// That of two pieces after each other from those of each: `second` is of so many bytes.
uint32_t crc32c_joined(uint32_t first, uint32_t second, uint64_t second_bytes);

}  // namespace sb
