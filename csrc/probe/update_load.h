// Tiles in the default format with ordinary values, to be updated in turn: what AdamW asks of the host's
// memory when caches hold none of it. Used by one thread; the passes run in the pool that is given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/cpu.h"
#include "base/thread_pool.h"
#include "device/host_memory.h"
#include "tiles/tile_layout.h"

namespace megatrain {

class UpdateLoad {
 public:
  // `windows` tiles of `parameters` each, in memory of `backend`'s NUMA node, touched by `pool`.
  UpdateLoad(Backend& backend, ThreadPool& pool, std::int64_t parameters, std::size_t windows);

  // The fewest of which each has left a cache of that size long before its next turn: all together are six
  // times as large, and at least one.
  static std::size_t windows_beyond(std::size_t cache_bytes, std::int64_t parameters);
  static std::size_t bytes(std::int64_t parameters);  // of a window

  std::int64_t parameters() const noexcept { return layout_.trainable_elements(); }  // of a window
  std::size_t windows() const noexcept { return windows_; }
  std::byte* window(std::size_t index) const noexcept { return memory_.data() + index * layout_.bytes(); }
  void update(ThreadPool& pool);  // one pass over the next window

 private:
  void fill(std::size_t window, ElementRange range);
  void update(std::size_t window, ElementRange range);
  template <class T>
  T* at(std::size_t window, Section section, std::int64_t element) const;

  TileLayout layout_;
  std::size_t windows_;
  std::size_t next_ = 0;
  HostBuffer memory_;
  Isa isa_;
};

}  // namespace megatrain
