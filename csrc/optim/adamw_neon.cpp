// AdamW with NEON, 4 parameters at a time; the rest of a span goes to the scalar variant, which gives
// the same bits. NEON is part of every 64-bit ARM, so this file needs no flags of its own; contraction
// must stay off, since GCC writes the intrinsics for products and sums as plain arithmetic.
#include <arm_neon.h>

#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

constexpr std::int64_t kLanes = 4;

struct Constants {
  float32x4_t gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, negative_step_size,
      inverse_sqrt_bias_correction2, eps;
  uint32x4_t exponent, first_key, second_key;
};

Constants constants(const AdamWScalars& s) {
  return Constants{
      vdupq_n_f32(s.gradient_scale),
      vdupq_n_f32(s.beta1),
      vdupq_n_f32(s.one_minus_beta1),
      vdupq_n_f32(s.beta2),
      vdupq_n_f32(s.one_minus_beta2),
      vdupq_n_f32(s.decay),
      vdupq_n_f32(s.negative_step_size),
      vdupq_n_f32(s.inverse_sqrt_bias_correction2),
      vdupq_n_f32(s.eps),
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

// The same for the upper half of a split master.
inline uint32x4_t upper_half_not_finite(uint32x4_t x) {
  return vcgeq_u32(vandq_u32(x, vdupq_n_u32(0x7fffffff)), vdupq_n_u32(kInfiniteUpperHalf));
}

inline float32x4_t updated_weight(const Constants& c, float32x4_t w, float32x4_t gradient,
                                  float32x4_t& exp_avg, float32x4_t& exp_avg_sq) {
  const float32x4_t g = vmulq_f32(gradient, c.gradient_scale);
  const float32x4_t m = flush(c, vfmaq_f32(vmulq_f32(c.one_minus_beta1, g), c.beta1, exp_avg));
  const float32x4_t kept = vmulq_f32(c.beta2, exp_avg_sq);
  const float32x4_t v = flush(c, vfmaq_f32(kept, vmulq_f32(c.one_minus_beta2, g), g));
  const float32x4_t d = vfmaq_f32(c.eps, vsqrtq_f32(v), c.inverse_sqrt_bias_correction2);
  exp_avg = m;
  exp_avg_sq = v;
  return vfmaq_f32(vdivq_f32(vmulq_f32(c.negative_step_size, m), d), w, c.decay);
}

// random_word of the 4 elements from `index` on.
inline uint32x4_t random_words(const Constants& c, std::int64_t index) {
  constexpr std::uint32_t kLane[4] = {0, 1, 2, 3};
  const uint32x4_t element = vaddq_u32(vdupq_n_u32(static_cast<std::uint32_t>(index)), vld1q_u32(kLane));
  uint32x4_t x = vmlaq_u32(c.first_key, vshrq_n_u32(element, 1), vdupq_n_u32(kWeyl));
  x = veorq_u32(veorq_u32(x, vshrq_n_u32(x, 15)), c.second_key);
  x = vmulq_u32(x, vdupq_n_u32(kMixing));
  x = veorq_u32(x, vshrq_n_u32(x, 16));
  const uint32x4_t swapped = vreinterpretq_u32_u16(vrev32q_u16(vreinterpretq_u16_u32(x)));
  return vbslq_u32(vtstq_u32(element, vdupq_n_u32(1)), swapped, x);
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
  static float32x4_t load(const UpdateSpan& span, std::int64_t i) {
    const uint32x4_t low = vreinterpretq_u32_s32(vmovl_s16(vld1_s16(span.low + i)));
    return float_of(vaddq_u32(bits_of(load_bf16(at<std::uint16_t>(span.weight, i))), low));
  }
  static float32x4_t gradient(const UpdateSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.gradient, i));
  }
  static uint32x4_t store(const Constants&, const UpdateSpan& span, std::int64_t i, float32x4_t w) {
    const uint32x4_t bits = bits_of(w);
    store_16(at<std::uint16_t>(span.weight, i), high_half(vaddq_u32(bits, vdupq_n_u32(0x8000))));
    vst1_s16(span.low + i, vreinterpret_s16_u16(vmovn_u32(bits)));
    return upper_half_not_finite(bits);
  }
};

