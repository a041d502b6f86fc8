#include <pybind11/stl.h>

#include <optional>

#include "base/error.h"
#include "bindings/bindings.h"
#include "probe/machine_speed.h"

namespace megatrain::bindings {

namespace py = pybind11;

void bind_probe(py::module_& module) {
  py::class_<ThreadSpeed>(module, "ThreadSpeed", py::is_final())
      .def_readonly("threads", &ThreadSpeed::threads)
      .def_readonly("updates_alone", &ThreadSpeed::updates_alone)
      .def_property_readonly("updates", [](const ThreadSpeed& self) { return self.beside_copies.updates; })
      .def_property_readonly("up", [](const ThreadSpeed& self) { return self.beside_copies.up; })
      .def_property_readonly("down", [](const ThreadSpeed& self) { return self.beside_copies.down; });
  py::class_<MachineSpeed>(module, "MachineSpeed", py::is_final())
      .def_readonly("up", &MachineSpeed::up)
      .def_readonly("down", &MachineSpeed::down)
      .def_readonly("up_together", &MachineSpeed::up_together)
      .def_readonly("down_together", &MachineSpeed::down_together)
      .def_readonly("by_threads", &MachineSpeed::by_threads)
      .def_readonly("recommended_threads", &MachineSpeed::recommended_threads);
  const ProbeSettings defaults;
  module.attr("PROBE_DEVICE_BYTES") = kProbeDeviceBytes;
  module.def(
      "measure_machine",
      [](const PyBackend& backend, std::uintptr_t device_memory, std::size_t nbytes,
         std::optional<std::int64_t> parameters, std::optional<std::size_t> cache_bytes, double seconds,
         int rounds) {
        if (device_memory == 0)
          throw CallerError("device_memory is 0; it must be the address of nbytes bytes");
        const ProbeSettings settings{.parameters = parameters.value_or(probe_parameters()),
                                     .cache_bytes = cache_bytes,
                                     .seconds = seconds,
                                     .rounds = rounds};
        return measure_machine(*backend.backend, pointer(device_memory), nbytes, settings);
      },
      py::arg("backend"), py::arg("device_memory"), py::arg("nbytes"), py::kw_only(),
      py::arg("parameters") = py::none(), py::arg("cache_bytes") = py::none(),
      py::arg("seconds") = defaults.seconds, py::arg("rounds") = defaults.rounds, ReleaseGil());
}

}  // namespace megatrain::bindings
