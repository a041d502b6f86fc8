// Copies in one direction without a pause, by a thread that sleeps while they run. On the host they go round
// in a memory that caches should not hold. Used by one thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>

#include "device/backend.h"

namespace megatrain {

class CopyFlow {
 public:
  // Between `bytes` at `device` and piece after piece of that size of the `host_bytes` at `host`, of which
  // there is at least one; a rest that makes no piece is left out.
  CopyFlow(Backend& gpu, CopyKind kind, std::byte* host, std::size_t host_bytes, std::byte* device,
           std::size_t bytes);
  CopyFlow(const CopyFlow&) = delete;
  CopyFlow& operator=(const CopyFlow&) = delete;
  ~CopyFlow();

  void start();  // goes on with the piece after the last one
  void stop();   // throws what went wrong in the thread
  double copied() const noexcept { return static_cast<double>(copies_) * static_cast<double>(bytes_); }

 private:
  static constexpr int kInFlight = 4;
  void copy();

  Backend& gpu_;
  const CopyKind kind_;
  std::byte* const host_;
  const std::size_t pieces_;
  std::byte* const device_;
  const std::size_t bytes_;
  Stream stream_;
  Event ends_[kInFlight];
  std::size_t next_ = 0;  // piece; the thread's while it runs
  std::atomic<bool> running_{false};
  std::atomic<std::int64_t> copies_{0};  // that have ended
  std::exception_ptr failure_;           // read after the thread has ended
  std::thread thread_;
};

}  // namespace megatrain
