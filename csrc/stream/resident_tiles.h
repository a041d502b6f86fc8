// Tiles whose whole state also lies on the device and is updated there. The host's copy is a backing
// store: read when a tile is first used or was edited, written when somebody wants to look. All
// functions are for the engine's caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "stream/parts.h"
#include "stream/tile_update.h"

namespace megatrain {

class ResidentTiles {
 public:
  explicit ResidentTiles(const EngineParts& parts);

  // `device`: memory for the whole tile, laid out as on the host; `non_finite`: a zeroed int on the
  // device. The caller keeps both alive until clear() has returned or the engine is closed.
  void add(int tile, std::byte* device, int* non_finite);
  // All of them, whose changes were written back.
  void clear();
  bool has(int tile) const noexcept { return tiles_.count(tile) != 0; }

  // Work queued on `stream` afterwards sees the tile's state. The device's gradients stay as they are:
  // they may wait for an update.
  void use(int tile, StreamView stream);
  // Queues the update on `stream`, after the work on it so far: gradients are those of the device's
  // copy. A weight that became infinite or NaN shows in a later call.
  void update(int tile, const std::vector<ParameterUpdate>& updates, StreamView stream);
  // Brings what updates on the device have changed to the host, gradients included; blocks until it is
  // there.
  void write_back();
  void synchronize();  // returns when the copies and updates queued so far have ended

 private:
  struct Tile {
    std::byte* device = nullptr;
    int* non_finite = nullptr;
    std::byte* seen_non_finite = nullptr;  // the host's copy of the flag
    std::int64_t version = -1;             // of the host's state that the device had last
    bool ahead = false;                    // the device has changed it since
    SharedEvent changed;                   // the last update
    std::int64_t step = 0;                 // of that update
  };
  Tile& tile_at(int tile);
  void check_finite(int tile, const Tile& entry);
  void copy(int tile, const Tile& entry, CopyKind kind, std::size_t begin, std::size_t end);

  EngineParts parts_;
  Backend& backend_;
  Stream stream_;
  std::vector<HostBuffer> flags_;  // a page each; device copies land there, so they never move
  std::map<int, Tile> tiles_;
};

}  // namespace megatrain
