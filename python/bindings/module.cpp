#include <exception>
#include <filesystem>

#include "core/errors.h"
#include "core/log.h"
#include "python/bindings/bindings.h"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  module.doc() = "The C++ side of sparsebalance: plans, the simulator, run files. Use the package, which wraps it.";
  nb::exception<sb::UserError> user_error(module, "UserError", PyExc_ValueError);
  user_error.attr("__module__") = "sparsebalance";
  user_error.attr("__doc__") = "The input is at fault: the message names what, and the cure.";
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void*) {
        try {
          std::rethrow_exception(pointer);
        } catch (const sb::OutOfMemory& error) {
          PyErr_SetString(PyExc_MemoryError, error.what());
        } catch (const std::filesystem::filesystem_error& error) {
          PyErr_SetString(PyExc_OSError, error.what());
        }
      },
      nullptr);
  nb::set_leak_warnings(false);  // torch keeps operators, and with them our objects, until the process ends
  module.attr("__version__") = SB_VERSION;
  module.attr("__build__") = SB_BUILD;
  sb::log::set_level(sb::log::Level::warning);
  sb::python::bind_attention(module);
  sb::python::bind_plans(module);
  sb::python::bind_planner(module);
  sb::python::bind_fit_profile(module);
  sb::python::bind_simulation(module);
  sb::python::bind_run_files(module);
  sb::python::bind_token_files(module);
}