struct Bf16Weights {
  static float32x4_t load(const UpdateSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.weight, i));
  }
  static float32x4_t gradient(const UpdateSpan& span, std::int64_t i) {
    return SplitWeights::gradient(span, i);
  }
  static uint32x4_t store(const Constants& c, const UpdateSpan& span, std::int64_t i, float32x4_t w) {
    const uint32x4_t rounded = to_bf16(w, low_half(vshrq_n_u32(random_words(c, span.first + i), 8)));
    store_16(at<std::uint16_t>(span.weight, i), rounded);
    return non_finite(c, vshlq_n_u32(rounded, 16));
  }
};

struct FloatWeights {
  static float32x4_t load(const UpdateSpan& span, std::int64_t i) {
    return vld1q_f32(at<float>(span.weight, i));
  }
  static float32x4_t gradient(const UpdateSpan& span, std::int64_t i) {
    return vld1q_f32(at<float>(span.gradient, i));
  }
  static uint32x4_t store(const Constants& c, const UpdateSpan& span, std::int64_t i, float32x4_t w) {
    vst1q_f32(at<float>(span.weight, i), w);
    return non_finite(c, bits_of(w));
  }
};

// Moments of 4 elements: in, updated, the weight written, out.
template <class Weights>
inline uint32x4_t update(const Constants& c, const UpdateSpan& span, std::int64_t i, float32x4_t& m,
                         float32x4_t& v) {
  const float32x4_t w = updated_weight(c, Weights::load(span, i), Weights::gradient(span, i), m, v);
  return Weights::store(c, span, i, w);
}

template <class Weights>
inline uint32x4_t with_float_moments(const Constants& c, const UpdateSpan& span, std::int64_t i) {
  float32x4_t m = vld1q_f32(at<float>(span.exp_avg, i)), v = vld1q_f32(at<float>(span.exp_avg_sq, i));
  const uint32x4_t bad = update<Weights>(c, span, i, m, v);
  vst1q_f32(at<float>(span.exp_avg, i), m);
  vst1q_f32(at<float>(span.exp_avg_sq, i), v);
  return bad;
}

template <class Weights>
inline uint32x4_t with_bf16_moments(const Constants& c, const UpdateSpan& span, std::int64_t i) {
  std::uint16_t* const exp_avg = at<std::uint16_t>(span.exp_avg, i);
  std::uint16_t* const exp_avg_sq = at<std::uint16_t>(span.exp_avg_sq, i);
  float32x4_t m = load_bf16(exp_avg), v = load_bf16(exp_avg_sq);
  const uint32x4_t bad = update<Weights>(c, span, i, m, v);
  const uint32x4_t random = random_words(c, span.first + i);
  store_16(exp_avg, to_bf16(m, high_half(random)));
  store_16(exp_avg_sq, to_bf16(v, low_half(random)));
  return bad;
}

inline uint16x8_t joined(uint32x4_t low, uint32x4_t high) {
  return vcombine_u16(vmovn_u32(low), vmovn_u32(high));
}

// SmallFloat of adamw_math.h for one block, 8 elements at a time.
template <int kMantissa>
struct BlockCode {
  static constexpr int kShift = 7 - kMantissa;
  uint16x8_t base;

  static BlockCode of(unsigned exponent) {
    return {vdupq_n_u16(static_cast<std::uint16_t>(((exponent > 16 ? exponent : 16) - 15) << 7))};
  }
  static std::uint8_t exponent(uint16x8_t sizes) {
    const unsigned exponent = (vmaxvq_u16(sizes) + (1u << kShift) - 1) >> 7;
    return static_cast<std::uint8_t>(exponent < 16 ? 16 : exponent < 255 ? exponent : 255);
  }
  uint16x8_t decode(uint16x8_t code) const {
    return vandq_u16(vaddq_u16(vshlq_n_u16(code, kShift), base), vtstq_u16(code, code));
  }
  uint16x8_t encode(uint16x8_t size, uint16x8_t least, uint16x8_t random) const {
    const uint16x8_t above = vmaxq_u16(vqsubq_u16(size, base), least);
    return vminq_u16(vshrq_n_u16(vaddq_u16(above, random), kShift), vdupq_n_u16((16u << kMantissa) - 1));
  }
};

inline uint16x8_t load_codes(const std::uint8_t* from) { return vmovl_u8(vld1_u8(from)); }
inline void store_codes(std::uint8_t* to, uint16x8_t codes) { vst1_u8(to, vmovn_u16(codes)); }

