// A ring of pinned chunks for tiles that could not be pinned: bytes go through ordinary memory
// copies on one side and asynchronous copies on the other. One ring serves one direction. Memory is
// taken at the first use. If even the ring cannot be pinned, it is used as it is: slower, not wrong.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "stream/event_pool.h"
#include "tiles/tile_store.h"

namespace megatrain {

class StagingRing {
 public:
  StagingRing(TileStore& store, EventPool& events, std::size_t bytes);

  // Queues host to device on `stream`. Blocks only while all chunks are on their way. When it
  // returns, `host` has been read; the end is marked by any event recorded on `stream` afterwards.
  void copy_up(std::byte* device, const std::byte* host, std::size_t bytes, StreamView stream);
  // Device to host, after the work on `stream`. Blocks until the bytes have landed.
  void copy_down(std::byte* host, const std::byte* device, std::size_t bytes, StreamView stream);

 private:
  struct Chunk {
    std::byte* data = nullptr;
    SharedEvent last;  // the end of the last copy that used it
  };
  Chunk& next_chunk();  // under mutex_

  TileStore& store_;
  EventPool& events_;
  const std::size_t chunks_count_;
  const std::size_t chunk_bytes_;
  std::mutex mutex_;  // whole copies, one after the other
  HostBuffer memory_;
  std::vector<Chunk> chunks_;
  std::size_t next_ = 0;
};

}  // namespace megatrain
