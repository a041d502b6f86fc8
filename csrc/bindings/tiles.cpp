#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bindings/bindings.h"
#include "tiles/tile_moments.h"

namespace megatrain::bindings {
namespace {

namespace py = pybind11;

// Exports a section through the buffer protocol. memoryview and torch.frombuffer keep it, and it
// keeps the store.
struct SectionBuffer {
  std::shared_ptr<TileStore> store;
  TileStore::SectionView memory;
};

// A C-contiguous buffer of fp32 values (or their bytes), held while it is used.
class FloatBuffer {
 public:
  FloatBuffer(const py::object& object, std::int64_t elements, bool writable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw py::error_already_set();
    const std::string format = view_.format ? view_.format : "B";
    const bool floats = format == "f" || format == "<f" || format == "=f" || format == "@f" || format == "B";
    if (floats && view_.len == static_cast<Py_ssize_t>(elements) * 4) return;
    const Py_ssize_t bytes = view_.len;
    PyBuffer_Release(&view_);
    throw CallerError("a buffer of " + std::to_string(bytes) + " bytes of format \"" + format + "\"; " +
                      std::to_string(elements) + " floats are needed");
  }
  FloatBuffer(const FloatBuffer&) = delete;
  FloatBuffer& operator=(const FloatBuffer&) = delete;
  ~FloatBuffer() { PyBuffer_Release(&view_); }
  float* data() const { return static_cast<float*>(view_.buf); }

