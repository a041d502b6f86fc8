// The extension module megatrain._native: thin wrappers that convert, release the GIL and call.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "device/backend.h"
#include "tiles/tile_store.h"

namespace megatrain::bindings {

// Python's Backend; stores, streams and events made through it keep the C++ one alive.
struct PyBackend {
  std::shared_ptr<Backend> backend;
};

// Everything that may wait for a thread or the device lets other Python threads run meanwhile.
using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

inline StreamView stream_view(std::uintptr_t handle) { return StreamView{handle}; }
inline std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

void bind_device(pybind11::module_& module);
void bind_probe(pybind11::module_& module);
void bind_tiles(pybind11::module_& module);
void bind_stream(pybind11::module_& module);

}  // namespace megatrain::bindings
