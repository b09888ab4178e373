#include "comm/host_name.h"

#include <unistd.h>

#include <climits>

namespace sb {

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::vector<std::string> host_names(Communicator& group) {
  struct Name {
    char text[HOST_NAME_MAX + 1] = {};
  };
  std::vector<Name> names(static_cast<size_t>(group.size()));
  host_name().copy(names[static_cast<size_t>(group.rank())].text, HOST_NAME_MAX);
  group.all_gather_async(names.data(), sizeof(Name), CommType::u8).wait();
  std::vector<std::string> texts;
  for (const Name& name : names) texts.emplace_back(name.text);
  return texts;
}

}  // namespace sb
