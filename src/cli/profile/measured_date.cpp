#include "cli/profile/measured_date.h"

#include <ctime>

namespace sb {

std::string measured_date() {
  const std::time_t now = std::time(nullptr);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return text;
}

}  // namespace sb
