// What the benchmarks need of CUDA beside the Backend: device memory, another way to pin, a held
// start, exact times between events. Without CUDA (cuda_absent.cpp) there is no GPU and the rest
// throws Lacking. Include no CUDA header outside cuda_*.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/backend.h"

namespace megatrain::bench {

struct GpuFacts {
  std::string name;
  double memory_gib = 0;
  int numa_node = -1;
  int copy_engines = 0;
  std::string pcie;  // "32.0 GT/s x16"; empty where a virtual machine does not show it
};
std::vector<GpuFacts> gpu_facts();
std::string cuda_versions();  // of driver and runtime, or why there is no CUDA

// Every device that the driver shows; throws Lacking without one.
std::vector<std::shared_ptr<Backend>> require_gpus();

class DeviceMemory {
 public:
  DeviceMemory(int device, std::size_t bytes);
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  ~DeviceMemory();
  std::byte* data() const noexcept { return data_; }
  void fill(int byte, std::size_t bytes);  // returns when it is done

 private:
  int device_;
  std::byte* data_ = nullptr;
};

// Memory of cudaHostAlloc.
class CudaHostMemory {
 public:
  CudaHostMemory(int device, std::size_t bytes);
  CudaHostMemory(const CudaHostMemory&) = delete;
  CudaHostMemory& operator=(const CudaHostMemory&) = delete;
  ~CudaHostMemory();
  std::byte* data() const noexcept { return data_; }

 private:
  std::byte* data_ = nullptr;
};

// Holds streams back until the host lets go, so that what is queued meanwhile starts at once and the
// time it takes to queue is not measured. At most kMostHeldCopies fit behind it: the driver blocks the
// caller when its queue is full, and then nobody would let go.
constexpr int kMostHeldCopies = 128;
class Latch {
 public:
  explicit Latch(int device);
  Latch(const Latch&) = delete;
  Latch& operator=(const Latch&) = delete;
  ~Latch();
  void hold(StreamView stream);
  // Throws OutsideError if the device gave up waiting: what was measured started too early.
  void release();

 private:
  struct Flag;
  int device_;
  Flag* flag_ = nullptr;  // in host memory that the device reads
};

// Both were recorded on this device and have been reached.
double cuda_seconds(EventView begin, EventView end);
// Keeps the stream busy without touching memory, as a computation would.
void cuda_busy(int device, StreamView stream, std::int64_t ns);
// The plain call, for the ceiling that copies through the Backend are held against.
void cuda_bare_copy(int device, void* to, const void* from, std::size_t bytes, CopyKind kind,
                    StreamView stream);

}  // namespace megatrain::bench
