#pragma once

#include <cstdint>

#include "model/parameters.h"

namespace sb {

// Matrices normal(0, deviation), norms one, biases zero; a pure function of (seed, parameter name). Adapters are left
// alone.
void initialize_parameters(ParameterSet& parameters, float deviation, uint64_t seed);
// Adapters alone, as PEFT does: A uniform in ±1/√in, B zero.
void initialize_adapters(ParameterSet& parameters, uint64_t seed);

}  // namespace sb
