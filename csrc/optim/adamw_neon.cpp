// AdamW with NEON, 4 parameters at a time; the rest of a span goes to the scalar variant, which gives
// the same bits. NEON is part of every 64-bit ARM, so this file needs no flags of its own; contraction
// must stay off, since GCC writes the intrinsics for products and sums as plain arithmetic.
#include <arm_neon.h>

#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

constexpr std::int64_t kLanes = 4;

struct Constants {
  float32x4_t gradient_scale, lerp_weight, beta2, one_minus_beta2, decay, negative_step_size,
      sqrt_bias_correction2, eps;
  uint32x4_t lerp_from_gradient, exponent, first_key, second_key;
};

Constants constants(const AdamWScalars& s) {
  return Constants{
      vdupq_n_f32(s.gradient_scale),
      vdupq_n_f32(s.lerp_weight),
      vdupq_n_f32(s.beta2),
      vdupq_n_f32(s.one_minus_beta2),
      vdupq_n_f32(s.decay),
      vdupq_n_f32(s.negative_step_size),
      vdupq_n_f32(s.sqrt_bias_correction2),
      vdupq_n_f32(s.eps),
      vdupq_n_u32(s.lerp_from_gradient ? ~0u : 0u),
      vdupq_n_u32(0x7f800000),
      vdupq_n_u32(s.key.first),
      vdupq_n_u32(s.key.second),
  };
}

inline uint32x4_t bits_of(float32x4_t x) { return vreinterpretq_u32_f32(x); }
inline float32x4_t float_of(uint32x4_t x) { return vreinterpretq_f32_u32(x); }

inline float32x4_t flush(const Constants& c, float32x4_t x) {
  return float_of(vandq_u32(bits_of(x), vtstq_u32(bits_of(x), c.exponent)));
}

// All ones in the lanes that are infinite or NaN.
inline uint32x4_t non_finite(const Constants& c, uint32x4_t x) {
  return vceqq_u32(vandq_u32(x, c.exponent), c.exponent);
}

inline float32x4_t updated_weight(const Constants& c, float32x4_t w, float32x4_t gradient,
                                  float32x4_t& exp_avg, float32x4_t& exp_avg_sq) {
  const float32x4_t g = flush(c, vmulq_f32(gradient, c.gradient_scale));
  const float32x4_t start = vbslq_f32(c.lerp_from_gradient, g, exp_avg);
  const float32x4_t m = flush(c, vfmaq_f32(start, c.lerp_weight, vsubq_f32(g, exp_avg)));
  const float32x4_t kept = vmulq_f32(c.beta2, exp_avg_sq);
  const float32x4_t v = flush(c, vfmaq_f32(kept, vmulq_f32(c.one_minus_beta2, g), g));
  const float32x4_t d = vaddq_f32(vdivq_f32(vsqrtq_f32(v), c.sqrt_bias_correction2), c.eps);
  exp_avg = m;
  exp_avg_sq = v;
  return vaddq_f32(vmulq_f32(w, c.decay), vdivq_f32(vmulq_f32(c.negative_step_size, m), d));
}

// random_word of the 4 elements from `index` on.
inline uint32x4_t random_words(const Constants& c, std::int64_t index) {
  constexpr std::uint32_t kLane[4] = {0, 1, 2, 3};
  uint32x4_t x = vaddq_u32(vdupq_n_u32(static_cast<std::uint32_t>(index)), vld1q_u32(kLane));
  x = veorq_u32(x, c.first_key);
  x = veorq_u32(x, vshrq_n_u32(x, 16));
  x = vmulq_u32(x, vdupq_n_u32(0x85ebca6bu));
  x = veorq_u32(x, vshrq_n_u32(x, 13));
  x = veorq_u32(x, c.second_key);
  x = vmulq_u32(x, vdupq_n_u32(0xc2b2ae35u));
  return veorq_u32(x, vshrq_n_u32(x, 16));
}

