// Places CUDA events on the host's steady clock. Any thread may ask.
#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdint>
#include <mutex>

namespace megatrain {

// CUDA tells only the time between two events, so an anchor is recorded on an idle stream with the
// steady clock read on both sides of it. The anchor is renewed every few seconds: elapsed times are
// float milliseconds, which resolve 0.25 us at 4 s but 4 us at 60 s, and the two clocks drift apart.
// The device must be current in the calling thread.
class CudaClock {
 public:
  CudaClock();
  CudaClock(const CudaClock&) = delete;
  CudaClock& operator=(const CudaClock&) = delete;
  ~CudaClock();

  // `event` has been reached. 0 if it was never recorded, or was created without timing.
  std::int64_t time_ns(cudaEvent_t event);
  std::int64_t error_ns();  // the largest of an anchor so far

 private:
  void set_anchor();
  void destroy() noexcept;

  const pid_t process_ = getpid();
  std::mutex mutex_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t anchor_ = nullptr;
  cudaEvent_t candidate_ = nullptr;
  std::int64_t anchor_ns_ = 0;
  std::int64_t error_ns_ = 0;
};

}  // namespace megatrain
