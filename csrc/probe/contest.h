// Copies and updates share the host's memory: how fast each goes alone and beside the other, when what they
// move is in no cache. Used by one thread, which waits while the copies are queued by threads of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/thread_pool.h"
#include "device/backend.h"
#include "device/host_memory.h"
#include "probe/copy_flow.h"
#include "probe/update_load.h"

namespace megatrain {

// A second; 0 where nothing ran.
struct Rates {
  double up = 0, down = 0;  // bytes
  double updates = 0;       // parameters

  // Parameters a second of a step without computation, with bf16 weights: each parameter goes up twice
  // (forward and backward), its gradient comes down once, and it is updated once.
  double ring() const noexcept;
};

class Contest {
 public:
  // `device` is memory of `device_bytes` on the backend's device, whose halves copies go to and come
  // from. `everyone` first touches the host's side. There, updates of `parameters` at a time go round in six
  // times `cache_bytes`, and copies, half of the device's memory at a time, in `cache_bytes` a direction.
  Contest(Backend& backend, ThreadPool& everyone, std::byte* device, std::size_t device_bytes,
          std::int64_t parameters, std::size_t cache_bytes);

  static std::size_t host_bytes(std::size_t device_bytes, std::int64_t parameters, std::size_t cache_bytes);
  bool pinned() const noexcept { return source_.pinned() && target_.pinned(); }

  // Each goes on where the one before it ended, with memory that was touched longest ago.
  Rates copies(bool up, bool down, double seconds);
  Rates updates(ThreadPool& pool, double seconds);
  Rates both(ThreadPool& pool, double seconds);

 private:
  Rates with_copies(bool up, bool down, const std::function<double()>& body);
  double updates_during(ThreadPool& pool, double seconds);

  const std::size_t copy_bytes_;
  UpdateLoad load_;
  HostBuffer source_, target_;
  CopyFlow up_, down_;
};

}  // namespace megatrain
