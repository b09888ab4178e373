#pragma once

#include <cmath>
#include <cstdint>

namespace sb {

// The order in which candidates are selected: the larger mass first, ties to the lower place, so that every run and
// every rank selects alike. NaN (of a step that diverged) comes last: it must not break the order that sorting relies
// on.
template <typename T>
bool selected_before(T mass_a, int64_t place_a, T mass_b, int64_t place_b) {
  if (mass_a > mass_b) return true;
  if (mass_a < mass_b) return false;
  if (std::isnan(mass_a) != std::isnan(mass_b)) return std::isnan(mass_b);
  return place_a < place_b;
}

}  // namespace sb
