#include "cli/exit_code.h"

#include <filesystem>
#include <new>
#include <system_error>

#include "comm/communicator.h"
#include "core/errors.h"

namespace sb {

bool no_more_threads(const std::exception& error) {
  const auto* system = dynamic_cast<const std::system_error*>(&error);
  return system != nullptr && system->code() == std::errc::resource_unavailable_try_again;
}

int exit_code(const std::exception& error) {
  if (dynamic_cast<const UserError*>(&error) != nullptr) return kUserErrorCode;
  // A folder without permission, a name too long, a loop of links: what the machine says about a path.
  if (dynamic_cast<const std::filesystem::filesystem_error*>(&error) != nullptr) return kUserErrorCode;
  if (no_more_threads(error)) return kUserErrorCode;
  if (dynamic_cast<const OutOfMemory*>(&error) != nullptr || dynamic_cast<const std::bad_alloc*>(&error) != nullptr)
    return 3;
  // Ranks that were lost: neither the user's fault nor a bug of the one that says so.
  if (dynamic_cast<const CommTimeout*>(&error) != nullptr || dynamic_cast<const CommAborted*>(&error) != nullptr)
    return 1;
  return 70;  // EX_SOFTWARE
}

}  // namespace sb
