// Owns the host memory of all tiles, the pool that works on it and the choice of instruction set.
// Tiles are added by one thread; any thread may look one up. Who may touch a tile's bytes when is
// the tile gate's business, not the store's.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/thread_pool.h"
#include "device/backend.h"
#include "device/host_memory.h"
#include "tiles/tile_layout.h"

namespace megatrain {

struct TileStoreOptions {
  unsigned threads = 0;                               // of the pool; 0: all usable cores but one
  std::string isa = {};                               // of the update; "": the fastest
  std::size_t staging_bytes = std::size_t{64} << 20;  // for tiles that could not be pinned
};

class TileStore {
 public:
  explicit TileStore(std::shared_ptr<Backend> backend, const TileStoreOptions& options = {});
  TileStore(const TileStore&) = delete;
  TileStore& operator=(const TileStore&) = delete;

  // Allocates a zeroed tile, pinned where the machine allows it, and returns its index. Whether
  // memory suffices is asked before, for all tiles at once (require_host_memory).
  int add(const TileLayout& layout);
  void add_accumulator(int tile);  // does nothing where there is one
  bool has_accumulator(int tile) const;

  int tiles() const;
  const TileLayout& layout(int tile) const;  // CallerError for an index out of range

  // A section's bytes, valid as long as the store lives. CallerError for an absent accumulator.
  struct SectionView {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    bool pinned = false;
  };
  SectionView section(int tile, Section section) const;

  // fp32 master of one parameter, `elements` floats. A sharded tile reads and writes its own part
  // of them. A bf16 parameter without a low half (frozen, or by format) takes rounded values. Returns
  // false if a value is not finite (it is written all the same). Nobody else may use the parameter.
  [[nodiscard]] bool set_master(int tile, int parameter, const float* values);
  void get_master(int tile, int parameter, float* values);

  std::size_t bytes() const;         // of tiles and accumulators
  std::size_t pinned_bytes() const;  // of those
  int unpinned_tiles() const;

  Backend& backend() const noexcept { return *backend_; }
  const std::shared_ptr<Backend>& shared_backend() const noexcept { return backend_; }
  Isa isa() const noexcept { return isa_; }
  unsigned threads() const noexcept { return pool_.workers(); }
  std::size_t staging_bytes() const noexcept { return staging_bytes_; }

  // The pool, one caller at a time; others wait.
  void run(const std::function<void(unsigned worker, unsigned workers)>& body);
  // Calls body(begin, end) for parts of [0, elements), in the pool where it is worth it; parts begin
  // at multiples of 4096.
  void for_parts(std::int64_t elements, const std::function<void(std::int64_t, std::int64_t)>& body);
  HostBuffer allocate(std::size_t bytes);

 private:
  struct Tile {
    TileLayout layout;
    HostBuffer memory;
    HostBuffer accumulator;
    bool has_accumulator = false;
  };
  Tile& tile_at(int tile) const;  // under mutex_

  std::shared_ptr<Backend> backend_;  // first: buffers are unpinned through it
  const Isa isa_;
  const std::size_t staging_bytes_;
  ThreadPool pool_;
  std::mutex pool_mutex_;
  mutable std::mutex mutex_;  // guards the list; a Tile itself never moves
  std::vector<std::unique_ptr<Tile>> tiles_;
};

}  // namespace megatrain