inline uint32x4_t low_half(uint32x4_t x) { return vandq_u32(x, vdupq_n_u32(0xffff)); }
inline uint32x4_t high_half(uint32x4_t x) { return vshrq_n_u32(x, 16); }

inline float32x4_t load_bf16(const std::uint16_t* from) { return float_of(vshll_n_u16(vld1_u16(from), 16)); }
inline void store_16(std::uint16_t* to, uint32x4_t x) { vst1_u16(to, vmovn_u32(x)); }

// to_bf16 in the low halves; the upper ones are 0.
inline uint32x4_t to_bf16(float32x4_t x, uint32x4_t random) {
  return high_half(vaddq_u32(bits_of(x), vandq_u32(random, vceqq_f32(x, x))));
}

template <class T>
T* at(void* section, std::int64_t i) {
  return static_cast<T*>(section) + i;
}
template <class T>
const T* at(const void* section, std::int64_t i) {
  return static_cast<const T*>(section) + i;
}

// store() returns all ones in the lanes whose weight is not finite.
struct SplitWeights {
  static float32x4_t load(const AdamWSpan& span, std::int64_t i) {
    const uint32x4_t low = vreinterpretq_u32_s32(vmovl_s16(vld1_s16(span.low + i)));
    return float_of(vaddq_u32(bits_of(load_bf16(at<std::uint16_t>(span.weight, i))), low));
  }
  static float32x4_t gradient(const AdamWSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.gradient, i));
  }
  static uint32x4_t store(const Constants& c, const AdamWSpan& span, std::int64_t i, float32x4_t w) {
    const uint32x4_t bits = bits_of(w);
    store_16(at<std::uint16_t>(span.weight, i), high_half(vaddq_u32(bits, vdupq_n_u32(0x8000))));
    vst1_s16(span.low + i, vreinterpret_s16_u16(vmovn_u32(bits)));
    return non_finite(c, bits);
  }
};

struct Bf16Weights {
  static float32x4_t load(const AdamWSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.weight, i));
  }
  static float32x4_t gradient(const AdamWSpan& span, std::int64_t i) {
    return SplitWeights::gradient(span, i);
  }
  static uint32x4_t store(const Constants& c, const AdamWSpan& span, std::int64_t i, float32x4_t w) {
    const uint32x4_t rounded = to_bf16(w, low_half(vshrq_n_u32(random_words(c, span.first + i), 8)));
    store_16(at<std::uint16_t>(span.weight, i), rounded);
    return non_finite(c, vshlq_n_u32(rounded, 16));
  }
};

struct FloatWeights {
  static float32x4_t load(const AdamWSpan& span, std::int64_t i) {
    return vld1q_f32(at<float>(span.weight, i));
  }
  static float32x4_t gradient(const AdamWSpan& span, std::int64_t i) {
    return vld1q_f32(at<float>(span.gradient, i));
  }
  static uint32x4_t store(const Constants& c, const AdamWSpan& span, std::int64_t i, float32x4_t w) {
    vst1q_f32(at<float>(span.weight, i), w);
    return non_finite(c, bits_of(w));
  }
};

// Moments of 4 elements: in, updated, the weight written, out.
template <class Weights>
inline uint32x4_t update(const Constants& c, const AdamWSpan& span, std::int64_t i, float32x4_t& m,
                         float32x4_t& v) {
  const float32x4_t w = updated_weight(c, Weights::load(span, i), Weights::gradient(span, i), m, v);
  return Weights::store(c, span, i, w);
}

template <class Weights>
inline uint32x4_t with_float_moments(const Constants& c, const AdamWSpan& span, std::int64_t i) {
  float32x4_t m = vld1q_f32(at<float>(span.exp_avg, i)), v = vld1q_f32(at<float>(span.exp_avg_sq, i));
  const uint32x4_t bad = update<Weights>(c, span, i, m, v);
  vst1q_f32(at<float>(span.exp_avg, i), m);
  vst1q_f32(at<float>(span.exp_avg_sq, i), v);
  return bad;
}

