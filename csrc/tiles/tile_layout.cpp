#include "tiles/tile_layout.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "tiles/share.h"

namespace megatrain {
namespace {

constexpr std::size_t kPageBytes = 4096;
// Far above any memory, and far enough below 2^63 that no sum of bytes of a tile can wrap.
constexpr std::int64_t kMaxTileElements = std::int64_t{1} << 56;

template <class Integer>
Integer align_up(Integer value, Integer unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace

std::string format_name(TileFormat format) {
  static constexpr const char* kWeights[] = {"bf16_split", "bf16", "fp32"};
  static constexpr const char* kMoments[] = {"", "_moments_bf16", "_moments_int8"};
  static constexpr const char* kRules[] = {"", "_lion"};
  return std::string(kWeights[static_cast<int>(format.weights)]) +
         kMoments[static_cast<int>(format.moments)] + kRules[static_cast<int>(format.rule)];
}

const char* section_name(Section section) noexcept {
  switch (section) {
    case Section::kWeights:
      return "weights";
    case Section::kMasterLow:
      return "master_low";
    case Section::kGradients:
      return "gradients";
    case Section::kExpAvg:
      return "exp_avg";
    case Section::kExpAvgSq:
      return "exp_avg_sq";
    case Section::kExpAvgExponents:
      return "exp_avg_exponents";
    case Section::kExpAvgSqExponents:
      return "exp_avg_sq_exponents";
    case Section::kAccumulator:
      return "accumulator";
  }
  return "unknown";
}

std::size_t element_bytes(TileFormat format, Section section) noexcept {
  switch (section) {
    case Section::kWeights:
    case Section::kGradients:
      return format.weights == WeightFormat::kFp32 ? 4 : 2;
    case Section::kMasterLow:
      return format.weights == WeightFormat::kBf16Split ? 2 : 0;
    case Section::kExpAvgSq:
      if (moments_of(format.rule) < 2) return 0;
      [[fallthrough]];
    case Section::kExpAvg:
      return format.moments == MomentFormat::kFp32 ? 4 : format.moments == MomentFormat::kBf16 ? 2 : 1;
    case Section::kExpAvgSqExponents:
      if (moments_of(format.rule) < 2) return 0;
      [[fallthrough]];
    case Section::kExpAvgExponents:
      return format.moments == MomentFormat::kInt8 ? 1 : 0;
    case Section::kAccumulator:
      break;
  }
  return 4;
}

std::int64_t alignment_elements(TileFormat format) noexcept {
  const auto aligned = 256 / static_cast<std::int64_t>(element_bytes(format, Section::kWeights));
  return format.moments == MomentFormat::kInt8 ? std::max(aligned, kMomentBlock) : aligned;
}

std::int64_t page_elements(TileFormat format) noexcept {
  const std::size_t narrowest =
      std::min(element_bytes(format, Section::kWeights), element_bytes(format, Section::kExpAvg));
  return static_cast<std::int64_t>(kPageBytes / narrowest);
}

TileLayout::TileLayout(TileFormat format, std::vector<ParameterShape> parameters, Shard shard)
    : format_(format), shard_(shard), parameters_(std::move(parameters)), offsets_(parameters_.size()) {
  if (shard.ranks < 1 || shard.rank < 0 || shard.rank >= shard.ranks) {
    throw CallerError("rank " + std::to_string(shard.rank) + " of " + std::to_string(shard.ranks) +
                      " ranks; 0 <= rank < ranks is needed");
  }
  const std::int64_t alignment = alignment_elements(format);
  std::int64_t next = 0;
  const auto place = [&](std::size_t index) {
    const std::int64_t elements = parameters_[index].elements;
    if (elements < 0 || elements > kMaxTileElements - next) {
      throw CallerError("parameter " + std::to_string(index) + " of " + std::to_string(elements) +
                        " elements; a tile holds 0 to " + std::to_string(kMaxTileElements));
    }
    offsets_[index] = next;
    next = align_up(next + elements, alignment);
  };
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].trainable) place(i);
  }
  trainable_elements_ = next;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].trainable) place(i);
  }
  weight_elements_ = next;
  const Place last = section(Section::kExpAvgSqExponents);
  bytes_ = align_up(last.offset + last.bytes, kPageBytes);
}

const ParameterShape& TileLayout::parameter(int index) const {
  if (index < 0 || index >= parameters()) {
    throw CallerError("parameter " + std::to_string(index) + " of a tile with " +
                      std::to_string(parameters()) + " parameters");
  }
  return parameters_[static_cast<std::size_t>(index)];
}

std::int64_t TileLayout::element_offset(int index) const {
  parameter(index);
  return offsets_[static_cast<std::size_t>(index)];
}

ElementRange TileLayout::range(int index) const {
  const std::int64_t begin = element_offset(index);
  return {begin, begin + parameter(index).elements};
}

std::int64_t TileLayout::section_elements(Section section) const noexcept {
  if (element_bytes(format_, section) == 0) return 0;
  if (section == Section::kExpAvgExponents || section == Section::kExpAvgSqExponents) {
    return trainable_elements_ / kMomentBlock;  // parameters begin and gaps end at whole blocks
  }
  return section == Section::kWeights ? weight_elements_ : trainable_elements_;
}

TileLayout::Place TileLayout::section(Section wanted) const noexcept {
  Place place;
  const auto bytes_of = [&](Section section) {
    return static_cast<std::size_t>(section_elements(section)) * element_bytes(format_, section);
  };
  place.bytes = bytes_of(wanted);
  if (wanted == Section::kAccumulator) return place;
  for (int s = 0; s < static_cast<int>(wanted); ++s) {
    place.offset = align_up(place.offset + bytes_of(static_cast<Section>(s)), kPageBytes);
  }
  return place;
}

ElementRange TileLayout::owned() const noexcept {
  return share_of(trainable_elements_, page_elements(format_), shard_.rank, shard_.ranks);
}

}  // namespace megatrain
