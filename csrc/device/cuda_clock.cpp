#include "device/cuda_clock.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <utility>

#include "device/cuda_check.h"

namespace megatrain {
namespace {

constexpr std::int64_t kRenewAfterNs = 4'000'000'000;
constexpr int kAttempts = 8;

std::int64_t steady_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

CudaClock::CudaClock() {
  try {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
               "cudaStreamCreateWithFlags(megatrain clock)");
    check_cuda(cudaEventCreate(&anchor_), "cudaEventCreate(megatrain clock)");
    check_cuda(cudaEventCreate(&candidate_), "cudaEventCreate(megatrain clock)");
    set_anchor();
  } catch (...) {
    destroy();
    throw;
  }
}

CudaClock::~CudaClock() { destroy(); }

void CudaClock::destroy() noexcept {
  if (process_ != getpid()) return;  // CUDA does not follow into a forked child
  if (candidate_) cudaEventDestroy(candidate_);
  if (anchor_) cudaEventDestroy(anchor_);
  if (stream_) cudaStreamDestroy(stream_);
  cudaGetLastError();
}

// The event ran somewhere between the two readings. Of several attempts the narrowest is kept; its
// middle is off by half its width at most.
void CudaClock::set_anchor() {
  std::int64_t narrowest_ns = INT64_MAX;
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::int64_t before = steady_ns();
    check_cuda(cudaEventRecord(candidate_, stream_), "cudaEventRecord(megatrain clock)");
    check_cuda(cudaEventSynchronize(candidate_), "cudaEventSynchronize(megatrain clock)");
    const std::int64_t width_ns = steady_ns() - before;
    if (width_ns >= narrowest_ns) continue;
    narrowest_ns = width_ns;
    anchor_ns_ = before + width_ns / 2;
    std::swap(anchor_, candidate_);
  }
  error_ns_ = std::max(error_ns_, narrowest_ns / 2);
}

std::int64_t CudaClock::error_ns() {
  std::lock_guard lock(mutex_);
  return error_ns_;
}

std::int64_t CudaClock::time_ns(cudaEvent_t event) {
  std::lock_guard lock(mutex_);
  if (steady_ns() - anchor_ns_ > kRenewAfterNs) set_anchor();
  float elapsed_ms = 0;  // negative for events before the anchor
  const cudaError_t code = cudaEventElapsedTime(&elapsed_ms, anchor_, event);
  if (code == cudaErrorInvalidResourceHandle) {
    cudaGetLastError();
    return 0;
  }
  check_cuda(code, "cudaEventElapsedTime");
  return anchor_ns_ + std::llround(static_cast<double>(elapsed_ms) * 1e6);
}

}  // namespace megatrain
