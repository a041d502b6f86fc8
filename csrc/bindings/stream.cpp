#include <pybind11/stl.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "stream/engine.h"

namespace megatrain::bindings {
namespace {

namespace py = pybind11;

SectionCopy section_copy(int tile, Section section, std::int64_t element_offset, std::int64_t elements,
                         std::uintptr_t device) {
  return {tile, section, element_offset, elements, pointer(device)};
}

void bind_values(py::module_& module) {
  py::class_<ParameterUpdate>(module, "ParameterUpdate", py::is_final())
      .def(py::init([](int parameter, double lr, double beta1, double beta2, double eps, double weight_decay,
                       std::int64_t step, std::uint64_t seed, std::int64_t begin, std::int64_t end) {
             ParameterUpdate update;
             update.parameter = parameter;
             update.step = {lr, beta1, beta2, eps, weight_decay, step, 1.0f, seed};
             update.elements = {begin, end};
             return update;
           }),
           py::arg("parameter"), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"), py::arg("step"), py::arg("seed") = 0,
           py::arg("begin") = 0, py::arg("end") = -1);
  py::class_<TraceSpan>(module, "TraceSpan", py::is_final())
      .def_property_readonly("kind", [](const TraceSpan& self) { return span_kind_name(self.kind); })
      .def_readonly("tile", &TraceSpan::tile)
      .def_readonly("step", &TraceSpan::step)
      .def_readonly("begin_ns", &TraceSpan::begin_ns)
      .def_readonly("end_ns", &TraceSpan::end_ns)
      .def_readonly("nbytes", &TraceSpan::bytes)
      .def_readonly("gate_ns", &TraceSpan::gate_ns);
}

void bind_copies(py::class_<Engine>& engine) {
  engine
      .def(
          "drain",
          [](Engine& self, int tile, Section section, std::int64_t element_offset, std::int64_t elements,
             std::uintptr_t device_pointer, std::uintptr_t stream) {
            return self.drain(section_copy(tile, section, element_offset, elements, device_pointer),
                              stream_view(stream));
          },
          py::arg("tile"), py::arg("section"), py::arg("element_offset"), py::arg("elements"),
          py::arg("device_pointer"), py::arg("stream"), ReleaseGil())
      .def(
          "wait_drain",
          [](Engine& self, std::int64_t ticket, std::uintptr_t stream) {
            self.wait_drain(ticket, stream_view(stream));
          },
          py::arg("ticket"), py::arg("stream"), ReleaseGil())
      .def(
          "fetch",
          [](Engine& self, int tile, Section section, std::int64_t element_offset, std::int64_t elements,
             std::uintptr_t device_pointer, std::uintptr_t stream) {
            self.fetch(section_copy(tile, section, element_offset, elements, device_pointer),
                       stream_view(stream));
          },
          py::arg("tile"), py::arg("section"), py::arg("element_offset"), py::arg("elements"),
          py::arg("device_pointer"), py::arg("stream"), ReleaseGil());
}

void bind_slots(py::class_<Engine>& engine) {
  engine
      .def(
          "add_slot",
          [](Engine& self, std::uintptr_t device_pointer, std::size_t bytes, std::uintptr_t stream,
             int tile) { return self.add_slot(pointer(device_pointer), bytes, stream_view(stream), tile); },
          py::arg("device_pointer"), py::arg("nbytes"), py::arg("stream"), py::arg("tile") = -1, ReleaseGil())
      .def("clear_device", &Engine::clear_device, ReleaseGil())
      .def("copy_by_parameter", &Engine::copy_by_parameter, py::arg("on"), ReleaseGil())
      .def("expect", &Engine::expect, py::arg("tiles"), ReleaseGil())
      .def(
          "acquire",
          [](Engine& self, int tile, std::uintptr_t stream) {
            return self.acquire(tile, stream_view(stream));
          },
          py::arg("tile"), py::arg("stream"), ReleaseGil())
      .def(
          "release",
          [](Engine& self, int slot, std::uintptr_t stream) { self.release(slot, stream_view(stream)); },
          py::arg("slot"), py::arg("stream"), ReleaseGil())
      .def(
          "split",
          [](Engine& self, int tile,
             const std::vector<std::vector<std::pair<std::int64_t, std::int64_t>>>& parts) {
            std::vector<std::vector<ElementRange>> ranges;
            for (const auto& part : parts) {
              ranges.emplace_back();
              for (const auto& [begin, end] : part) ranges.back().push_back({begin, end});
            }
            self.split(tile, std::move(ranges));
          },
          py::arg("tile"), py::arg("parts"), ReleaseGil())
      .def("want", &Engine::want, py::arg("tile"), py::arg("parts"), ReleaseGil())
      .def(
          "bring",
          [](Engine& self, int slot, const std::vector<int>& parts, std::uintptr_t stream) {
            self.bring(slot, parts, stream_view(stream));
          },
          py::arg("slot"), py::arg("parts"), py::arg("stream"), ReleaseGil())
      .def(
          "release_all", [](Engine& self, std::uintptr_t stream) { self.release_all(stream_view(stream)); },
          py::arg("stream"), ReleaseGil())
      .def("version", &Engine::version, py::arg("tile"), ReleaseGil())
      .def("mark_edited", &Engine::mark_edited, py::arg("tile"), ReleaseGil());
}

void bind_resident(py::class_<Engine>& engine) {
  engine
      .def(
          "add_resident",
          [](Engine& self, int tile, std::uintptr_t device_pointer, std::uintptr_t non_finite) {
            self.add_resident(tile, pointer(device_pointer), reinterpret_cast<int*>(non_finite));
          },
          py::arg("tile"), py::arg("device_pointer"), py::arg("non_finite"), ReleaseGil())
      .def(
          "use_resident",
          [](Engine& self, int tile, std::uintptr_t stream) { self.use_resident(tile, stream_view(stream)); },
          py::arg("tile"), py::arg("stream"), ReleaseGil());
}

void bind_kept(py::class_<Engine>& engine) {
  engine
      .def(
          "keep",
          [](Engine& self, int tile, std::uintptr_t device_pointer, std::size_t bytes,
             std::uintptr_t stream) {
            return self.kept().put(tile, pointer(device_pointer), bytes, stream_view(stream));
          },
          py::arg("tile"), py::arg("device_pointer"), py::arg("nbytes"), py::arg("stream"), ReleaseGil())
      .def(
          "wait_kept",
          [](Engine& self, std::int64_t kept, std::uintptr_t stream) {
            self.kept().wait_landed(kept, stream_view(stream));
          },
          py::arg("kept"), py::arg("stream"), ReleaseGil())
      .def(
          "bring_back",
          [](Engine& self, std::int64_t kept, std::uintptr_t device_pointer, std::uintptr_t stream) {
            self.kept().get(kept, pointer(device_pointer), stream_view(stream));
          },
          py::arg("kept"), py::arg("device_pointer"), py::arg("stream"), ReleaseGil())
      .def(
          "wait_back",
          [](Engine& self, std::int64_t kept, std::uintptr_t stream) {
            self.kept().wait_got(kept, stream_view(stream));
          },
          py::arg("kept"), py::arg("stream"), ReleaseGil())
      .def(
          "drop_kept", [](Engine& self, std::int64_t kept) { self.kept().drop(kept); }, py::arg("kept"),
          ReleaseGil())
      .def(
          "limit_kept", [](Engine& self, std::size_t bytes) { self.kept().limit(bytes); }, py::arg("nbytes"),
          ReleaseGil())
      .def("kept_bytes", [](Engine& self) { return self.kept().bytes(); }, ReleaseGil());
}

void bind_trace(py::class_<Engine>& engine) {
  engine.def("begin_step", &Engine::begin_step, py::arg("step"), ReleaseGil())
      .def(
          "begin_compute",
          [](Engine& self, int tile, std::uintptr_t stream) {
            self.begin_compute(tile, stream_view(stream));
          },
          py::arg("tile"), py::arg("stream"), ReleaseGil())
      .def(
          "end_compute", [](Engine& self, std::uintptr_t stream) { self.end_compute(stream_view(stream)); },
          py::arg("stream"), ReleaseGil())
      .def("trace", &Engine::trace, ReleaseGil())
      .def("wait_totals",
           [](Engine& self) {
             WaitTotals totals;
             {
               py::gil_scoped_release release;
               totals = self.wait_totals();
             }
             return py::make_tuple(totals.up_ns, totals.update_ns, totals.down_ns);
           })
      .def("clear_trace", &Engine::clear_trace, ReleaseGil());
}

}  // namespace

void bind_stream(py::module_& module) {
  bind_values(module);
  py::class_<Engine> engine(module, "Engine", py::is_final());
  engine
      .def(py::init(
               [](std::shared_ptr<TileStore> store, std::size_t trace_capacity, std::string without_wait) {
                 return std::make_unique<Engine>(std::move(store),
                                                 EngineOptions{trace_capacity, std::move(without_wait)});
               }),
           py::arg("store"), py::kw_only(), py::arg("trace_capacity") = 65536, py::arg("without_wait") = "")
      .def(
          "update",
          [](Engine& self, int tile, std::vector<ParameterUpdate> parameters, float gradient_scale,
             std::int64_t priority, std::uintptr_t stream) {
            self.update(tile, std::move(parameters), gradient_scale, priority, stream_view(stream));
          },
          py::arg("tile"), py::arg("parameters"), py::arg("gradient_scale"), py::arg("priority"),
          py::arg("stream") = 0, ReleaseGil())
      .def("wait_updates", &Engine::wait_updates, ReleaseGil())
      .def("hold", &Engine::hold, py::arg("tiles"), ReleaseGil())
      .def("release_hold", &Engine::release_hold, py::arg("tile"), ReleaseGil())
      .def("held_up_ns", &Engine::held_up_ns, ReleaseGil())
      .def("updates_pending", &Engine::updates_pending, ReleaseGil())
      .def("synchronize", &Engine::synchronize, ReleaseGil())
      .def("close", &Engine::close, ReleaseGil());
  bind_slots(engine);
  bind_copies(engine);
  bind_resident(engine);
  bind_kept(engine);
  bind_trace(engine);
}

}  // namespace megatrain::bindings
