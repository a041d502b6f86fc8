#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/cpu.h"
#include "bindings/bindings.h"
#include "device/host_memory.h"

namespace megatrain::bindings {
namespace {

namespace py = pybind11;

struct PyHostBackend : PyBackend {};
struct PyCudaBackend : PyBackend {};

// The backend comes first: it is destroyed last.
struct PyStream {
  std::shared_ptr<Backend> backend;
  Stream stream;
};
struct PyEvent {
  std::shared_ptr<Backend> backend;
  Event event;
};

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa isa : supported_isas()) names.emplace_back(isa_name(isa));
  return names;
}

void bind_backends(py::module_& module) {
  py::class_<PyBackend>(module, "Backend")
      .def_property_readonly("name", [](const PyBackend& self) { return self.backend->name(); })
      .def_property_readonly("device_index",
                             [](const PyBackend& self) { return self.backend->device_index(); })
      .def_property_readonly("numa_node", [](const PyBackend& self) { return self.backend->numa_node(); })
      .def(
          "device_memory",
          [](const PyBackend& self) {
            const Backend::DeviceMemory memory = self.backend->device_memory();
            return std::pair(memory.free_bytes, memory.total_bytes);
          },
          ReleaseGil())
      .def(
          "create_stream",
          [](const PyBackend& self, const std::string& name) {
            return PyStream{self.backend, self.backend->create_stream(name)};
          },
          py::arg("name"))
      .def(
          "create_event",
          [](const PyBackend& self, const std::string& name) {
            return PyEvent{self.backend, self.backend->create_event(name)};
          },
          py::arg("name"))
      .def(
          "record",
          [](const PyBackend& self, const PyEvent& event, std::uintptr_t stream) {
            self.backend->record(event.event, stream_view(stream));
          },
          py::arg("event"), py::arg("stream"), ReleaseGil())
      .def(
          "wait",
          [](const PyBackend& self, std::uintptr_t stream, const PyEvent& event) {
            self.backend->wait(stream_view(stream), event.event);
          },
          py::arg("stream"), py::arg("event"), ReleaseGil())
      .def(
          "copy",
          [](const PyBackend& self, std::uintptr_t destination, std::uintptr_t source, std::size_t bytes,
             bool to_device, std::uintptr_t stream) {
            self.backend->copy(pointer(destination), pointer(source), bytes,
                               to_device ? CopyKind::kHostToDevice : CopyKind::kDeviceToHost,
                               stream_view(stream));
          },
          py::arg("destination"), py::arg("source"), py::arg("nbytes"), py::arg("to_device"),
          py::arg("stream"), ReleaseGil());

  py::class_<PyHostBackend, PyBackend>(module, "HostBackend", py::is_final())
      .def(py::init([](std::int64_t max_delay_us, std::uint64_t seed, bool poison,
                       std::optional<std::size_t> pin_limit) {
             HostBackendOptions options;
             options.max_delay_us = max_delay_us;
             options.seed = seed;
             options.poison = poison;
             if (pin_limit) options.pin_limit_bytes = *pin_limit;
             return PyHostBackend{{make_host_backend(options)}};
           }),
           py::kw_only(), py::arg("max_delay_us") = 0, py::arg("seed") = 0, py::arg("poison") = false,
           py::arg("pin_limit") = py::none());
  py::class_<PyCudaBackend, PyBackend>(module, "CudaBackend", py::is_final())
      .def(py::init([](int device, std::optional<std::size_t> pin_limit) {
             CudaBackendOptions options;
             if (pin_limit) options.pin_limit_bytes = *pin_limit;
             return PyCudaBackend{{make_cuda_backend(device, options)}};
           }),
           py::arg("device") = 0, py::kw_only(), py::arg("pin_limit") = py::none());
}

}  // namespace

void bind_device(py::module_& module) {
  bind_backends(module);

  py::class_<PyStream>(module, "Stream", py::is_final())
      .def_property_readonly("handle", [](const PyStream& self) { return self.stream.view().handle; })
      .def(
          "synchronize", [](const PyStream& self) { self.backend->synchronize(self.stream.view()); },
          ReleaseGil());
  py::class_<PyEvent>(module, "Event", py::is_final())
      .def(
          "synchronize", [](const PyEvent& self) { self.backend->synchronize(self.event.view()); },
          ReleaseGil())
      .def("reached", [](const PyEvent& self) { return self.backend->reached(self.event); })
      .def("time_ns", [](const PyEvent& self) { return self.backend->time_ns(self.event); }, ReleaseGil());

  module.def("cuda_device_count", &cuda_device_count, ReleaseGil());
  module.def("cuda_unavailable_reason", &cuda_unavailable_reason, ReleaseGil());
  module.def("isa_names", &isa_names);
  module.def(
      "select_isa", [](const std::string& name) { return std::string(isa_name(select_isa(name))); },
      py::arg("name"));
  module.def("cpu_model", &cpu_model);
  module.def("usable_cores", &usable_cores);
  module.def(
      "host_memory_limit",
      [](std::size_t override_bytes, const std::string& root) {
        MemoryLimit limit = host_memory_limit(override_bytes, root);
        return std::pair(limit.available_bytes, std::move(limit.source));
      },
      py::arg("override_bytes") = 0, py::arg("root") = "");
  module.def("require_host_memory", &require_host_memory, py::arg("nbytes"), py::arg("override_bytes") = 0,
             py::arg("root") = "");
}

}  // namespace megatrain::bindings
