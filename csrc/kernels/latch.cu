#include "kernels/latch.h"

namespace megatrain {
namespace {

__device__ std::int64_t now_ns() {
  std::int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void latch_kernel(LatchFlag* flag, std::int64_t limit_ns) {
  const std::int64_t begin = now_ns();
  while (flag->open == 0) {
    if (now_ns() - begin < limit_ns) continue;
    flag->gave_up = 1;
    return;
  }
}

__global__ void busy_kernel(std::int64_t ns) {
  const std::int64_t begin = now_ns();
  while (now_ns() - begin < ns) {
  }
}

}  // namespace

cudaError_t hold_stream(LatchFlag* flag, std::int64_t limit_ns, cudaStream_t stream) {
  latch_kernel<<<1, 1, 0, stream>>>(flag, limit_ns);
  return cudaGetLastError();
}

cudaError_t keep_busy(std::int64_t ns, cudaStream_t stream) {
  busy_kernel<<<1, 1, 0, stream>>>(ns);
  return cudaGetLastError();
}

}  // namespace megatrain
