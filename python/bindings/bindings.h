#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <utility>
#include <vector>

#include "plan/batching/batching.h"
#include "plan/tuning/tuning.h"

// The parts of the module, each in a file of its own.
namespace sb::python {

void bind_attention(nanobind::module_& module);
void bind_plans(nanobind::module_& module);
void bind_planner(nanobind::module_& module);
void bind_fit_profile(nanobind::module_& module);
void bind_token_files(nanobind::module_& module);
void bind_simulation(nanobind::module_& module);
void bind_run_files(nanobind::module_& module);

// A numpy array that owns what it shows.
template <typename T>
nanobind::ndarray<nanobind::numpy, T> numpy_array(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  const nanobind::capsule owner(owned, [](void* memory) noexcept { delete static_cast<std::vector<T>*>(memory); });
  return nanobind::ndarray<nanobind::numpy, T>(owned->data(), shape, owner);
}

}  // namespace sb::python
