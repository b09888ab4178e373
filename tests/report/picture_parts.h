#pragma once

#include <string>
#include <vector>

namespace sb {

// What stands between `before` and `after`, wherever that is.
inline std::vector<std::string> parts_of(const std::string& text, const std::string& before, const std::string& after) {
  std::vector<std::string> parts;
  for (size_t at = 0; (at = text.find(before, at)) != std::string::npos;) {
    at += before.size();
    const size_t end = text.find(after, at);
    if (end == std::string::npos) break;
    parts.push_back(text.substr(at, end - at));
    at = end;
  }
  return parts;
}

// The same as numbers.
inline std::vector<double> numbers_of(const std::string& text, const std::string& before, const std::string& after) {
  std::vector<double> numbers;
  for (const std::string& part : parts_of(text, before, after)) numbers.push_back(std::stod(part));
  return numbers;
}

}  // namespace sb
