// AdamW over spans of host memory: one fused pass. Scalar is the specification; every other variant
// equals it bit for bit. Never touches the device.
#pragma once

#include <cstdint>

#include "base/cpu.h"
#include "base/precision.h"

namespace megatrain {

// Hyperparameters of one parameter in one step. `step` counts from 1; with `seed` and an element's
// index it keys the stochastic rounding, where there is any.
struct AdamWStep {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  std::int64_t step = 1;
  float gradient_scale = 1.0f;  // the clipping coefficient
  std::uint64_t seed = 0;
};

// One span: all pointers move together, `count` elements.
//
// Bytes moved a parameter: weights 10 split, 6 bf16, 12 fp32, their gradient included; moments 16
// fp32, 8 bf16, 4 + 4 / kMomentBlock int8.
struct AdamWSpan {
  WeightFormat weight_format = WeightFormat::kBf16Split;
  MomentFormat moment_format = MomentFormat::kFp32;
  void* weight = nullptr;                        // float or bf16, read and written
  std::int16_t* low = nullptr;                   // kBf16Split: read and written
  const void* gradient = nullptr;                // float with kFp32, else bf16; read
  void* exp_avg = nullptr;                       // float, bf16 or 8-bit codes; read and written
  void* exp_avg_sq = nullptr;                    // the same
  std::uint8_t* exp_avg_exponents = nullptr;     // kInt8: one a block, read and written
  std::uint8_t* exp_avg_sq_exponents = nullptr;  // the same
  std::int64_t count = 0;
  // Index of the first element in the logical parameter. With kInt8 a multiple of kMomentBlock, and
  // the span then ends at such a multiple or with the parameter.
  std::int64_t first = 0;
};

// The two formats without rounding, typed.
struct AdamWSplitSpan {           // bf16 weights with the low half of an fp32 master: 26 bytes a parameter
  std::uint16_t* high;            // read and written
  std::int16_t* low;              // read and written
  const std::uint16_t* gradient;  // bf16, read
  float* exp_avg;                 // read and written
  float* exp_avg_sq;              // read and written
  std::int64_t count;
  operator AdamWSpan() const;
};
struct AdamWFloatSpan {  // plain fp32: 28 bytes a parameter
  float* weight;
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  std::int64_t count;
  operator AdamWSpan() const;
};

// Returns false if a weight became non-finite (it is written all the same).
[[nodiscard]] bool adamw(Isa isa, const AdamWStep& step, const AdamWSpan& span);

// Bytes that one update of `count` elements reads and writes.
std::int64_t adamw_bytes(WeightFormat weights, MomentFormat moments, std::int64_t count);

// fp32 <-> (bf16 high half, int16 low half); bit-exact for every finite and infinite value.
// split returns false if a value is not finite.
[[nodiscard]] bool split_master(const float* master, std::uint16_t* high, std::int16_t* low,
                                std::int64_t count);
void join_master(const std::uint16_t* high, const std::int16_t* low, float* master, std::int64_t count);

}  // namespace megatrain
