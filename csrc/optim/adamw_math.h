// The arithmetic of one element, once, for the scalar variant, for conversions and for the CUDA
// kernel. Not for files compiled with wide flags.
//
// Stochastic rounding. A value between two representable neighbours goes to the upper one with the
// probability of its distance from the lower one: 16 random bits are added below the last bit that
// is kept, and the rest is cut off. Values that are representable stay, so zero gradients move
// nothing. Expectations are right to 2^-16 of the distance between neighbours.
//
// 8-bit moments. A block's exponent byte E is the fp32 exponent of its largest value (one more
// where that value lies above the largest code). A code is a small float relative to it, with
// gradual underflow:
//   first moment   sign, 4 bits of exponent, 3 of mantissa: 2^-17 to 1.875 times 2^(E - 127)
//   second moment        4 bits of exponent, 4 of mantissa: 2^-18 to 1.9375 times 2^(E - 127)
// Code 0 is exactly 0. A stored value is within 1/8 (first) or 1/16 (second) of the value, or one
// step of 2^-17 or 2^-18 of the block's power of two where it is smaller than 2^-14 of that. A
// second moment above 0 never becomes 0, since m / (sqrt(0) + eps) would throw the weight away; it
// becomes the smallest code, which is the only bias.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "optim/adamw_kernels.h"

#if defined(__CUDACC__)
#define MEGATRAIN_INLINE static __host__ __device__ __forceinline__
#else
#define MEGATRAIN_INLINE static inline
#endif

namespace megatrain {

constexpr std::uint32_t kExponentMask = 0x7f800000;
constexpr std::uint32_t kMagnitudeMask = 0x7fffffff;
// Of a block: its smallest code times 2^-126 is then still a normal number.
constexpr std::uint32_t kSmallestBlockExponent = 19;

MEGATRAIN_INLINE std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
MEGATRAIN_INLINE float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
MEGATRAIN_INLINE bool is_finite(std::uint32_t bits) { return (bits & kExponentMask) != kExponentMask; }
MEGATRAIN_INLINE float flush(float x) { return (bits_of(x) & kExponentMask) == 0 ? 0.0f : x; }

// Moments go in and come out; the result is the new weight.
MEGATRAIN_INLINE float updated_weight(const AdamWScalars& s, float w, float gradient, float& exp_avg,
                                      float& exp_avg_sq) {
  const float g = flush(gradient * s.gradient_scale);
  const float m = flush(::fmaf(s.lerp_weight, g - exp_avg, s.lerp_from_gradient ? g : exp_avg));
  const float v = flush(::fmaf(s.one_minus_beta2 * g, g, s.beta2 * exp_avg_sq));
  const float d = ::sqrtf(v) / s.sqrt_bias_correction2 + s.eps;
  exp_avg = m;
  exp_avg_sq = v;
  return w * s.decay + (s.negative_step_size * m) / d;
}

// 32 random bits of an element: two rounds of multiply and xor-shift (constants of MurmurHash3's
// finaliser) with a word of the key before each. Weights use the low half of theirs; of the other
// word the first moment uses the high half and the second moment the low one.
MEGATRAIN_INLINE std::uint32_t random_word(std::uint32_t index, const std::uint32_t (&key)[2]) {
  std::uint32_t x = index ^ key[0];
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x ^= key[1];
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// `random` has 16 bits. Infinities and NaN stay what they are: a carry would turn them into 0.
MEGATRAIN_INLINE std::uint16_t to_bf16(float x, std::uint32_t random) {
  const std::uint32_t bits = bits_of(x);
  return static_cast<std::uint16_t>((bits + (is_finite(bits) ? random : 0)) >> 16);
}
MEGATRAIN_INLINE float from_bf16(std::uint16_t x) { return float_of(std::uint32_t{x} << 16); }

// Codes of kMantissa bits of mantissa under 4 of exponent, without a sign.
template <int kMantissa>
struct SmallFloat {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr std::uint32_t kLargest = (16u << kMantissa) - 1;

  // `largest` is the largest magnitude of the block, as bits.
  MEGATRAIN_INLINE std::uint32_t block_exponent(std::uint32_t largest) {
    if (!is_finite(largest)) return 255;
    const std::uint32_t exponent = (largest + (1u << kShift) - 1) >> 23;
    return exponent > kSmallestBlockExponent ? exponent : kSmallestBlockExponent;
  }
  MEGATRAIN_INLINE std::uint32_t encode(std::uint32_t magnitude, std::uint32_t exponent,
                                        std::uint32_t random) {
    const std::uint32_t smallest_normal = (exponent - 14) << 23;
    std::uint32_t base = (exponent - 15) << 23;
    if (magnitude < smallest_normal) {  // a fixed step, which adding a power of two makes
      magnitude = bits_of(float_of(magnitude) + float_of(smallest_normal));
      base = smallest_normal;
    }
    const std::uint32_t dither = (random << (kShift - 16)) | (1u << (kShift - 17));
    const std::uint32_t code = (magnitude - base + dither) >> kShift;
    return code < kLargest ? code : kLargest;
  }
  MEGATRAIN_INLINE float decode(std::uint32_t code, std::uint32_t exponent) {
    exponent = exponent > kSmallestBlockExponent ? exponent : kSmallestBlockExponent;
    const std::uint32_t smallest_normal = (exponent - 14) << 23;
    if (code >> kMantissa == 0) {
      return float_of(smallest_normal + (code << kShift)) - float_of(smallest_normal);
    }
    return float_of(((exponent - 15) << 23) + (code << kShift));
  }
};

using FirstMomentCode = SmallFloat<3>;
using SecondMomentCode = SmallFloat<4>;

MEGATRAIN_INLINE std::uint8_t encode_exp_avg(float x, std::uint32_t exponent, std::uint32_t random) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t code = FirstMomentCode::encode(bits & kMagnitudeMask, exponent, random);
  return static_cast<std::uint8_t>(code == 0 ? 0 : code | (bits >> 31 << 7));  // one zero, the positive
}
MEGATRAIN_INLINE float decode_exp_avg(std::uint8_t code, std::uint32_t exponent) {
  const float magnitude = FirstMomentCode::decode(code & 0x7fu, exponent);
  return float_of(bits_of(magnitude) | (std::uint32_t{code} >> 7 << 31));
}
MEGATRAIN_INLINE std::uint8_t encode_exp_avg_sq(float x, std::uint32_t exponent, std::uint32_t random) {
  const std::uint32_t magnitude = bits_of(x) & kMagnitudeMask;
  const std::uint32_t code = SecondMomentCode::encode(magnitude, exponent, random);
  return static_cast<std::uint8_t>(code == 0 && magnitude != 0 ? 1 : code);
}
MEGATRAIN_INLINE float decode_exp_avg_sq(std::uint8_t code, std::uint32_t exponent) {
  return SecondMomentCode::decode(code, exponent);
}

}  // namespace megatrain
