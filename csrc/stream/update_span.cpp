#include "stream/update_span.h"

namespace megatrain {

UpdateSpan update_span(const TileLayout& layout, std::byte* tile, ElementRange range, std::int64_t first) {
  const TileFormat format = layout.format();
  const auto at = [&](Section section) {
    return tile + layout.section(section).offset +
           static_cast<std::size_t>(range.begin) * element_bytes(format, section);
  };
  const auto exponents = [&](Section section) {
    return reinterpret_cast<std::uint8_t*>(tile + layout.section(section).offset) +
           range.begin / kMomentBlock;
  };
  return {.weight_format = format.weights,
          .moment_format = format.moments,
          .weight = at(Section::kWeights),
          .low = reinterpret_cast<std::int16_t*>(at(Section::kMasterLow)),
          .gradient = at(Section::kGradients),
          .exp_avg = at(Section::kExpAvg),
          .exp_avg_sq = at(Section::kExpAvgSq),
          .exp_avg_exponents = exponents(Section::kExpAvgExponents),
          .exp_avg_sq_exponents = exponents(Section::kExpAvgSqExponents),
          .count = range.size(),
          .first = first,
          .rule = format.rule};
}

}  // namespace megatrain
