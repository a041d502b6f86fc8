// Device tensors that wait on the host until they are needed again: activations between a layer's
// forward and its backward. Pinned host memory is taken as it is needed and used again. All functions
// are for the engine's caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>

#include "stream/parts.h"

namespace megatrain {

class KeptStore {
 public:
  explicit KeptStore(const EngineParts& parts);

  // Host memory that may be taken in all. Without a limit each new piece is held against what the
  // machine has free.
  void limit(std::size_t bytes) { limit_ = bytes; }

  // Queues a copy down, after the work on `stream` so far, and returns its name. The device memory
  // stays as it is until wait_landed() has returned. `tile` is the layer that it belongs to, for the trace.
  // Throws MemoryLimitError where the host has no more memory for it, unused memory given back.
  std::int64_t put(int tile, const std::byte* device, std::size_t bytes, StreamView stream);
  // Blocks until the copy down has ended. For how long `stream` had no work meanwhile is in the trace.
  void wait_landed(std::int64_t kept, StreamView stream);
  // Queues the copy up, after the work on `stream` so far and after the copy down.
  void get(std::int64_t kept, std::byte* device, StreamView stream);
  void wait_got(std::int64_t kept, StreamView stream);  // `stream` waits for the copy up
  void drop(std::int64_t kept);  // its memory may be used again, once the copies have ended

  void free_unused();                                    // gives back the memory that nothing is kept in
  std::size_t bytes() const noexcept { return bytes_; }  // of host memory taken
  void synchronize();

 private:
  struct Place {
    HostBuffer memory;
    SharedEvent last;  // the last copy that used it
  };
  struct Kept {
    int tile = -1;
    std::size_t bytes = 0;
    Place place;
    SharedEvent down;
    SharedEvent up;
  };
  Kept& find(std::int64_t kept);
  Place take(std::size_t bytes);
  Place allocate(std::size_t bytes);  // OutsideError where the limit or the machine refuses
  void trace(SpanKind kind, const Kept& kept, SharedEvent begin, const SharedEvent& end);

  EngineParts parts_;
  Backend& backend_;
  Stream down_;
  Stream up_;
  std::multimap<std::size_t, Place> free_;
  std::unordered_map<std::int64_t, Kept> kept_;
  std::int64_t next_ = 0;
  std::size_t bytes_ = 0;
  std::optional<std::size_t> limit_;
};

}  // namespace megatrain
