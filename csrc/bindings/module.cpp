#include "base/error.h"
#include "bindings/bindings.h"

PYBIND11_MODULE(_native, module) {
  namespace py = pybind11;
  module.doc() = "The native runtime of megatrain.";
  module.attr("__version__") = MEGATRAIN_VERSION;
  // CallerError and OutsideError derive from what pybind11 turns into ValueError and RuntimeError.
  py::register_exception<megatrain::MemoryLimitError>(module, "MemoryLimitError", PyExc_MemoryError);
  megatrain::bindings::bind_device(module);
  megatrain::bindings::bind_probe(module);
  megatrain::bindings::bind_tiles(module);
  megatrain::bindings::bind_stream(module);
}
