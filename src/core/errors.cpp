#include "core/errors.h"

#include <string_view>

namespace sb {

void throw_check_failed(const char* file, int line, const char* condition, const std::string& message) {
  std::string_view path(file);
  if (const auto at = path.rfind("/src/"); at != std::string_view::npos) path.remove_prefix(at + 1);
  throw InternalError("{}:{}: broken invariant `{}`{}{}", path, line, condition, message.empty() ? "" : ": ", message);
}

}  // namespace sb
