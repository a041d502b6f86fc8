// Host memory for tiles: exact size, huge pages, first touched in parallel, pinned where possible.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

#include "base/thread_pool.h"
#include "device/backend.h"

namespace megatrain {

// Owns one anonymous mapping, zeroed. Not inherited by forked children (MADV_DONTFORK).
class HostBuffer {
 public:
  HostBuffer() = default;
  // Maps exactly `bytes` (rounded up to 4 KiB), touches it with all workers of `pool` on the
  // backend's NUMA node (preferred, not strict), then pins it if `pin`.
  HostBuffer(Backend& backend, ThreadPool& pool, std::size_t bytes, bool pin);
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer();

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  bool pinned() const noexcept { return pinned_; }

 private:
  void release() noexcept;
  Backend* backend_ = nullptr;
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  bool pinned_ = false;
  pid_t owner_ = 0;  // the process that mapped it; only that one unmaps
};

// What this process may still allocate, and who says so.
struct MemoryLimit {
  std::size_t available_bytes;
  std::string source;  // "MemAvailable", "cgroup v2 memory.max", "cgroup v1 ...", "host_memory"
};

// The tightest of MemAvailable and the cgroup limits (v1 and v2, every ancestor) less their use.
// `override_bytes` replaces MemAvailable (0: none) but never a cgroup limit. `root` is prefixed to
// /proc and /sys/fs/cgroup, for tests.
MemoryLimit host_memory_limit(std::size_t override_bytes = 0, const std::string& root = "");

// Throws MemoryLimitError with both figures when `bytes` exceed the limit; nothing is allocated.
void require_host_memory(std::size_t bytes, std::size_t override_bytes = 0, const std::string& root = "");

}  // namespace megatrain
