// Stands in for cuda_memory.cpp in builds without CUDA, which have no backend to allocate for.
#include <new>

#include "device_memory.h"

namespace megatrain::testing {

void* cuda_allocate(int, std::size_t) { throw std::bad_alloc(); }
void cuda_free(void*) noexcept {}

}  // namespace megatrain::testing
