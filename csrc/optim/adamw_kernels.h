// The variants behind adamw(), one file each, and the scalars they share. Called only by adamw.cpp,
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
#pragma once

#include "optim/adamw.h"

namespace megatrain {

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
};

// Computed in double and rounded once; the only place that does so.
AdamWScalars adamw_scalars(const AdamWStep& step);

bool adamw_split_scalar(const AdamWScalars& scalars, const AdamWSplitSpan& span);
bool adamw_float_scalar(const AdamWScalars& scalars, const AdamWFloatSpan& span);
bool adamw_split_avx2(const AdamWScalars& scalars, const AdamWSplitSpan& span);
bool adamw_float_avx2(const AdamWScalars& scalars, const AdamWFloatSpan& span);
bool adamw_split_avx512(const AdamWScalars& scalars, const AdamWSplitSpan& span);
bool adamw_float_avx512(const AdamWScalars& scalars, const AdamWFloatSpan& span);

}  // namespace megatrain
