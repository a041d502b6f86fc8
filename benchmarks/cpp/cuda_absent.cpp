// Stands in for cuda_tools.cpp in builds without the CUDA toolkit or without its compiler.
#include "cuda_tools.h"
#include "program.h"

namespace megatrain::bench {
namespace {

std::string reason() {
  return cuda_device_count() > 0 ? "built without nvcc, the CUDA compiler" : cuda_unavailable_reason();
}

[[noreturn]] void throw_lacking() { throw Lacking("needs a CUDA device: " + reason()); }

}  // namespace

struct Latch::Flag {};

std::vector<GpuFacts> gpu_facts() { return {}; }
std::string cuda_versions() { return "no GPU: " + reason(); }
std::vector<std::shared_ptr<Backend>> require_gpus() { throw_lacking(); }

DeviceMemory::DeviceMemory(int device, std::size_t) : device_(device) { throw_lacking(); }
DeviceMemory::~DeviceMemory() = default;
void DeviceMemory::fill(int, std::size_t) { throw_lacking(); }
CudaHostMemory::CudaHostMemory(int, std::size_t) { throw_lacking(); }
CudaHostMemory::~CudaHostMemory() = default;
Latch::Latch(int device) : device_(device) { throw_lacking(); }
Latch::~Latch() = default;
void Latch::hold(StreamView) { throw_lacking(); }
void Latch::release() { throw_lacking(); }

double cuda_seconds(EventView, EventView) { throw_lacking(); }
void cuda_busy(int, StreamView, std::int64_t) { throw_lacking(); }
void cuda_bare_copy(int, void*, const void*, std::size_t, CopyKind, StreamView) { throw_lacking(); }

}  // namespace megatrain::bench
