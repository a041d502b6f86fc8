// One parameter's moments in fp32, whatever the tile keeps them in. As with masters, a sharded tile
// reads and writes its own part; nobody else may use the parameter meanwhile.
#pragma once

#include "optim/moments.h"
#include "tiles/tile_store.h"

namespace megatrain {

// `elements` floats. CallerError for a frozen parameter, and, with nothing written, for second moments that
// are negative or NaN. Written values are rounded to the nearest that the format has.
void get_moments(TileStore& store, int tile, int parameter, Moment moment, float* values);
void set_moments(TileStore& store, int tile, int parameter, Moment moment, const float* values);

}  // namespace megatrain
