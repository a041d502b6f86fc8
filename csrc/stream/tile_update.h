// The update of one tile: the listed parameters, split over the store's pool in one pass.
#pragma once

#include <cstdint>
#include <vector>

#include "optim/update.h"
#include "tiles/tile_store.h"

namespace megatrain {

// Hyperparameters of one parameter of a tile, or of some of its elements, captured by value.
struct ParameterUpdate {
  int parameter = 0;
  UpdateStep step;
  ElementRange elements = {0, -1};  // of the parameter; an end of -1 is the parameter's

  // In the tile.
  ElementRange range(const TileLayout& layout) const;
};

// CallerError for a parameter that is not in the tile, is frozen, or of which an element is listed twice,
// for elements that it does not have or that divide a block of 8-bit moments, and for hyperparameters
// that the arithmetic does not allow.
void check_updates(const TileLayout& layout, int tile, const std::vector<ParameterUpdate>& updates);

// Reads gradients, writes weights and moments of what this shard owns of the listed parameters; the
// caller has made sure that nobody else touches them. Returns the bytes moved. Throws OutsideError
// naming tile and parameter if a weight became infinite or NaN.
std::int64_t update_tile(TileStore& store, int tile, const std::vector<ParameterUpdate>& updates);

}  // namespace megatrain
