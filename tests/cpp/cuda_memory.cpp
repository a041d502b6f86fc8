#include <cuda_runtime_api.h>

#include <new>

#include "device_memory.h"

namespace megatrain::testing {

void* cuda_allocate(int device_index, std::size_t bytes) {
  void* address = nullptr;
  if (cudaSetDevice(device_index) != cudaSuccess || cudaMalloc(&address, bytes) != cudaSuccess) {
    cudaGetLastError();
    throw std::bad_alloc();
  }
  return address;
}

void cuda_free(void* address) noexcept { cudaFree(address); }

}  // namespace megatrain::testing
