// A tile in the default format with ordinary values, to be updated again and again: what AdamW asks of
// the host's memory. Used by one thread; the passes run in the pool that is given.
#pragma once

#include <cstdint>

#include "base/cpu.h"
#include "base/thread_pool.h"
#include "device/host_memory.h"
#include "tiles/tile_layout.h"

namespace megatrain {

class UpdateLoad {
 public:
  // Memory of `backend`'s NUMA node, touched by `pool`.
  UpdateLoad(Backend& backend, ThreadPool& pool, std::int64_t parameters);

  static std::size_t bytes(std::int64_t parameters);
  std::int64_t parameters() const noexcept { return layout_.trainable_elements(); }
  void update(ThreadPool& pool);  // one pass

 private:
  void fill(ElementRange range);
  void update(ElementRange range);
  template <class T>
  T* at(Section section, std::int64_t element) const;

  TileLayout layout_;
  HostBuffer memory_;
  Isa isa_;
};

}  // namespace megatrain
