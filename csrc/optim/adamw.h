// AdamW over spans of host memory: one fused pass. Scalar is the specification; every other variant
// equals it bit for bit. Never touches the device.
#pragma once

#include <cstdint>

#include "base/cpu.h"

namespace megatrain {

// Hyperparameters of one parameter in one step. `step` counts from 1.
struct AdamWStep {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  std::int64_t step = 1;
  float gradient_scale = 1.0f;  // the clipping coefficient
};

// One span: all pointers move together, `count` elements.
struct AdamWSplitSpan {           // bf16 weights with the low half of an fp32 master: 26 bytes a parameter
  std::uint16_t* high;            // read and written
  std::int16_t* low;              // read and written
  const std::uint16_t* gradient;  // bf16, read
  float* exp_avg;                 // read and written
  float* exp_avg_sq;              // read and written
  std::int64_t count;
};
struct AdamWFloatSpan {  // plain fp32: 28 bytes a parameter
  float* weight;
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  std::int64_t count;
};

// Both return false if a weight became non-finite (it is written all the same).
[[nodiscard]] bool adamw(Isa isa, const AdamWStep& step, const AdamWSplitSpan& span);
[[nodiscard]] bool adamw(Isa isa, const AdamWStep& step, const AdamWFloatSpan& span);

// fp32 <-> (bf16 high half, int16 low half); bit-exact for every finite and infinite value.
// split returns false if a value is not finite.
[[nodiscard]] bool split_master(const float* master, std::uint16_t* high, std::int16_t* low,
                                std::int64_t count);
void join_master(const std::uint16_t* high, const std::int16_t* low, float* master, std::int64_t count);

}  // namespace megatrain
