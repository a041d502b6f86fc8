// Memory on a backend's device, for tests. The runtime itself never allocates any: torch does.
#pragma once

#include <cstddef>
#include <string>

#include "device/backend.h"

namespace megatrain::testing {

// In cuda_memory.cpp; cuda_absent.cpp in builds without CUDA.
void* cuda_allocate(int device_index, std::size_t bytes);
void cuda_free(void* address) noexcept;

class DeviceBuffer {
 public:
  DeviceBuffer(Backend& backend, std::size_t bytes)
      : cuda_(std::string(backend.name()) == "cuda"),
        address_(cuda_ ? cuda_allocate(backend.device_index(), bytes) : ::operator new(bytes)) {}
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cuda_ ? cuda_free(address_) : ::operator delete(address_); }
  void* get() const noexcept { return address_; }

 private:
  bool cuda_;
  void* address_;
};

}  // namespace megatrain::testing
