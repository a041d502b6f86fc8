// The update over spans of host memory, whatever its rule: one fused pass. A rule is a kernel file of its own
// with an entry in update_kernels.h; tiles, queue and bindings know it by its name only. Never touches the
// device.
#pragma once

#include <cstdint>

#include "base/cpu.h"
#include "base/precision.h"

namespace megatrain {

// Second moments too small for a normal float count as 0, and below this the first moments of such elements
// would be divided by next to nothing. With it these elements' steps, which are below 4 % of lr with beta2 up
// to 0.999, are too large by as much at most.
inline constexpr double kLeastEps = 1e-16;

// Hyperparameters of one parameter in one step. `step` counts from 1; with `seed` and an element's
// index it keys the stochastic rounding, where there is any. A rule reads what it has use for.
struct UpdateStep {
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
// Bytes moved a parameter: weights 10 split, 6 bf16, 12 fp32, their gradient included; each moment 8
// fp32, 4 bf16, 2 + 2 / kMomentBlock int8.
struct UpdateSpan {
  WeightFormat weight_format = WeightFormat::kBf16Split;
  MomentFormat moment_format = MomentFormat::kFp32;
  void* weight = nullptr;                        // float or bf16, read and written
  std::int16_t* low = nullptr;                   // kBf16Split: read and written
  const void* gradient = nullptr;                // float with kFp32, else bf16; read
  void* exp_avg = nullptr;                       // float, bf16 or 8-bit codes; read and written
  void* exp_avg_sq = nullptr;                    // the same, of rules with two moments
  std::uint8_t* exp_avg_exponents = nullptr;     // kInt8: one a block, read and written
  std::uint8_t* exp_avg_sq_exponents = nullptr;  // the same
  std::int64_t count = 0;
  // Index of the first element in the logical parameter. With kInt8 a multiple of kMomentBlock, and
  // the span then ends at such a multiple or with the parameter.
  std::int64_t first = 0;
  Rule rule = Rule::kAdamW;
};

// Returns false if a weight became non-finite (it is written all the same).
[[nodiscard]] bool apply_update(Isa isa, const UpdateStep& step, const UpdateSpan& span);

// Bytes that one update of `count` elements reads and writes.
std::int64_t update_bytes(WeightFormat weights, MomentFormat moments, std::int64_t count,
                          Rule rule = Rule::kAdamW);

}  // namespace megatrain
