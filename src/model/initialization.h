#pragma once

#include <cstdint>
#include <string_view>

#include "model/parameters.h"

namespace sb {

// FNV-1a: a name's own stream of random numbers.
uint64_t name_hash(std::string_view name);

// Matrices normal(0, deviation), norms one, biases zero, adapters as initialize_adapters(); a pure function of (seed,
// parameter name).
void initialize_parameters(ParameterSet& parameters, float deviation, uint64_t seed);
// Adapters alone, in `values` of the parameters' flat layout on the host, as PEFT does it: A uniform in ±1/√in, B zero,
// so that the model computes what it did without them.
void initialize_adapters(const ParameterSet& parameters, const TensorView& values, uint64_t seed);

}  // namespace sb
