#include "optim/adamw.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"
#include "optim/adamw_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megatrain {
namespace {

// Rounding to nearest and no flushing by the CPU for the time of one call. A thread inherits its
// modes from whoever started it, and torch.set_flush_denormal changes them.
class DefaultFloatModes {
 public:
#if defined(__x86_64__)
  DefaultFloatModes() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
  ~DefaultFloatModes() { _mm_setcsr(saved_); }

 private:
  static constexpr unsigned kDefault = 0x1f80;  // all exceptions masked
  unsigned saved_;

 public:
#else
  DefaultFloatModes() = default;
#endif
  DefaultFloatModes(const DefaultFloatModes&) = delete;
  DefaultFloatModes& operator=(const DefaultFloatModes&) = delete;
};

[[noreturn]] void throw_unsupported(Isa isa) {
  throw CallerError(std::string("this CPU or build lacks the instruction set \"") + isa_name(isa) + "\"");
}

void check(Isa isa, const AdamWStep& step, std::int64_t count) {
  if (count < 0) throw CallerError("a span of " + std::to_string(count) + " elements; at least 0 is needed");
  if (step.step < 1) throw CallerError("step " + std::to_string(step.step) + "; steps count from 1");
  if (!(step.beta1 >= 0 && step.beta1 < 1)) {
    throw CallerError("beta1 is " + std::to_string(step.beta1) + "; it must be in [0, 1)");
  }
  if (!(step.beta2 >= 0 && step.beta2 < 1)) {
    throw CallerError("beta2 is " + std::to_string(step.beta2) + "; it must be in [0, 1)");
  }
  const std::vector<Isa> supported = supported_isas();
  if (std::find(supported.begin(), supported.end(), isa) == supported.end()) throw_unsupported(isa);
}

}  // namespace

AdamWScalars adamw_scalars(const AdamWStep& step) {
  const double bias_correction1 = 1 - std::pow(step.beta1, static_cast<double>(step.step));
  const double bias_correction2 = 1 - std::pow(step.beta2, static_cast<double>(step.step));
  // torch decides by the weight of the lerp, 1 - beta1 < 0.5, in fp32.
  const bool from_gradient = !(static_cast<float>(1 - step.beta1) < 0.5f);
  return AdamWScalars{
      .gradient_scale = step.gradient_scale,
      .lerp_weight = static_cast<float>(from_gradient ? -step.beta1 : 1 - step.beta1),
      .lerp_from_gradient = from_gradient,
      .beta2 = static_cast<float>(step.beta2),
      .one_minus_beta2 = static_cast<float>(1 - step.beta2),
      .decay = static_cast<float>(1 - step.lr * step.weight_decay),
      .negative_step_size = static_cast<float>(-(step.lr / bias_correction1)),
      .sqrt_bias_correction2 = static_cast<float>(std::sqrt(bias_correction2)),
      .eps = static_cast<float>(step.eps),
  };
}

bool adamw(Isa isa, const AdamWStep& step, const AdamWSplitSpan& span) {
  check(isa, step, span.count);
  const DefaultFloatModes modes;
  const AdamWScalars scalars = adamw_scalars(step);
  switch (isa) {
    case Isa::kScalar:
      return adamw_split_scalar(scalars, span);
#if defined(__x86_64__)
    case Isa::kAvx2:
      return adamw_split_avx2(scalars, span);
    case Isa::kAvx512:
      return adamw_split_avx512(scalars, span);
#endif
    default:
      throw_unsupported(isa);
  }
}

bool adamw(Isa isa, const AdamWStep& step, const AdamWFloatSpan& span) {
  check(isa, step, span.count);
  const DefaultFloatModes modes;
  const AdamWScalars scalars = adamw_scalars(step);
  switch (isa) {
    case Isa::kScalar:
      return adamw_float_scalar(scalars, span);
#if defined(__x86_64__)
    case Isa::kAvx2:
      return adamw_float_avx2(scalars, span);
    case Isa::kAvx512:
      return adamw_float_avx512(scalars, span);
#endif
    default:
      throw_unsupported(isa);
  }
}

}  // namespace megatrain
