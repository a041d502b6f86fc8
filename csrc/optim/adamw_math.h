// The arithmetic of one element, once, for the scalar variant, for conversions and for the CUDA
// kernel. Not for files compiled with wide flags.
//
// Stochastic rounding. A value between two representable neighbours goes to the upper one with the
// probability of its distance from the lower one: random bits are added below the last bit that is
// kept, and the rest is cut off. Values that are representable stay, so zero gradients move nothing.
// Expectations are right to 2^-16 of the distance between neighbours.
//
// 8-bit moments. A block's exponent byte E is the fp32 exponent of its largest value (one more
// where that value lies above the largest code). A code is a small float relative to U = 2^(E - 127),
// 4 bits of exponent and of mantissa 3 (first moments, with a sign) or 4 (second moments); code 0 is
// exactly 0, the smallest ones above are 9/8 and 17/16 of 2^-15 U. A stored first moment is within 1/8
// of the value, a second one within 1/16. Below the smallest code first moments become 0 (of an
// element whose gradients are so small beside its neighbours' the next sentence keeps the steps
// below about lr / 100). A second moment above 0 never does, since m / (sqrt(0) + eps) would throw the
// weight away: it becomes the smallest code.
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
// Of a block: its smallest code is then still a normal number.
constexpr std::uint32_t kSmallestBlockExponent = 16;

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
// finaliser), with a word of the key before each.
MEGATRAIN_INLINE std::uint32_t random_word(std::uint32_t index, const RoundingKey& key) {
  std::uint32_t x = index ^ key.first;
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x ^= key.second;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// The bits of an element's word that each of its values takes. They overlap, but no bit that decides
// much for one value does so for another.
MEGATRAIN_INLINE std::uint32_t for_weight(std::uint32_t word) { return (word >> 8) & 0xffff; }
MEGATRAIN_INLINE std::uint32_t for_bf16_exp_avg(std::uint32_t word) { return word >> 16; }
MEGATRAIN_INLINE std::uint32_t for_bf16_exp_avg_sq(std::uint32_t word) { return word & 0xffff; }
MEGATRAIN_INLINE std::uint32_t for_exp_avg_code(std::uint32_t word) { return word >> 12; }
MEGATRAIN_INLINE std::uint32_t for_exp_avg_sq_code(std::uint32_t word) { return word & 0x7ffff; }

// `random` has 16 bits. NaN takes none: a carry could turn it into 0.
MEGATRAIN_INLINE std::uint16_t to_bf16(float x, std::uint32_t random) {
  return static_cast<std::uint16_t>((bits_of(x) + (x == x ? random : 0)) >> 16);
}
MEGATRAIN_INLINE float from_bf16(std::uint16_t x) { return float_of(std::uint32_t{x} << 16); }

// Codes of kMantissa bits of mantissa under 4 of exponent, without a sign. The difference of bits is
// taken as a signed number: magnitudes below the smallest code give negative ones.
template <int kMantissa>
struct SmallFloat {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr std::uint32_t kLargest = (16u << kMantissa) - 1;
  static constexpr std::uint32_t kNearest = 1u << (kShift - 1);  // in place of random bits

  // `largest` is the largest magnitude of the block, as bits.
  MEGATRAIN_INLINE std::uint32_t block_exponent(std::uint32_t largest) {
    if (!is_finite(largest)) return 255;
    const std::uint32_t exponent = (largest + (1u << kShift) - 1) >> 23;
    return exponent > kSmallestBlockExponent ? exponent : kSmallestBlockExponent;
  }
  // `smallest` is a code. `random` has kShift bits.
  MEGATRAIN_INLINE std::uint32_t encode(std::uint32_t magnitude, std::uint32_t exponent,
                                        std::uint32_t smallest, std::uint32_t random) {
    const auto above = static_cast<std::int32_t>(magnitude - ((exponent - 15) << 23));
    const auto least = static_cast<std::int32_t>(smallest << kShift);
    const std::uint32_t code = (static_cast<std::uint32_t>(above > least ? above : least) + random) >> kShift;
    return code < kLargest ? code : kLargest;
  }
  MEGATRAIN_INLINE float decode(std::uint32_t code, std::uint32_t exponent) {
    const std::uint32_t used = exponent > kSmallestBlockExponent ? exponent : kSmallestBlockExponent;
    return code == 0 ? 0.0f : float_of(((used - 15) << 23) + (code << kShift));
  }
};

using FirstMomentCode = SmallFloat<3>;
using SecondMomentCode = SmallFloat<4>;

// Codes 0 and 0x80 both are 0.
MEGATRAIN_INLINE std::uint8_t encode_exp_avg(float x, std::uint32_t exponent, std::uint32_t random) {
  const std::uint32_t bits = bits_of(x);
  const std::uint32_t code = FirstMomentCode::encode(bits & kMagnitudeMask, exponent, 0, random);
  return static_cast<std::uint8_t>(code | (bits >> 31 << 7));
}
MEGATRAIN_INLINE float decode_exp_avg(std::uint8_t code, std::uint32_t exponent) {
  const float magnitude = FirstMomentCode::decode(code & 0x7fu, exponent);
  return code > 0x80 ? -magnitude : magnitude;
}
MEGATRAIN_INLINE std::uint8_t encode_exp_avg_sq(float x, std::uint32_t exponent, std::uint32_t random) {
  const std::uint32_t bits = bits_of(x);
  return static_cast<std::uint8_t>(bits == 0 ? 0 : SecondMomentCode::encode(bits, exponent, 1, random));
}
MEGATRAIN_INLINE float decode_exp_avg_sq(std::uint8_t code, std::uint32_t exponent) {
  return SecondMomentCode::decode(code, exponent);
}
// What a block's exponent is taken from. NaN with a sign count as 0 among second moments.
MEGATRAIN_INLINE std::uint32_t exp_avg_size(float x) { return bits_of(x) & kMagnitudeMask; }
MEGATRAIN_INLINE std::uint32_t exp_avg_sq_size(float x) { return bits_of(x) >> 31 ? 0 : bits_of(x); }

}  // namespace megatrain
