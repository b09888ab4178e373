#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>

namespace sb {

// Bytes this process can still take where `sharing` of them share what is left: of what the machine has available and
// of what its control groups leave, and its own under a limit of address space (ulimit -v), of which `address_space`
// are needed for what no plan counts. 0: unknown.
int64_t available_host_memory(int sharing, int64_t address_space = 0);

// What the control groups of a process leave: `own_groups` is its /proc/PID/cgroup, `mount` where they are mounted.
// Versions 1 and 2; the tightest of a group and all those around it counts.
int64_t group_memory_left(const std::string& own_groups, const std::filesystem::path& mount);
inline constexpr int64_t kNoMemoryLimit = std::numeric_limits<int64_t>::max();

}  // namespace sb
