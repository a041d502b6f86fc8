// A range of a tile as the update sees it, wherever the tile's bytes lie: in the store, or on the device.
#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/update.h"
#include "tiles/tile_layout.h"

namespace megatrain {

// Elements `range` of a tile whose first byte is at `tile`; `first` is the index of the first one in
// its parameter.
UpdateSpan update_span(const TileLayout& layout, std::byte* tile, ElementRange range, std::int64_t first);

}  // namespace megatrain
