// Turns the CUDA runtime's error codes into OutsideError. Included only where the runtime is.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "base/error.h"

namespace megatrain {

// `call` names the function and what it worked on, with the bytes asked for where there are any. The
// runtime keeps the last error of a thread; it is cleared, or the next check would report this one.
[[noreturn]] inline void throw_cuda(cudaError_t code, const std::string& call) {
  cudaGetLastError();
  throw OutsideError(call + " failed: code " + std::to_string(static_cast<int>(code)) + " (" +
                     cudaGetErrorName(code) + "), " + cudaGetErrorString(code));
}

inline void check_cuda(cudaError_t code, const char* call) {
  if (code != cudaSuccess) throw_cuda(code, call);
}

}  // namespace megatrain
