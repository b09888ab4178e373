#pragma once

#include <string>

namespace sb {

// Now, as files say when they were measured: "2026-11-19T12:00:00Z".
std::string measured_date();

}  // namespace sb