// One whole block from element `begin` on.
template <class Weights>
uint32x4_t with_int8_moments(const Constants& c, const UpdateSpan& span, std::int64_t begin) {
  constexpr int kEach = 2 * kLanes;
  constexpr int kParts = kMomentBlock / kEach;
  std::uint8_t& m_exponent = span.exp_avg_exponents[begin / kMomentBlock];
  std::uint8_t& v_exponent = span.exp_avg_sq_exponents[begin / kMomentBlock];
  std::uint8_t* const exp_avg = at<std::uint8_t>(span.exp_avg, begin);
  std::uint8_t* const exp_avg_sq = at<std::uint8_t>(span.exp_avg_sq, begin);
  const auto m_old = BlockCode<3>::of(m_exponent);
  const auto v_old = BlockCode<4>::of(v_exponent);
  const uint16x8_t magnitude = vdupq_n_u16(0x7fff), sign = vdupq_n_u16(0x8000);
  uint16x8_t m[kParts], v[kParts], random[kParts];  // moments as bf16; lower halves of the words
  uint16x8_t m_sizes = vdupq_n_u16(0), v_sizes = m_sizes;
  uint32x4_t bad = vdupq_n_u32(0);
  for (int k = 0; k < kParts; ++k) {
    const uint16x8_t code = load_codes(exp_avg + k * kEach);
    const uint16x8_t size = m_old.decode(vandq_u16(code, vdupq_n_u16(0x7f)));
    const uint16x8_t m_bits = vorrq_u16(size, vandq_u16(vcgtq_u16(code, vdupq_n_u16(0x80)), sign));
    const uint16x8_t v_bits = v_old.decode(load_codes(exp_avg_sq + k * kEach));
    float32x4_t m_now[2] = {float_of(vshll_n_u16(vget_low_u16(m_bits), 16)),
                            float_of(vshll_n_u16(vget_high_u16(m_bits), 16))};
    float32x4_t v_now[2] = {float_of(vshll_n_u16(vget_low_u16(v_bits), 16)),
                            float_of(vshll_n_u16(vget_high_u16(v_bits), 16))};
    uint32x4_t m_rounded[2], v_rounded[2], v_random[2];
    for (int half = 0; half < 2; ++half) {
      const std::int64_t i = begin + k * kEach + half * kLanes;
      bad = vorrq_u32(bad, update<Weights>(c, span, i, m_now[half], v_now[half]));
      const uint32x4_t word = random_words(c, span.first + i);
      v_random[half] = low_half(word);
      m_rounded[half] = to_bf16(m_now[half], high_half(word));
      v_rounded[half] = to_bf16(v_now[half], v_random[half]);
    }
    random[k] = joined(v_random[0], v_random[1]);
    m[k] = joined(m_rounded[0], m_rounded[1]);
    v[k] = joined(v_rounded[0], v_rounded[1]);
    m_sizes = vmaxq_u16(m_sizes, vandq_u16(m[k], magnitude));
    v_sizes = vmaxq_u16(v_sizes, v[k]);
  }
  m_exponent = BlockCode<3>::exponent(m_sizes);
  v_exponent = BlockCode<4>::exponent(v_sizes);
  const auto m_new = BlockCode<3>::of(m_exponent);
  const auto v_new = BlockCode<4>::of(v_exponent);
  for (int k = 0; k < kParts; ++k) {
    const uint16x8_t m_code =
        m_new.encode(vandq_u16(m[k], magnitude), vdupq_n_u16(0), vshrq_n_u16(random[k], 12));
    store_codes(exp_avg + k * kEach, vorrq_u16(m_code, vshlq_n_u16(vshrq_n_u16(m[k], 15), 7)));
    // Above 0, a second moment is at least the smallest code.
    store_codes(exp_avg_sq + k * kEach,
                v_new.encode(v[k], vminq_u16(v[k], vdupq_n_u16(8)), vandq_u16(random[k], vdupq_n_u16(7))));
  }
  return bad;
}

template <class Weights>
bool with_weights(const AdamWScalars& scalars, const UpdateSpan& span) {
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

bool adamw_neon(const AdamWScalars& scalars, const UpdateSpan& span) {
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
