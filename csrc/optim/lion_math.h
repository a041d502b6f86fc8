// The arithmetic of one element of Lion (Chen et al., 2023, arXiv 2302.06675), once, for the host's kernel
// and the device's. In fp32 with every operation rounded once and nothing fused, so that vectors of any width
// write the same bits:
//
//   g = gradient * gradient_scale
//   c = beta1 * m + one_minus_beta1 * g
//   w = w * decay - lr * sign(c)          sign(0) = 0, sign(NaN) = NaN
//   m = flush(beta2 * m + one_minus_beta2 * g)
//
// The moment is stored as AdamW's first one is, in every format.
#pragma once

#include "optim/adamw_math.h"

namespace megatrain {

struct LionScalars {
  float gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr;
};

inline LionScalars lion_scalars(const UpdateStep& step) {
  return {
      .gradient_scale = step.gradient_scale,
      .beta1 = static_cast<float>(step.beta1),
      .one_minus_beta1 = static_cast<float>(1 - step.beta1),
      .beta2 = static_cast<float>(step.beta2),
      .one_minus_beta2 = static_cast<float>(1 - step.beta2),
      .decay = static_cast<float>(1 - step.lr * step.weight_decay),
      .lr = static_cast<float>(step.lr),
  };
}

// The moment goes in and comes out; the result is the new weight.
MEGATRAIN_INLINE float lion_weight(const LionScalars& s, float w, float gradient, float& m) {
  const float g = gradient * s.gradient_scale;
  const float c = s.beta1 * m + s.one_minus_beta1 * g;
  const float sign = c > 0 ? 1.0f : c < 0 ? -1.0f : c;
  m = flush(s.beta2 * m + s.one_minus_beta2 * g);
  return w * s.decay - s.lr * sign;
}

}  // namespace megatrain
