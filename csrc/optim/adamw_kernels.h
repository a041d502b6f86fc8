// The variants of AdamW, one file each, and the numbers they share. Called only by adamw.cpp.
//
// The arithmetic, in fp32 with every operation rounded once:
//
//   g = gradient * gradient_scale
//   m = flush(fma(beta1, m, one_minus_beta1 * g))
//   v = flush(fma(one_minus_beta2 * g, g, beta2 * v))
//   d = fma(sqrt(v), inverse_sqrt_bias_correction2, eps)
//   w = fma(w, decay, (negative_step_size * m) / d)
//
// One division: with torch's two, arithmetic and not memory would bind in the modes with few bytes.
//
// flush(x) is +0 where |x| < 2^-126, else x, NaN included: moments never become denormal (slow, and
// different from one machine to the next). It looks at the exponent bits; no mode register is relied on.
//
// The weight is computed from m and v as they are here, before they are stored in fewer bits; how
// that is done is in adamw_math.h.
#pragma once

#include "optim/adamw.h"
#include "optim/update_kernels.h"

namespace megatrain {

struct AdamWScalars {
  float gradient_scale;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float decay;                          // 1 - lr * weight_decay
  float negative_step_size;             // -lr / (1 - beta1^step)
  float inverse_sqrt_bias_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  RoundingKey key;  // for elements whose index has the same upper 32 bits
};

// Computed in double and rounded once; the only place that does so. The key is that of index 0.
AdamWScalars adamw_scalars(const UpdateStep& step);

// Indices of the span do not cross a multiple of 2^32. False if a weight became non-finite.
bool adamw_scalar(const AdamWScalars& scalars, const UpdateSpan& span);
bool adamw_avx2(const AdamWScalars& scalars, const UpdateSpan& span);
bool adamw_avx512(const AdamWScalars& scalars, const UpdateSpan& span);
bool adamw_neon(const AdamWScalars& scalars, const UpdateSpan& span);

}  // namespace megatrain
