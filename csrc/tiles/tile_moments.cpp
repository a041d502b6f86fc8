#include "tiles/tile_moments.h"

#include <string>

#include "base/error.h"
#include "tiles/share.h"

namespace megatrain {
namespace {

struct Owned {
  ElementRange range;  // in the tile
  std::int64_t shift;  // of its first element in the parameter
};

Owned owned_part(const TileLayout& layout, int tile, int parameter, Moment moment) {
  if (!layout.parameter(parameter).trainable) {
    throw CallerError("parameter " + std::to_string(parameter) + " of tile " + std::to_string(tile) +
                      " is frozen and has no moments");
  }
  if (moment == Moment::kExpAvgSq && moments_of(layout.format().rule) < 2) {
    throw CallerError("tile " + std::to_string(tile) + " of the format " + format_name(layout.format()) +
                      " has no second moments");
  }
  const ElementRange whole = layout.range(parameter);
  const ElementRange mine = intersect(whole, layout.owned());
  return {mine, mine.begin - whole.begin};
}

// Elements [at, at + count) of the tile's section.
MomentSpan span_of(const TileStore& store, int tile, Moment moment, std::int64_t at, std::int64_t count) {
  const bool first = moment == Moment::kExpAvg;
  const TileFormat format = store.layout(tile).format();
  const Section section = first ? Section::kExpAvg : Section::kExpAvgSq;
  std::byte* const values =
      store.section(tile, section).data + static_cast<std::size_t>(at) * element_bytes(format, section);
  std::uint8_t* exponents = nullptr;
  if (format.moments == MomentFormat::kInt8) {
    const Section of = first ? Section::kExpAvgExponents : Section::kExpAvgSqExponents;
    exponents = reinterpret_cast<std::uint8_t*>(store.section(tile, of).data) + at / kMomentBlock;
  }
  return {moment, format.moments, values, exponents, count};
}

// Their square root is taken.
void require_squares(const float* values, std::int64_t begin, std::int64_t end, int tile, int parameter) {
  for (std::int64_t i = begin; i < end; ++i) {
    if (values[i] >= 0) continue;
    throw CallerError("second moment " + std::to_string(i) + " of parameter " + std::to_string(parameter) +
                      " of tile " + std::to_string(tile) + " is " + std::to_string(values[i]) +
                      "; it must be at least 0");
  }
}

}  // namespace

void get_moments(TileStore& store, int tile, int parameter, Moment moment, float* values) {
  const Owned mine = owned_part(store.layout(tile), tile, parameter, moment);
  store.for_parts(mine.range.size(), [&](std::int64_t begin, std::int64_t end) {
    read_moments(span_of(store, tile, moment, mine.range.begin + begin, end - begin),
                 values + mine.shift + begin);
  });
}

void set_moments(TileStore& store, int tile, int parameter, Moment moment, const float* values) {
  const Owned mine = owned_part(store.layout(tile), tile, parameter, moment);
  if (moment == Moment::kExpAvgSq) {
    store.for_parts(mine.range.size(), [&](std::int64_t begin, std::int64_t end) {
      require_squares(values, mine.shift + begin, mine.shift + end, tile, parameter);
    });
  }
  store.for_parts(mine.range.size(), [&](std::int64_t begin, std::int64_t end) {
    write_moments(span_of(store, tile, moment, mine.range.begin + begin, end - begin),
                  values + mine.shift + begin);
  });
}

}  // namespace megatrain
