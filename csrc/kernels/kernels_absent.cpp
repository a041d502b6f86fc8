// Stands in for the kernels in builds with the CUDA runtime but without its compiler.
#include "base/error.h"
#include "kernels/device_adamw.h"
#include "kernels/device_lion.h"

namespace megatrain {
namespace {

[[noreturn]] void throw_absent() {
  throw OutsideError(
      "layers cannot stay on the device: megatrain was built without nvcc, and so without its kernels");
}

}  // namespace

void queue_adamw(const UpdateStep&, const UpdateSpan&, int*, std::uintptr_t) { throw_absent(); }
void queue_lion(const UpdateStep&, const UpdateSpan&, int*, std::uintptr_t) { throw_absent(); }

}  // namespace megatrain
