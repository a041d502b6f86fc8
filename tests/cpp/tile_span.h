// A span of a tile put together by hand, for references that do not go through update_tile; and all
// formats of tiles.
#pragma once

#include <functional>
#include <vector>

#include "optim/adamw.h"
#include "tiles/tile_layout.h"

namespace megatrain::testing {

inline std::vector<TileFormat> all_tile_formats() {
  std::vector<TileFormat> all;
  for (const auto weights : {WeightFormat::kBf16Split, WeightFormat::kBf16, WeightFormat::kFp32}) {
    for (const auto moments : {MomentFormat::kFp32, MomentFormat::kBf16, MomentFormat::kInt8}) {
      all.push_back({weights, moments});
    }
  }
  return all;
}

// `section` gives where a section begins; `first` is the index of the range's first element in its
// parameter.
inline UpdateSpan tile_span(TileFormat format, const std::function<std::byte*(Section)>& section,
                            ElementRange range, std::int64_t first) {
  const auto at = [&](Section which) {
    return section(which) + static_cast<std::size_t>(range.begin) * element_bytes(format, which);
  };
  const auto exponents = [&](Section which) {
    return reinterpret_cast<std::uint8_t*>(section(which)) + range.begin / kMomentBlock;
  };
  UpdateSpan span;
  span.weight_format = format.weights;
  span.moment_format = format.moments;
  span.weight = at(Section::kWeights);
  span.low = reinterpret_cast<std::int16_t*>(at(Section::kMasterLow));
  span.gradient = at(Section::kGradients);
  span.exp_avg = at(Section::kExpAvg);
  span.exp_avg_sq = at(Section::kExpAvgSq);
  span.exp_avg_exponents = exponents(Section::kExpAvgExponents);
  span.exp_avg_sq_exponents = exponents(Section::kExpAvgSqExponents);
  span.count = range.size();
  span.first = first;
  return span;
}

}  // namespace megatrain::testing
