// Anonymous memory on chosen NUMA nodes, with or without huge pages: what the tiles lie in, with the
// choices open that the runtime has made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/thread_pool.h"

namespace megatrain::bench {

enum class Pages { kHuge, kSmall };

// Owns the mapping, which is untouched until touch().
class NodeMemory {
 public:
  // On one node, page by page on several in turn, or, for none, wherever it is touched first. A
  // preference, as in the runtime. Throws OutsideError.
  NodeMemory(std::size_t bytes, const std::vector<int>& nodes, Pages pages = Pages::kHuge);
  NodeMemory(const NodeMemory&) = delete;
  NodeMemory& operator=(const NodeMemory&) = delete;
  ~NodeMemory();

  // All workers together: most of the time of an allocation is the kernel's zeroing.
  void touch(ThreadPool& pool);
  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
};

// Hands out parts of a memory, each from a 4 KiB boundary on, as the sections of a tile are.
class Carver {
 public:
  explicit Carver(std::byte* next) : next_(next) {}
  template <class T>
  T* take(std::int64_t count) {
    std::byte* const here = next_;
    next_ += (static_cast<std::size_t>(count) * sizeof(T) + 4095) / 4096 * 4096;
    return reinterpret_cast<T*>(here);
  }

 private:
  std::byte* next_;
};

}  // namespace megatrain::bench
