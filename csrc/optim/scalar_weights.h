// Weights and gradients of a span, element by element, in each format: for the scalar kernels of every rule.
// Not for files compiled with wide flags.
#pragma once

#include "optim/adamw_math.h"

namespace megatrain {

struct SplitWeights {
  MEGATRAIN_INLINE float load(const UpdateSpan& span, std::int64_t i) {
    return float_of((std::uint32_t{static_cast<std::uint16_t*>(span.weight)[i]} << 16) +
                    static_cast<std::uint32_t>(std::int32_t{span.low[i]}));
  }
  MEGATRAIN_INLINE float gradient(const UpdateSpan& span, std::int64_t i) {
    return from_bf16(static_cast<const std::uint16_t*>(span.gradient)[i]);
  }
  MEGATRAIN_INLINE bool store(const RoundingKey&, const UpdateSpan& span, std::int64_t i, float w) {
    const std::uint32_t bits = bits_of(w);
    static_cast<std::uint16_t*>(span.weight)[i] = static_cast<std::uint16_t>((bits + 0x8000) >> 16);
    span.low[i] = static_cast<std::int16_t>(bits);  // bits - (high << 16), of which 16 bits are left
    return (bits & 0x7fffffff) < kInfiniteUpperHalf;
  }
};

struct Bf16Weights {
  MEGATRAIN_INLINE float load(const UpdateSpan& span, std::int64_t i) {
    return from_bf16(static_cast<std::uint16_t*>(span.weight)[i]);
  }
  MEGATRAIN_INLINE float gradient(const UpdateSpan& span, std::int64_t i) {
    return SplitWeights::gradient(span, i);
  }
  MEGATRAIN_INLINE bool store(const RoundingKey& key, const UpdateSpan& span, std::int64_t i, float w) {
    const auto index = static_cast<std::uint32_t>(span.first + i);
    const std::uint16_t rounded = to_bf16(w, for_weight(random_word(index, key)));
    static_cast<std::uint16_t*>(span.weight)[i] = rounded;
    return is_finite(std::uint32_t{rounded} << 16);
  }
};

struct FloatWeights {
  MEGATRAIN_INLINE float load(const UpdateSpan& span, std::int64_t i) {
    return static_cast<float*>(span.weight)[i];
  }
  MEGATRAIN_INLINE float gradient(const UpdateSpan& span, std::int64_t i) {
    return static_cast<const float*>(span.gradient)[i];
  }
  MEGATRAIN_INLINE bool store(const RoundingKey&, const UpdateSpan& span, std::int64_t i, float w) {
    static_cast<float*>(span.weight)[i] = w;
    return is_finite(bits_of(w));
  }
};

// kernel.template operator()<Weights>() for the format's Weights.
template <class Kernel>
bool with_weights_of(WeightFormat format, const Kernel& kernel) {
  switch (format) {
    case WeightFormat::kBf16:
      return kernel.template operator()<Bf16Weights>();
    case WeightFormat::kFp32:
      return kernel.template operator()<FloatWeights>();
    case WeightFormat::kBf16Split:
      break;
  }
  return kernel.template operator()<SplitWeights>();
}

}  // namespace megatrain