template <class Weights>
inline uint32x4_t with_bf16_moments(const Constants& c, const AdamWSpan& span, std::int64_t i) {
  std::uint16_t* const exp_avg = at<std::uint16_t>(span.exp_avg, i);
  std::uint16_t* const exp_avg_sq = at<std::uint16_t>(span.exp_avg_sq, i);
  float32x4_t m = load_bf16(exp_avg), v = load_bf16(exp_avg_sq);
  const uint32x4_t bad = update<Weights>(c, span, i, m, v);
  const uint32x4_t random = random_words(c, span.first + i);
  store_16(exp_avg, to_bf16(m, high_half(random)));
  store_16(exp_avg_sq, to_bf16(v, low_half(random)));
  return bad;
}

// SmallFloat of adamw_math.h for one block.
template <int kMantissa>
struct BlockCode {
  static constexpr int kShift = 23 - kMantissa;
  uint32x4_t base;

  static BlockCode of(unsigned exponent) {
    return {vdupq_n_u32(((exponent > 16 ? exponent : 16) - 15) << 23)};
  }
  static unsigned exponent(int32x4_t largest) {
    const auto bits = static_cast<unsigned>(vmaxvq_s32(largest));
    if (bits >= 0x7f800000) return 255;
    const unsigned exponent = (bits + (1u << kShift) - 1) >> 23;
    return exponent > 16 ? exponent : 16;
  }
  uint32x4_t decode(uint32x4_t code) const {
    return vandq_u32(vaddq_u32(vshlq_n_u32(code, kShift), base), vtstq_u32(code, code));
  }
  uint32x4_t encode(uint32x4_t magnitude, int smallest, uint32x4_t random) const {
    const int32x4_t above =
        vmaxq_s32(vreinterpretq_s32_u32(vsubq_u32(magnitude, base)), vdupq_n_s32(smallest << kShift));
    const uint32x4_t code = vshrq_n_u32(vaddq_u32(vreinterpretq_u32_s32(above), random), kShift);
    return vminq_u32(code, vdupq_n_u32((16u << kMantissa) - 1));
  }
};

struct Eight {
  uint32x4_t half[2];
};
inline Eight load_codes(const std::uint8_t* from) {
  const uint16x8_t words = vmovl_u8(vld1_u8(from));
  return {{vmovl_u16(vget_low_u16(words)), vmovl_u16(vget_high_u16(words))}};
}
inline void store_codes(std::uint8_t* to, const Eight& codes) {
  vst1_u8(to, vmovn_u16(vcombine_u16(vmovn_u32(codes.half[0]), vmovn_u32(codes.half[1]))));
}

