#pragma once

#include <string>

#include "report/report.h"

namespace sb {

// What was trained, on what, what balancing gained and where the time went: the top of the page, as HTML.
std::string report_headline(const ReportInput& input);

}  // namespace sb
