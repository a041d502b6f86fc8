// Anonymous memory on chosen NUMA nodes, with or without huge pages: what the tiles lie in, with the
// choices open that the runtime has made.
#pragma once

#include <cstddef>
#include <vector>

#include "base/thread_pool.h"

namespace megatrain::bench {

enum class Pages { kHuge, kSmall };

// Owns the mapping, which is untouched until touch().
class NodeMemory {
 public:
  // On one node, page by page on several in turn, or, for none, wherever it is touched first. A
  // preference, as in the runtime: containers may forbid it, and node_of() tells. Throws OutsideError.
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

// The NUMA node of a page that has been touched; -1 where the kernel does not tell.
int node_of(const std::byte* page);

}  // namespace megatrain::bench
