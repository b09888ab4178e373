#include "run/host_memory.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace sb {
namespace {

int64_t machine_available(const std::filesystem::path& root) {
  std::ifstream in(root / "proc/meminfo");
  std::string line;
  while (std::getline(in, line))
    if (line.starts_with("MemAvailable:")) return std::stoll(line.substr(13)) * 1024;
  return 0;
}

// Control group version 2, as seen from inside a container. "max" does not parse as a number: no limit. Cached files
// count as used there but give way.
int64_t group_available(const std::filesystem::path& root) {
  const std::filesystem::path group = root / "sys/fs/cgroup";
  std::ifstream limit_file(group / "memory.max"), used_file(group / "memory.current");
  int64_t limit = 0, used = 0;
  if (!(limit_file >> limit) || !(used_file >> used)) return 0;
  std::ifstream statistics(group / "memory.stat");
  std::string name;
  int64_t value = 0, cached = 0;
  while (statistics >> name >> value)
    if (name == "active_file" || name == "inactive_file") cached += value;
  return std::max<int64_t>(limit - used + cached, 1);
}

}  // namespace

int64_t available_host_memory(const std::filesystem::path& root) {
  const int64_t machine = machine_available(root), group = group_available(root);
  if (machine == 0 || group == 0) return std::max(machine, group);
  return std::min(machine, group);
}

}  // namespace sb
