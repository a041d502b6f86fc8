#include "cuda_tools.h"

#include <cuda_runtime_api.h>

#include <cctype>
#include <fstream>

#include "device/cuda_check.h"
#include "kernels/latch.h"
#include "program.h"

namespace megatrain::bench {
namespace {

constexpr std::int64_t kLatchLimitNs = 5'000'000'000;

cudaStream_t native(StreamView view) { return reinterpret_cast<cudaStream_t>(view.handle); }
cudaEvent_t native(EventView view) { return reinterpret_cast<cudaEvent_t>(view.handle); }

void make_current(int device) { check_cuda(cudaSetDevice(device), "cudaSetDevice"); }

std::string pci_file(int device, const char* name) {
  char bus_id[32] = {};
  check_cuda(cudaDeviceGetPCIBusId(bus_id, sizeof bus_id, device), "cudaDeviceGetPCIBusId");
  for (char& c : bus_id) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::ifstream file(std::string("/sys/bus/pci/devices/") + bus_id + '/' + name);
  std::string line;
  std::getline(file, line);
  return line;
}

// The fastest that the link can do: at rest it runs slower, to save power.
std::string pcie_link(int device) {
  std::string speed = pci_file(device, "max_link_speed"), width = pci_file(device, "max_link_width");
  if (speed.empty() || speed.rfind("Unknown", 0) == 0 || width.empty() || width == "0") return "";
  if (const std::size_t end = speed.find(" PCIe"); end != std::string::npos) speed.erase(end);
  return speed + " x" + width;
}

std::string version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

}  // namespace

std::vector<GpuFacts> gpu_facts() {
  std::vector<GpuFacts> gpus;
  for (int device = 0; device < cuda_device_count(); ++device) {
    cudaDeviceProp properties{};
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    GpuFacts facts;
    facts.name = properties.name;
    facts.memory_gib = static_cast<double>(properties.totalGlobalMem) / (1 << 30);
    facts.copy_engines = properties.asyncEngineCount;
    facts.pcie = pcie_link(device);
    const std::string node = pci_file(device, "numa_node");
    facts.numa_node = node.empty() ? -1 : std::stoi(node);
    gpus.push_back(std::move(facts));
  }
  return gpus;
}

std::string cuda_versions() {
  if (cuda_device_count() == 0) return "no GPU: " + cuda_unavailable_reason();
  int driver = 0, runtime = 0;
  check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check_cuda(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  // The driver's own number ("580.65.06") is only in its file; CUDA tells the version it supports.
  std::ifstream file("/sys/module/nvidia/version");
  std::string module;
  std::getline(file, module);
  return "driver " + (module.empty() ? "for CUDA " + version(driver) : module) + ", CUDA runtime " +
         version(runtime);
}

std::vector<std::shared_ptr<Backend>> require_gpus() {
  const int count = cuda_device_count();
  if (count == 0) throw Lacking("needs a CUDA device: " + cuda_unavailable_reason());
  std::vector<std::shared_ptr<Backend>> gpus;
  for (int device = 0; device < count; ++device) gpus.push_back(make_cuda_backend(device, {}));
  return gpus;
}

DeviceMemory::DeviceMemory(int device, std::size_t bytes) : device_(device) {
  make_current(device);
  void* address = nullptr;
  if (const cudaError_t code = cudaMalloc(&address, bytes)) {
    throw_cuda(code, "cudaMalloc of " + std::to_string(bytes) + " bytes");
  }
  data_ = static_cast<std::byte*>(address);
}

DeviceMemory::~DeviceMemory() {
  cudaSetDevice(device_);
  cudaFree(data_);
}

CudaHostMemory::CudaHostMemory(int device, std::size_t bytes) {
  make_current(device);
  void* address = nullptr;
  if (const cudaError_t code = cudaHostAlloc(&address, bytes, cudaHostAllocDefault)) {
    throw_cuda(code, "cudaHostAlloc of " + std::to_string(bytes) + " bytes");
  }
  data_ = static_cast<std::byte*>(address);
}

CudaHostMemory::~CudaHostMemory() { cudaFreeHost(data_); }

void DeviceMemory::fill(int byte, std::size_t bytes) {
  make_current(device_);
  check_cuda(cudaMemset(data_, byte, bytes), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

struct Latch::Flag : LatchFlag {};

Latch::Latch(int device) : device_(device) {
  make_current(device);
  void* address = nullptr;
  check_cuda(cudaHostAlloc(&address, sizeof(Flag), cudaHostAllocMapped), "cudaHostAlloc of a latch");
  flag_ = static_cast<Flag*>(address);
}

Latch::~Latch() {
  flag_->open = 1;
  cudaFreeHost(flag_);
}

void Latch::hold(StreamView stream) {
  make_current(device_);
  flag_->open = 0;
  flag_->gave_up = 0;
  check_cuda(hold_stream(flag_, kLatchLimitNs, native(stream)), "launching the latch");
}

void Latch::release() {
  flag_->open = 1;
  if (flag_->gave_up) throw OutsideError("the device started before all copies were queued");
}

double cuda_seconds(EventView begin, EventView end) {
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, native(begin), native(end)), "cudaEventElapsedTime");
  return static_cast<double>(ms) / 1e3;
}

void cuda_busy(int device, StreamView stream, std::int64_t ns) {
  make_current(device);
  check_cuda(keep_busy(ns, native(stream)), "launching a busy kernel");
}

void cuda_bare_copy(int device, void* to, const void* from, std::size_t bytes, CopyKind kind,
                    StreamView stream) {
  make_current(device);
  const cudaMemcpyKind direction =
      kind == CopyKind::kHostToDevice ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  check_cuda(cudaMemcpyAsync(to, from, bytes, direction, native(stream)), "cudaMemcpyAsync");
}

}  // namespace megatrain::bench
