#include "core/errors.h"

#include <string_view>

namespace sb {

void throw_internal_error(const FailedCheck& check, fmt::string_view format, fmt::format_args args) {
  std::string_view path(check.file);
  if (const auto at = path.rfind("/src/"); at != std::string_view::npos) path.remove_prefix(at + 1);
  const std::string message = fmt::vformat(format, args);
  throw InternalError("{}:{}: broken invariant `{}`{}{}", path, check.line, check.condition,
                      message.empty() ? "" : ": ", message);
}

void throw_user_error(fmt::string_view format, fmt::format_args args) {
  throw UserError("{}", fmt::vformat(format, args));
}

}  // namespace sb
