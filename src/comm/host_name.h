#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace sb {

// Of the machine that this process runs on.
std::string host_name();
// Of every rank's machine, on all ranks. Collective.
std::vector<std::string> host_names(Communicator& group);

}  // namespace sb
