// Moments in fp32, as checkpoints hold them. Reading is exact; writing rounds to the nearest value that
// the format has, so that what was read is written back unchanged.
#pragma once

#include <cstdint>

#include "base/precision.h"

namespace megatrain {

enum class Moment { kExpAvg, kExpAvgSq };

// Begins at a block of 8-bit moments. `exponents` is used with kInt8 only.
struct MomentSpan {
  Moment moment;
  MomentFormat format;
  void* values;
  std::uint8_t* exponents;
  std::int64_t count;
};

void read_moments(const MomentSpan& span, float* values);
void write_moments(const MomentSpan& span, const float* values);

}  // namespace megatrain
