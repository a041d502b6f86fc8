#include "optim/adamw.h"

#include <cmath>
#include <string>

#include "base/error.h"
#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

bool run_variant(Isa isa, const AdamWScalars& scalars, const UpdateSpan& span) {
  switch (isa) {
    case Isa::kScalar:
      return adamw_scalar(scalars, span);
#if defined(__x86_64__)
    case Isa::kAvx2:
      return adamw_avx2(scalars, span);
    case Isa::kAvx512:
      return adamw_avx512(scalars, span);
#elif defined(__aarch64__)
    case Isa::kNeon:
      return adamw_neon(scalars, span);
#endif
    default:
      throw CallerError(std::string("AdamW has no variant for the instruction set \"") + isa_name(isa) +
                        "\"");
  }
}

}  // namespace

AdamWScalars adamw_scalars(const UpdateStep& step) {
  const double bias_correction1 = 1 - std::pow(step.beta1, static_cast<double>(step.step));
  const double bias_correction2 = 1 - std::pow(step.beta2, static_cast<double>(step.step));
  return AdamWScalars{
      .gradient_scale = step.gradient_scale,
      .beta1 = static_cast<float>(step.beta1),
      .one_minus_beta1 = static_cast<float>(1 - step.beta1),
      .beta2 = static_cast<float>(step.beta2),
      .one_minus_beta2 = static_cast<float>(1 - step.beta2),
      .decay = static_cast<float>(1 - step.lr * step.weight_decay),
      .negative_step_size = static_cast<float>(-(step.lr / bias_correction1)),
      .inverse_sqrt_bias_correction2 = static_cast<float>(1 / std::sqrt(bias_correction2)),
      .eps = static_cast<float>(step.eps),
      .key = rounding_key(step, 0),
  };
}

AdamWSplitSpan::operator UpdateSpan() const {
  return {.weight_format = WeightFormat::kBf16Split,
          .weight = high,
          .low = low,
          .gradient = gradient,
          .exp_avg = exp_avg,
          .exp_avg_sq = exp_avg_sq,
          .count = count};
}

AdamWFloatSpan::operator UpdateSpan() const {
  return {.weight_format = WeightFormat::kFp32,
          .weight = weight,
          .gradient = gradient,
          .exp_avg = exp_avg,
          .exp_avg_sq = exp_avg_sq,
          .count = count};
}

bool update_by_adamw(Isa isa, const UpdateStep& step, const RoundingKey& key, const UpdateSpan& span) {
  AdamWScalars scalars = adamw_scalars(step);
  scalars.key = key;
  return run_variant(isa, scalars, span);
}

}  // namespace megatrain
