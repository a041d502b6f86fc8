// The variants behind adamw(), one file each, and the numbers they share. Called only by adamw.cpp,
// which has checked that the CPU has the instructions and set the floating-point modes.
//
// The arithmetic, in fp32 with every operation rounded once, in the order of torch.optim.AdamW
// (lerp_, mul_ + addcmul_, sqrt / add, addcdiv_):
//
//   g = flush(gradient * gradient_scale)
//   m = flush(fma(lerp_weight, g - m, lerp_from_gradient ? g : m))
//   v = flush(fma(one_minus_beta2 * g, g, beta2 * v))
//   d = sqrt(v) / sqrt_bias_correction2 + eps
//   w = w * decay + (negative_step_size * m) / d
//
// flush(x) is +0 where |x| < 2^-126, else x, NaN included: denormal gradients count as zero and
// moments never become denormal (slow, and different from one machine to the next). It looks at
// the exponent bits; no mode register is relied on.
//
// The weight is computed from m and v as they are here, before they are stored in fewer bits; how
// that is done is in adamw_math.h.
#pragma once

#include "optim/adamw.h"

namespace megatrain {

// Of the words that stochastic rounding draws, see random_word in adamw_math.h.
struct RoundingKey {
  std::uint32_t first, second;
};

struct AdamWScalars {
  float gradient_scale;
  float lerp_weight;        // 1 - beta1, or -beta1 where the lerp starts from the gradient
  bool lerp_from_gradient;  // as torch does for beta1 <= 0.5: exact then for beta1 = 0
  float beta2;
  float one_minus_beta2;
  float decay;               // 1 - lr * weight_decay
  float negative_step_size;  // -lr / (1 - beta1^step)
  float sqrt_bias_correction2;
  float eps;
  RoundingKey key;  // for elements whose index has the same upper 32 bits
};

// Computed in double and rounded once; the only place that does so. The key is that of index 0.
AdamWScalars adamw_scalars(const AdamWStep& step);
RoundingKey rounding_key(const AdamWStep& step, std::uint32_t upper_index);

// CallerError for settings and spans that mean nothing.
void check_adamw(const AdamWStep& step, const AdamWSpan& span);
// The span from element `skipped` on.
AdamWSpan rest_of(const AdamWSpan& span, std::int64_t skipped);

// Indices of the span do not cross a multiple of 2^32. False if a weight became non-finite.
bool adamw_scalar(const AdamWScalars& scalars, const AdamWSpan& span);
bool adamw_avx2(const AdamWScalars& scalars, const AdamWSpan& span);
bool adamw_avx512(const AdamWScalars& scalars, const AdamWSpan& span);
bool adamw_neon(const AdamWScalars& scalars, const AdamWSpan& span);

}  // namespace megatrain
