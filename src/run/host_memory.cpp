#include "run/host_memory.h"

#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace sb {
namespace {

namespace fs = std::filesystem;

int64_t machine_available() {
  std::ifstream in("/proc/meminfo");
  std::string line;
  while (std::getline(in, line))
    if (line.starts_with("MemAvailable:")) return std::stoll(line.substr(13)) * 1024;
  return kNoMemoryLimit;
}

struct GroupFiles {
  const char *limit, *used;
  const char* cached[2];  // in memory.stat: files count as used but give way
};
constexpr GroupFiles kVersion2 = {"memory.max", "memory.current", {"active_file", "inactive_file"}};
constexpr GroupFiles kVersion1 = {
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_active_file", "total_inactive_file"}};

// "max" does not parse as a number: no limit.
int64_t left_in(const fs::path& group, const GroupFiles& files) {
  std::ifstream limit_file(group / files.limit), used_file(group / files.used);
  int64_t limit = 0, used = 0;
  if (!(limit_file >> limit) || !(used_file >> used)) return kNoMemoryLimit;
  std::ifstream statistics(group / "memory.stat");
  std::string name;
  int64_t value = 0, cached = 0;
  while (statistics >> name >> value)
    if (name == files.cached[0] || name == files.cached[1]) cached += value;
  return std::max<int64_t>(limit - used + cached, 1);
}

// The group and all around it, up to where the hierarchy is mounted.
int64_t least_left(const fs::path& mount, const std::string& group, const GroupFiles& files) {
  int64_t least = left_in(mount, files);
  fs::path at = mount;
  for (const fs::path& part : fs::path(group).relative_path()) {
    at /= part;
    least = std::min(least, left_in(at, files));
  }
  return least;
}

int64_t address_space_available() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kNoMemoryLimit;
  std::ifstream statistics("/proc/self/statm");
  int64_t pages = 0;
  statistics >> pages;
  return std::max<int64_t>(static_cast<int64_t>(limit.rlim_cur) - pages * ::sysconf(_SC_PAGESIZE), 1);
}

}  // namespace

int64_t group_memory_left(const std::string& own_groups, const fs::path& mount) {
  std::istringstream lines(own_groups);
  std::string line;
  int64_t least = kNoMemoryLimit;
  // "hierarchy:controllers:path"; version 2 has hierarchy 0 and names no controllers.
  while (std::getline(lines, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      least = std::min(least, least_left(mount, group, kVersion2));
      least = std::min(least, least_left(mount / "unified", group, kVersion2));
    } else if (controllers.find(",memory,") != std::string::npos) {
      least = std::min(least, least_left(mount / "memory", group, kVersion1));
    }
  }
  return least;
}

int64_t available_host_memory(int sharing, int64_t address_space) {
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream groups;
  groups << file.rdbuf();
  const int64_t shared = std::min(machine_available(), group_memory_left(groups.str(), "/sys/fs/cgroup"));
  const int64_t own = address_space_available();
  const int64_t part = shared == kNoMemoryLimit ? kNoMemoryLimit : std::max<int64_t>(shared / sharing, 1);
  const int64_t least = std::min(part, own == kNoMemoryLimit ? own : std::max<int64_t>(own - address_space, 1));
  return least == kNoMemoryLimit ? 0 : least;
}

}  // namespace sb
