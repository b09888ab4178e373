#pragma once

#include <string>
#include <string_view>

namespace sb {

// Text for the content or a quoted attribute of HTML and SVG. Control characters, which neither allows, become spaces.
std::string markup_text(std::string_view text);

}  // namespace sb
