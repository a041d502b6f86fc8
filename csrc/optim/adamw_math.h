// The arithmetic of one element, once, for the scalar variant, for conversions and for the CUDA
// kernel. Not for files compiled with wide flags.
//
// Stochastic rounding. A value between two representable neighbours goes to the upper one with the
// probability of its distance from the lower one: random bits are added below the last bit that is
// kept, and the rest is cut off. Values that are representable stay, so zero gradients move nothing.
// Expectations are right to 2^-16 of the distance between neighbours.
//
// All variants give the same bits, but for those of a NaN beyond what makes it one. A weight that is NaN
// stops the engine.
//
// 8-bit moments are coded from their bf16 rounding, again stochastically, so that vectors do it with 16
// bits a lane. A block's exponent byte E is the exponent of its largest bf16 value (one more where
// that value lies above the largest code). A code is a small float relative to U = 2^(E - 127), 4 bits of
// exponent and of mantissa 3 (first moments, with a sign) or 4 (second moments); code 0 is exactly
// 0, the smallest ones above are 9/8 and 17/16 of 2^-15 U. A stored first moment is within 1/8 of the value,
// a second one within 1/16. Below 2^-15 U first moments become 0, and from there to the smallest code 0 or
// that code, the latter with a probability that rises from 0 to 1: there alone a code's expectation is not
// the value but below it, by up to 2^-15 U (of an element whose gradients
// are so small beside its neighbours' the next sentence keeps the steps below about lr / 100). A second
// moment above 0 never does, since m / (sqrt(0) + eps) would throw the weight away: it becomes the smallest
// code.
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
// Of a block: its smallest code is then still a normal number.
constexpr std::uint32_t kSmallestBlockExponent = 16;

MEGATRAIN_INLINE std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
MEGATRAIN_INLINE float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }
MEGATRAIN_INLINE bool is_finite(std::uint32_t bits) { return (bits & kExponentMask) != kExponentMask; }
MEGATRAIN_INLINE float flush(float x) {
#if defined(__CUDA_ARCH__)
  float flushed;  // one instruction; the sum of zeros is +0
  asm("add.ftz.f32 %0, %1, 0f00000000;" : "=f"(flushed) : "f"(x));
  return flushed;
#else
  return (bits_of(x) & kExponentMask) == 0 ? 0.0f : x;
#endif
}

// Moments go in and come out; the result is the new weight.
MEGATRAIN_INLINE float updated_weight(const AdamWScalars& s, float w, float gradient, float& exp_avg,
                                      float& exp_avg_sq) {
  const float g = gradient * s.gradient_scale;
  const float m = flush(::fmaf(s.beta1, exp_avg, s.one_minus_beta1 * g));
  const float v = flush(::fmaf(s.one_minus_beta2 * g, g, s.beta2 * exp_avg_sq));
  const float d = ::fmaf(::sqrtf(v), s.inverse_sqrt_bias_correction2, s.eps);
  exp_avg = m;
  exp_avg_sq = v;
  return ::fmaf(w, s.decay, (s.negative_step_size * m) / d);
}

// 32 random bits for two neighbours: a term of a Weyl sequence, which vectors reach by additions, mixed by
// xor-shifts around one multiplication, with a word of the key before each.
MEGATRAIN_INLINE std::uint32_t random_of_two(std::uint32_t even_index, const RoundingKey& key) {
  std::uint32_t x = key.first + (even_index >> 1) * kWeyl;
  x ^= (x >> 15) ^ key.second;
  x *= kMixing;
  return x ^ (x >> 16);
}
// An element takes one half of them for each moment, and its neighbour the other one.
MEGATRAIN_INLINE std::uint32_t random_word(std::uint32_t index, const RoundingKey& key) {
  const std::uint32_t word = random_of_two(index, key);
  return index % 2 == 0 ? word : word << 16 | word >> 16;
}

