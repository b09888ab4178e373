#pragma once

#include <string>

#include "core/errors.h"

namespace sb {

// What message_of() gives when there was no exception.
inline const std::string kNothingThrown = "nothing was thrown";

// What the exception of this kind that `action` throws says.
template <typename Exception = UserError, typename Action>
std::string message_of(const Action& action) {
  try {
    action();
  } catch (const Exception& exception) {
    return exception.what();
  }
  return kNothingThrown;
}

}  // namespace sb