// One whole block from element `begin` on.
template <class Weights>
uint32x4_t with_int8_moments(const Constants& c, const AdamWSpan& span, std::int64_t begin) {
  std::uint8_t& m_exponent = span.exp_avg_exponents[begin / kMomentBlock];
  std::uint8_t& v_exponent = span.exp_avg_sq_exponents[begin / kMomentBlock];
  std::uint8_t* const exp_avg = at<std::uint8_t>(span.exp_avg, begin);
  std::uint8_t* const exp_avg_sq = at<std::uint8_t>(span.exp_avg_sq, begin);
  const auto m_old = BlockCode<3>::of(m_exponent);
  const auto v_old = BlockCode<4>::of(v_exponent);
  const uint32x4_t magnitude = vdupq_n_u32(0x7fffffff);
  float32x4_t m[kMomentBlock / kLanes], v[kMomentBlock / kLanes];
  int32x4_t m_largest = vdupq_n_s32(0), v_largest = m_largest;
  uint32x4_t bad = vdupq_n_u32(0);
  for (int k = 0; k < kMomentBlock / kLanes; k += 2) {
    const Eight m_codes = load_codes(exp_avg + k * kLanes), v_codes = load_codes(exp_avg_sq + k * kLanes);
    for (int half = 0; half < 2; ++half) {
      const uint32x4_t code = m_codes.half[half];
      const uint32x4_t size = m_old.decode(vandq_u32(code, vdupq_n_u32(0x7f)));
      const uint32x4_t negative = vcgtq_u32(code, vdupq_n_u32(0x80));
      float32x4_t& m_now = m[k + half];
      float32x4_t& v_now = v[k + half];
      m_now = float_of(vorrq_u32(size, vbicq_u32(negative, magnitude)));
      v_now = float_of(v_old.decode(v_codes.half[half]));
      bad = vorrq_u32(bad, update<Weights>(c, span, begin + (k + half) * kLanes, m_now, v_now));
      m_largest = vmaxq_s32(m_largest, vreinterpretq_s32_u32(vandq_u32(bits_of(m_now), magnitude)));
      v_largest = vmaxq_s32(v_largest, vreinterpretq_s32_u32(bits_of(v_now)));
    }
  }
  m_exponent = static_cast<std::uint8_t>(BlockCode<3>::exponent(m_largest));
  v_exponent = static_cast<std::uint8_t>(BlockCode<4>::exponent(v_largest));
  const auto m_new = BlockCode<3>::of(m_exponent);
  const auto v_new = BlockCode<4>::of(v_exponent);
  for (int k = 0; k < kMomentBlock / kLanes; k += 2) {
    Eight m_codes, v_codes;
    for (int half = 0; half < 2; ++half) {
      const uint32x4_t random = random_words(c, span.first + begin + (k + half) * kLanes);
      const uint32x4_t m_bits = bits_of(m[k + half]), v_bits = bits_of(v[k + half]);
      const uint32x4_t size = m_new.encode(vandq_u32(m_bits, magnitude), 0, vshrq_n_u32(random, 12));
      m_codes.half[half] = vorrq_u32(size, vshlq_n_u32(vshrq_n_u32(m_bits, 31), 7));
      const uint32x4_t code = v_new.encode(v_bits, 1, vandq_u32(random, vdupq_n_u32(0x7ffff)));
      v_codes.half[half] = vandq_u32(code, vtstq_u32(v_bits, v_bits));
    }
    store_codes(exp_avg + k * kLanes, m_codes);
    store_codes(exp_avg_sq + k * kLanes, v_codes);
  }
  return bad;
}

template <class Weights>
bool with_weights(const AdamWScalars& scalars, const AdamWSpan& span) {
  const Constants c = constants(scalars);
  uint32x4_t bad = vdupq_n_u32(0);
  std::int64_t i = 0;
  switch (span.moment_format) {
    case MomentFormat::kInt8:
      for (; i + kMomentBlock <= span.count; i += kMomentBlock) {
        bad = vorrq_u32(bad, with_int8_moments<Weights>(c, span, i));
      }
      break;
    case MomentFormat::kBf16:
#pragma GCC unroll 4
      for (; i + kLanes <= span.count; i += kLanes) {
        bad = vorrq_u32(bad, with_bf16_moments<Weights>(c, span, i));
      }
      break;
    case MomentFormat::kFp32:
#pragma GCC unroll 4
      for (; i + kLanes <= span.count; i += kLanes) {
        bad = vorrq_u32(bad, with_float_moments<Weights>(c, span, i));
      }
      break;
  }
  return adamw_scalar(scalars, rest_of(span, i)) && vmaxvq_u32(bad) == 0;
}

}  // namespace

bool adamw_neon(const AdamWScalars& scalars, const AdamWSpan& span) {
  switch (span.weight_format) {
    case WeightFormat::kBf16:
      return with_weights<Bf16Weights>(scalars, span);
    case WeightFormat::kFp32:
      return with_weights<FloatWeights>(scalars, span);
    case WeightFormat::kBf16Split:
      break;
  }
  return with_weights<SplitWeights>(scalars, span);
}

}  // namespace megatrain
