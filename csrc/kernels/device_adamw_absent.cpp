// Stands in for device_adamw.cu in builds with the CUDA runtime but without its compiler.
#include "base/error.h"
#include "kernels/device_adamw.h"

namespace megatrain {

void queue_adamw(const UpdateStep&, const UpdateSpan&, int*, std::uintptr_t) {
  throw OutsideError(
      "layers cannot stay on the device: megatrain was built without nvcc, and so without its kernels");
}

}  // namespace megatrain
