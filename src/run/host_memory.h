#pragma once

#include <cstdint>
#include <filesystem>

namespace sb {

// Bytes this process can still take: what the machine has available and what its control group leaves. 0: unknown.
// `root` stands for where the kernel's files are found, for tests.
int64_t available_host_memory(const std::filesystem::path& root = "/");

}  // namespace sb
