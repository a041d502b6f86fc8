// AdamW's spans by their types, for callers that know the format, and the two halves of a master. Scalar is
// the specification; every other variant equals it bit for bit. Never touches the device.
#pragma once

#include <cstdint>

#include "optim/update.h"

namespace megatrain {

// The two formats without rounding, typed.
struct AdamWSplitSpan {           // bf16 weights with the low half of an fp32 master: 26 bytes a parameter
  std::uint16_t* high;            // read and written
  std::int16_t* low;              // read and written
  const std::uint16_t* gradient;  // bf16, read
  float* exp_avg;                 // read and written
  float* exp_avg_sq;              // read and written
  std::int64_t count;
  operator UpdateSpan() const;
};
struct AdamWFloatSpan {  // plain fp32: 28 bytes a parameter
  float* weight;
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  std::int64_t count;
  operator UpdateSpan() const;
};

// fp32 <-> (bf16 high half, int16 low half); bit-exact for every finite and infinite value.
// split returns false if a value is not finite.
[[nodiscard]] bool split_master(const float* master, std::uint16_t* high, std::int16_t* low,
                                std::int64_t count);
void join_master(const std::uint16_t* high, const std::int16_t* low, float* master, std::int64_t count);

}  // namespace megatrain
