// The device buffers that hold weights, and which of them to replace. Pure decisions: no waiting, no
// copying. The prefetcher's lock guards them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <unordered_map>
#include <vector>

#include "tiles/tile_gate.h"

namespace megatrain {

struct Slot {
  std::byte* device = nullptr;
  std::size_t bytes = 0;
  int only_tile = -1;  // a slot that one tile alone uses; -1 for the ring's slots
  int tile = -1;       // whose weights it holds or is about to hold; -1: nothing
  std::int64_t version = 0;
  int uses = 0;                       // acquisitions not yet released
  bool filling = false;               // the copy is being queued, outside the lock
  SharedEvent arrived;                // the end of the copy
  std::int64_t gate_ns = 0;           // how long an update held the copy back
  std::vector<SharedEvent> released;  // the last reads, since the slot was filled
  std::uint64_t touched = 0;          // order of acquisitions and releases
  std::vector<bool> parts;            // which are there or on their way; empty where the tile has none
};

// Positions of the first coming use of each tile.
using NextUse = std::unordered_map<int, std::size_t>;

class SlotRing {
 public:
  int add(std::byte* device, std::size_t bytes, int only_tile);
  void clear() { slots_.clear(); }
  Slot& operator[](int index) { return slots_[static_cast<std::size_t>(index)]; }
  int size() const noexcept { return static_cast<int>(slots_.size()); }

  // The slot with this version of the tile, arrived or on its way; -1 without.
  int find(int tile, std::int64_t version) const;
  // A tile that has a slot of its own fits no other: its users know that slot's memory.
  bool fits(int slot, int tile, std::size_t bytes) const;
  std::size_t largest_for(int tile) const;  // bytes; 0 where no slot may hold the tile

  struct Want {
    int tile = -1;
    std::size_t bytes = 0;
    bool demanded = false;     // then any content may go, else only what is needed later
    std::size_t position = 0;  // of the use, in the sequence that `next_use` is about
  };
  // What to overwrite for `want`: nothing in use (unless `ignore_uses`) and nothing in `claimed`;
  // the tile's own slot, else a ring slot that is empty or stale, else the one whose tile is needed
  // last; among equals the one idle longest. -1 if there is none.
  int victim(const Want& want, const NextUse& next_use, const std::vector<int>& claimed,
             const std::function<std::int64_t(int tile)>& version, bool ignore_uses) const;

 private:
  bool has_own(int tile) const;
  std::deque<Slot> slots_;  // a slot never moves: copies are queued without the lock
};

}  // namespace megatrain