// The bits of an element's word that each of its values takes. They overlap, but no bit that decides
// much for one value does so for another.
MEGATRAIN_INLINE std::uint32_t for_weight(std::uint32_t word) { return (word >> 8) & 0xffff; }
MEGATRAIN_INLINE std::uint32_t for_exp_avg(std::uint32_t word) { return word >> 16; }
MEGATRAIN_INLINE std::uint32_t for_exp_avg_sq(std::uint32_t word) { return word & 0xffff; }
// From bf16 to a code. The highest bits added are the lowest of those below them, or others' altogether:
// a sum of equal ones would not be spread evenly.
MEGATRAIN_INLINE std::uint32_t for_exp_avg_code(std::uint32_t word) { return (word >> 12) & 15; }
MEGATRAIN_INLINE std::uint32_t for_exp_avg_sq_code(std::uint32_t word) { return word & 7; }

// `random` has 16 bits. NaN takes none: a carry could turn it into 0.
MEGATRAIN_INLINE std::uint16_t to_bf16(float x, std::uint32_t random) {
  return static_cast<std::uint16_t>((bits_of(x) + (x == x ? random : 0)) >> 16);
}
MEGATRAIN_INLINE float from_bf16(std::uint16_t x) { return float_of(std::uint32_t{x} << 16); }

// Codes of kMantissa bits of mantissa under 4 of exponent, without a sign, from and to the bits of bf16
// values. Sizes are bits of a bf16 magnitude.
template <int kMantissa>
struct SmallFloat {
  static constexpr int kShift = 7 - kMantissa;
  static constexpr std::uint32_t kLargest = (16u << kMantissa) - 1;
  static constexpr std::uint32_t kNearest = 1u << (kShift - 1);  // in place of random bits

  MEGATRAIN_INLINE std::uint32_t block_exponent(std::uint32_t largest) {
    const std::uint32_t exponent = (largest + (1u << kShift) - 1) >> 7;
    return exponent < kSmallestBlockExponent ? kSmallestBlockExponent : exponent < 255 ? exponent : 255;
  }
  // What the block's values have above its codes' exponents, as bits of bf16.
  MEGATRAIN_INLINE std::uint32_t base(std::uint32_t exponent) {
    return ((exponent > kSmallestBlockExponent ? exponent : kSmallestBlockExponent) - 15) << 7;
  }
  // `smallest` is a code. `random` has kShift bits.
  MEGATRAIN_INLINE std::uint32_t encode(std::uint32_t size, std::uint32_t exponent, std::uint32_t smallest,
                                        std::uint32_t random) {
    const std::uint32_t above = size > base(exponent) ? size - base(exponent) : 0;
    const std::uint32_t least = smallest << kShift;
    const std::uint32_t code = ((above > least ? above : least) + random) >> kShift;
    return code < kLargest ? code : kLargest;
  }
  MEGATRAIN_INLINE std::uint32_t decode(std::uint32_t code, std::uint32_t exponent) {
    return code == 0 ? 0 : base(exponent) + (code << kShift);
  }
};

using FirstMomentCode = SmallFloat<3>;
using SecondMomentCode = SmallFloat<4>;

// x is the bf16 rounding of the moment. Codes 0 and 0x80 both are 0.
MEGATRAIN_INLINE std::uint8_t encode_exp_avg(std::uint16_t x, std::uint32_t exponent, std::uint32_t random) {
  return static_cast<std::uint8_t>(FirstMomentCode::encode(x & 0x7fffu, exponent, 0, random) |
                                   (x >> 15 << 7));
}
MEGATRAIN_INLINE float decode_exp_avg(std::uint8_t code, std::uint32_t exponent) {
  const std::uint32_t size = FirstMomentCode::decode(code & 0x7fu, exponent);
  return float_of((size | (code > 0x80 ? 0x8000u : 0u)) << 16);
}
MEGATRAIN_INLINE std::uint8_t encode_exp_avg_sq(std::uint16_t x, std::uint32_t exponent,
                                                std::uint32_t random) {
  return static_cast<std::uint8_t>(SecondMomentCode::encode(x, exponent, x == 0 ? 0 : 1, random));
}
MEGATRAIN_INLINE float decode_exp_avg_sq(std::uint8_t code, std::uint32_t exponent) {
  return float_of(SecondMomentCode::decode(code, exponent) << 16);
}
// What a block's exponent is taken from the largest of.
MEGATRAIN_INLINE std::uint32_t exp_avg_size(std::uint16_t x) { return x & 0x7fffu; }
MEGATRAIN_INLINE std::uint32_t exp_avg_sq_size(std::uint16_t x) { return x; }

}  // namespace megatrain