 private:
  Py_buffer view_{};
};

bool set_master(TileStore& store, int tile, int parameter, const py::object& values) {
  const FloatBuffer buffer(values, store.layout(tile).parameter(parameter).elements, false);
  const py::gil_scoped_release release;
  return store.set_master(tile, parameter, buffer.data());
}

void get_master(TileStore& store, int tile, int parameter, const py::object& values) {
  const FloatBuffer buffer(values, store.layout(tile).parameter(parameter).elements, true);
  const py::gil_scoped_release release;
  store.get_master(tile, parameter, buffer.data());
}

Moment moment_of(Section section) {
  if (section == Section::kExpAvg) return Moment::kExpAvg;
  if (section == Section::kExpAvgSq) return Moment::kExpAvgSq;
  throw CallerError(std::string("section \"") + section_name(section) + "\" holds no moments");
}

void set_moments_of(TileStore& store, int tile, int parameter, Section section, const py::object& values) {
  const Moment moment = moment_of(section);
  const FloatBuffer buffer(values, store.layout(tile).parameter(parameter).elements, false);
  const py::gil_scoped_release release;
  set_moments(store, tile, parameter, moment, buffer.data());
}

void get_moments_of(TileStore& store, int tile, int parameter, Section section, const py::object& values) {
  const Moment moment = moment_of(section);
  const FloatBuffer buffer(values, store.layout(tile).parameter(parameter).elements, true);
  const py::gil_scoped_release release;
  get_moments(store, tile, parameter, moment, buffer.data());
}

// By the enumerators' values.
constexpr std::array<const char*, 3> kWeightNames = {"bf16_split", "bf16", "fp32"};
constexpr std::array<const char*, 3> kMomentNames = {"fp32", "bf16", "int8"};
constexpr std::array<const char*, 2> kRuleNames = {"adamw", "lion"};

template <class Enumerator, std::size_t kNames>
Enumerator named(const std::array<const char*, kNames>& names, const char* what, const std::string& name) {
  std::string known;
  for (std::size_t i = 0; i < kNames; ++i) {
    if (name == names[i]) return static_cast<Enumerator>(i);
    known += (i == 0 ? "" : ", ") + std::string(names[i]);
  }
  throw CallerError("unknown " + std::string(what) + " \"" + name + "\"; known: " + known);
}

void bind_format(py::module_& module) {
  py::class_<TileFormat> format(module, "TileFormat", py::is_final());
  format
      .def(py::init([](const std::string& weights, const std::string& moments, const std::string& rule) {
             return TileFormat{named<WeightFormat>(kWeightNames, "format of weights", weights),
                               named<MomentFormat>(kMomentNames, "format of moments", moments),
                               named<Rule>(kRuleNames, "rule of updates", rule)};
           }),
           py::arg("weights"), py::arg("moments") = "fp32", py::arg("rule") = "adamw")
      .def_property_readonly("name", [](const TileFormat& self) { return format_name(self); })
      .def_property_readonly(
          "weights",
          [](const TileFormat& self) { return kWeightNames[static_cast<std::size_t>(self.weights)]; })
      .def_property_readonly(
          "moments",
          [](const TileFormat& self) { return kMomentNames[static_cast<std::size_t>(self.moments)]; })
      .def_property_readonly(
          "rule", [](const TileFormat& self) { return kRuleNames[static_cast<std::size_t>(self.rule)]; })
      .def(py::self == py::self)
      .def("__hash__",
           [](const TileFormat& self) {
             return 9 * static_cast<int>(self.rule) + 3 * static_cast<int>(self.weights) +
                    static_cast<int>(self.moments);
           })
      .def("__repr__", [](const TileFormat& self) {
        return "TileFormat(\"" + std::string(kWeightNames[static_cast<std::size_t>(self.weights)]) +
               "\", \"" + kMomentNames[static_cast<std::size_t>(self.moments)] + "\", \"" +
               kRuleNames[static_cast<std::size_t>(self.rule)] + "\")";
      });
  format.attr("bf16_split") = TileFormat::kBf16Split;
  format.attr("fp32") = TileFormat::kFp32;
}

void bind_layout(py::module_& module) {
  bind_format(module);
  py::enum_<Section>(module, "Section", py::is_final())
      .value("weights", Section::kWeights)
      .value("master_low", Section::kMasterLow)
      .value("gradients", Section::kGradients)
      .value("exp_avg", Section::kExpAvg)
      .value("exp_avg_sq", Section::kExpAvgSq)
      .value("exp_avg_exponents", Section::kExpAvgExponents)
      .value("exp_avg_sq_exponents", Section::kExpAvgSqExponents)
      .value("accumulator", Section::kAccumulator);
  py::class_<TileLayout>(module, "TileLayout", py::is_final())
      .def(py::init([](TileFormat format, const std::vector<std::pair<std::int64_t, bool>>& parameters,
                       int rank, int ranks) {
             std::vector<ParameterShape> shapes;
             for (const auto& [elements, trainable] : parameters) shapes.push_back({elements, trainable});
             return TileLayout(format, std::move(shapes), {rank, ranks});
           }),
           py::arg("format"), py::arg("parameters"), py::arg("rank") = 0, py::arg("ranks") = 1)
      .def_property_readonly("format", &TileLayout::format)
      .def_property_readonly("trainable_elements", &TileLayout::trainable_elements)
      .def_property_readonly("weight_elements", &TileLayout::weight_elements)
      .def_property_readonly("nbytes", &TileLayout::bytes)
      .def("element_offset", &TileLayout::element_offset, py::arg("parameter"))
      .def(
          "section",
          [](const TileLayout& self, Section section) {
            const TileLayout::Place place = self.section(section);
            return std::pair(place.offset, place.bytes);
          },
          py::arg("section"));
}

}  // namespace

void bind_tiles(py::module_& module) {
  bind_layout(module);

  // Reached only through TileStore.view, hence the underscore.
  py::class_<SectionBuffer>(module, "_SectionBuffer", py::buffer_protocol())
      .def_buffer([](SectionBuffer& self) {
        const auto bytes = static_cast<py::ssize_t>(self.memory.bytes);
        return py::buffer_info(self.memory.data, 1, "B", 1, {bytes}, {1});
      });

  py::class_<TileStore, std::shared_ptr<TileStore>>(module, "TileStore", py::is_final())
      .def(py::init(
               [](const PyBackend& backend, unsigned threads, std::string isa, std::size_t staging_bytes) {
                 return std::make_shared<TileStore>(backend.backend,
                                                    TileStoreOptions{threads, std::move(isa), staging_bytes});
               }),
           py::arg("backend"), py::kw_only(), py::arg("threads") = 0, py::arg("isa") = "",
           py::arg("staging_bytes") = std::size_t{64} << 20)
      .def("add", &TileStore::add, py::arg("layout"), ReleaseGil())
      .def("add_accumulator", &TileStore::add_accumulator, py::arg("tile"), ReleaseGil())
      .def("has_accumulator", &TileStore::has_accumulator, py::arg("tile"))
      .def(
          "view",
          [](const std::shared_ptr<TileStore>& self, int tile, Section section) {
            return py::memoryview(py::cast(SectionBuffer{self, self->section(tile, section)}));
          },
          py::arg("tile"), py::arg("section"))
      .def(
          "layout", [](const TileStore& self, int tile) { return self.layout(tile); }, py::arg("tile"))
      .def("set_master", &set_master, py::arg("tile"), py::arg("parameter"), py::arg("values"))
      .def("get_master", &get_master, py::arg("tile"), py::arg("parameter"), py::arg("values"))
      .def("set_moments", &set_moments_of, py::arg("tile"), py::arg("parameter"), py::arg("section"),
           py::arg("values"))
      .def("get_moments", &get_moments_of, py::arg("tile"), py::arg("parameter"), py::arg("section"),
           py::arg("values"))
      .def("__len__", &TileStore::tiles)
      .def_property_readonly("nbytes", &TileStore::bytes)
      .def_property_readonly("pinned_bytes", &TileStore::pinned_bytes)
      .def_property_readonly("isa", [](const TileStore& self) { return isa_name(self.isa()); })
      .def_property_readonly("threads", &TileStore::threads);
}

}  // namespace megatrain::bindings
