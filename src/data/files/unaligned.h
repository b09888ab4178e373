#pragma once

#include <cstring>

namespace sb {

// A value from anywhere in a file: tables may start at an odd offset.
template <typename T>
T load(const unsigned char* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

}  // namespace sb
