#include "optim/update.h"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#include "base/error.h"
#include "optim/update_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megatrain {
namespace {

// Rounding to nearest and no flushing by the CPU for the time of one call. A thread inherits its
// modes from whoever started it, and torch.set_flush_denormal changes them.
class DefaultFloatModes {
 public:
  DefaultFloatModes() : saved_(get()) { set(kDefault); }
  ~DefaultFloatModes() { set(saved_); }
  DefaultFloatModes(const DefaultFloatModes&) = delete;
  DefaultFloatModes& operator=(const DefaultFloatModes&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr std::uint64_t kDefault = 0x1f80;  // all exceptions masked
  static std::uint64_t get() { return _mm_getcsr(); }
  static void set(std::uint64_t modes) { _mm_setcsr(static_cast<unsigned>(modes)); }
#elif defined(__aarch64__)
  static constexpr std::uint64_t kDefault = 0;
  static std::uint64_t get() {
    std::uint64_t modes;
    asm volatile("mrs %0, fpcr" : "=r"(modes));
    return modes;
  }
  static void set(std::uint64_t modes) { asm volatile("msr fpcr, %0" ::"r"(modes)); }
#else
  static constexpr std::uint64_t kDefault = 0;
  static std::uint64_t get() { return 0; }
  static void set(std::uint64_t) {}
#endif
  std::uint64_t saved_;
};

void require_supported(Isa isa) {
  const std::vector<Isa> supported = supported_isas();
  if (std::find(supported.begin(), supported.end(), isa) == supported.end()) {
    throw CallerError(std::string("this CPU or build lacks the instruction set \"") + isa_name(isa) + "\"");
  }
}

RuleKernel* kernel_of(Rule rule) { return rule == Rule::kLion ? update_by_lion : update_by_adamw; }

// The finaliser of SplitMix64: every bit of the argument changes half of the result's.
std::uint64_t mixed(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::string scientific(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

template <class T>
T* advanced(T* pointer, std::int64_t count) {
  return pointer == nullptr ? pointer : pointer + count;
}
template <class Byte, class T>
T* advanced_bytes(T* pointer, std::int64_t bytes) {
  return advanced(static_cast<Byte*>(pointer), bytes);
}

}  // namespace

RoundingKey rounding_key(const UpdateStep& step, std::uint32_t upper_index) {
  constexpr std::uint64_t kOdd = 0x9e3779b97f4a7c15u;  // 2^64 over the golden ratio
  const std::uint64_t of_step = mixed(mixed(step.seed + kOdd) + static_cast<std::uint64_t>(step.step) * kOdd);
  const std::uint64_t key = mixed(of_step + (upper_index + std::uint64_t{1}) * kOdd);
  return {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
}

void check_update(const UpdateStep& step, const UpdateSpan& span) {
  if (span.count < 0) {
    throw CallerError("a span of " + std::to_string(span.count) + " elements; at least 0 is needed");
  }
  if (span.first < 0 || (span.moment_format == MomentFormat::kInt8 && span.first % kMomentBlock != 0)) {
    throw CallerError("a span from element " + std::to_string(span.first) +
                      "; 8-bit moments begin at multiples of " + std::to_string(kMomentBlock));
  }
  if (step.step < 1) throw CallerError("step " + std::to_string(step.step) + "; steps count from 1");
  if (!(step.beta1 >= 0 && step.beta1 < 1)) {
    throw CallerError("beta1 is " + std::to_string(step.beta1) + "; it must be in [0, 1)");
  }
  if (!(step.beta2 >= 0 && step.beta2 < 1)) {
    throw CallerError("beta2 is " + std::to_string(step.beta2) + "; it must be in [0, 1)");
  }
  if (span.rule == Rule::kAdamW && !(step.eps >= kLeastEps)) {
    throw CallerError("eps is " + scientific(step.eps) + "; it must be at least " + scientific(kLeastEps));
  }
}

UpdateSpan rest_of(const UpdateSpan& span, std::int64_t skipped) {
  const std::int64_t weight_bytes = span.weight_format == WeightFormat::kFp32 ? 4 : 2;
  const std::int64_t moment_bytes = span.moment_format == MomentFormat::kFp32   ? 4
                                    : span.moment_format == MomentFormat::kBf16 ? 2
                                                                                : 1;
  UpdateSpan rest = span;
  rest.weight = advanced_bytes<std::byte>(span.weight, skipped * weight_bytes);
  rest.low = advanced(span.low, skipped);
  rest.gradient = advanced_bytes<const std::byte>(span.gradient, skipped * weight_bytes);
  rest.exp_avg = advanced_bytes<std::byte>(span.exp_avg, skipped * moment_bytes);
  rest.exp_avg_sq = advanced_bytes<std::byte>(span.exp_avg_sq, skipped * moment_bytes);
  rest.exp_avg_exponents = advanced(span.exp_avg_exponents, skipped / kMomentBlock);
  rest.exp_avg_sq_exponents = advanced(span.exp_avg_sq_exponents, skipped / kMomentBlock);
  rest.count -= skipped;
  rest.first += skipped;
  return rest;
}

bool apply_update(Isa isa, const UpdateStep& step, const UpdateSpan& span) {
  check_update(step, span);
  require_supported(isa);
  const DefaultFloatModes modes;
  RuleKernel* const kernel = kernel_of(span.rule);
  bool finite = true;
  UpdateSpan rest = span;
  while (rest.count > 0) {
    UpdateSpan part = rest;
    const std::int64_t to_next_key = (std::int64_t{1} << 32) - (rest.first & 0xffffffff);
    part.count = std::min(rest.count, to_next_key);
    finite &= kernel(isa, step, rounding_key(step, static_cast<std::uint32_t>(part.first >> 32)), part);
    rest = rest_of(rest, part.count);
  }
  return finite;
}

std::int64_t update_bytes(WeightFormat weights, MomentFormat moments, std::int64_t count, Rule rule) {
  const std::int64_t of_weights = weights == WeightFormat::kFp32   ? 12
                                  : weights == WeightFormat::kBf16 ? 6
                                                                   : 10;
  const std::int64_t kept = moments_of(rule);
  switch (moments) {
    case MomentFormat::kBf16:
      return count * (of_weights + 4 * kept);
    case MomentFormat::kInt8:
      return count * (of_weights + 2 * kept) + (count + kMomentBlock - 1) / kMomentBlock * 2 * kept;
    case MomentFormat::kFp32:
      break;
  }
  return count * (of_weights + 8 * kept);
}

}  // namespace megatrain
