// One tile of host memory in one of the formats that the runtime has, laid out as the runtime does,
// with its update and with a pass over the same bytes that computes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/cpu.h"
#include "base/span.h"
#include "base/thread_pool.h"
#include "memory_passes.h"
#include "node_memory.h"
#include "optim/moments.h"
#include "tiles/tile_layout.h"

namespace megatrain::bench {

// All that there are.
std::vector<TileFormat> adam_formats();

class AdamTile {
 public:
  // One parameter of `elements`, on the nodes that NodeMemory takes.
  AdamTile(TileFormat format, std::int64_t elements, const std::vector<int>& nodes, ThreadPool& pool);

  static std::size_t bytes(TileFormat format, std::int64_t elements);
  TileFormat format() const noexcept { return layout_.format(); }
  std::int64_t elements() const noexcept { return layout_.trainable_elements(); }
  double bytes_per_parameter() const;  // read and written

  void reset(ThreadPool& pool);              // ordinary values, the same each time
  void update(Isa isa, ElementRange range);  // by the calling thread
  void mix(ElementRange range) const;        // the same reads and writes; changes nothing
  // A number that depends on every bit of the elements.
  std::uint64_t digest(ElementRange range) const;

 private:
  template <class T>
  T* at(Section section, std::int64_t element) const;
  std::uint8_t* exponents(Section section, std::int64_t element) const;
  void set_gradient(std::int64_t element, float value);
  void set_weights(std::int64_t begin, const float* values, std::int64_t count);
  void set_moments(Moment moment, std::int64_t begin, const float* values, std::int64_t count);

  TileLayout layout_;
  NodeMemory memory_;
  std::vector<MixStream> streams_;
};

// Calls body(range) in every worker, cut as the runtime cuts an update.
void over_tile(ThreadPool& pool, const AdamTile& tile, const std::function<void(ElementRange)>& body);

}  // namespace megatrain::bench
