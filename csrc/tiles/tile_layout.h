// Where each parameter of a tile lies: pure arithmetic, no memory. Offsets come from here alone, in
// both directions. Immutable; any thread may read it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/precision.h"
#include "base/span.h"

namespace megatrain {

// What a tile's sections hold. Gradients are of the type of the weights.
struct TileFormat {
  WeightFormat weights = WeightFormat::kBf16Split;
  MomentFormat moments = MomentFormat::kFp32;
  Rule rule = Rule::kAdamW;  // how many moments there are, and who updates them

  static const TileFormat kBf16Split;  // with fp32 moments
  static const TileFormat kFp32;       // all of it fp32
  friend bool operator==(const TileFormat&, const TileFormat&) = default;
};
inline constexpr TileFormat TileFormat::kBf16Split{WeightFormat::kBf16Split, MomentFormat::kFp32,
                                                   Rule::kAdamW};
inline constexpr TileFormat TileFormat::kFp32{WeightFormat::kFp32, MomentFormat::kFp32, Rule::kAdamW};

// In the order in which they lie in a tile. The exponents are those of 8-bit moments, a byte a block
// of kMomentBlock. The accumulator (fp32) has memory of its own.
enum class Section {
  kWeights,
  kMasterLow,
  kGradients,
  kExpAvg,
  kExpAvgSq,
  kExpAvgExponents,
  kExpAvgSqExponents,
  kAccumulator
};

std::string format_name(TileFormat format);          // "bf16_split", "fp32_moments_int8_lion", ...
const char* section_name(Section section) noexcept;  // "weights", "master_low", ...
// Bytes of one element; 0 where tiles of this format have no such section.
std::size_t element_bytes(TileFormat format, Section section) noexcept;
// Parameters begin at multiples of this: 256 bytes of weights, which GEMMs and the compiler want,
// and whole blocks of 8-bit moments.
std::int64_t alignment_elements(TileFormat format) noexcept;
// 4 KiB of the narrowest section of elements: where a section may be cut without sharing a page.
std::int64_t page_elements(TileFormat format) noexcept;

struct ParameterShape {
  std::int64_t elements = 0;
  bool trainable = true;
};

class TileLayout {
 public:
  // Trainable parameters come first, in the order given; frozen ones follow in the weights section
  // only. Empty parameters and empty tiles are legal.
  TileLayout(TileFormat format, std::vector<ParameterShape> parameters, Shard shard = {});

  TileFormat format() const noexcept { return format_; }
  Shard shard() const noexcept { return shard_; }
  int parameters() const noexcept { return static_cast<int>(parameters_.size()); }
  const ParameterShape& parameter(int index) const;  // CallerError for an index out of range
  // The same in every section that the parameter is in; exponents count blocks.
  std::int64_t element_offset(int index) const;
  ElementRange range(int index) const;

  std::int64_t trainable_elements() const noexcept { return trainable_elements_; }  // with gaps
  std::int64_t weight_elements() const noexcept { return weight_elements_; }        // with frozen ones
  std::size_t bytes() const noexcept { return bytes_; }  // of the tile, without an accumulator

  struct Place {
    std::size_t offset = 0;  // in the tile; of the accumulator in its own memory
    std::size_t bytes = 0;
  };
  Place section(Section section) const noexcept;
  std::int64_t section_elements(Section section) const noexcept;

  // The part of the trainable elements that this shard updates.
  ElementRange owned() const noexcept;

 private:
  TileFormat format_;
  Shard shard_;
  std::vector<ParameterShape> parameters_;
  std::vector<std::int64_t> offsets_;
  std::int64_t trainable_elements_ = 0;
  std::int64_t weight_elements_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace megatrain
