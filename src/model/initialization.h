#pragma once

#include <cstdint>

#include "model/parameters.h"

namespace sb {

// Matrices normal(0, deviation), norms one, biases zero; a pure function of (seed, parameter name).
void initialize_parameters(ParameterSet& parameters, float deviation, uint64_t seed);

}  // namespace sb
