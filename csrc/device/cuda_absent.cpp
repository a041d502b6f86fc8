// Stands in for cuda_backend.cpp in builds without the CUDA toolkit.
#include "base/error.h"
#include "device/backend.h"

namespace megatrain {

int cuda_device_count() noexcept { return 0; }

std::string cuda_unavailable_reason() { return "built without CUDA"; }

std::unique_ptr<Backend> make_cuda_backend(int, const CudaBackendOptions&) {
  throw OutsideError("no CUDA device: " + cuda_unavailable_reason());
}

}  // namespace megatrain
