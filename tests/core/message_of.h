#pragma once

#include <string>

#include "core/errors.h"

namespace sb {

// What the exception of this kind that `action` throws says.
template <typename Exception = UserError, typename Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const Exception& exception) {
    return exception.what();
  }
  return "nothing was thrown";
}

}  // namespace sb
