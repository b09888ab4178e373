#pragma once

#include <filesystem>

#include "comm/communicator.h"

namespace sb {

// Every rank writes its part of a checkpoint and reads what others wrote: UserError, with rank and host, unless all of
// them see the same directory and may write there. Makes it where it is not there. Collective; thrown on the first
// rank.
void check_common_directory(Communicator& world, const std::filesystem::path& directory);

}  // namespace sb
