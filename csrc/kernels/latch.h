// Kernels that do nothing for a while: one that holds a stream until the host lets go, one that keeps
// it busy for a given time. For benchmarks; one thread on one multiprocessor each.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megatrain {

// In pinned host memory that the device reads. `open` is written by the host; `gave_up` by the device,
// when it has waited longer than it should, so that a mistake of the host's cannot hang the GPU.
struct LatchFlag {
  volatile std::uint32_t open;
  volatile std::uint32_t gave_up;
};

// What is queued on `stream` afterwards starts when `flag->open` is not 0, or after `limit_ns`.
cudaError_t hold_stream(LatchFlag* flag, std::int64_t limit_ns, cudaStream_t stream);
cudaError_t keep_busy(std::int64_t ns, cudaStream_t stream);

}  // namespace megatrain
