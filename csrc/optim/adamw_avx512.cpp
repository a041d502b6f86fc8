// AdamW with AVX-512 (F, BW, VL, DQ), 16 parameters at a time, the end of a span under a mask; of
// 8-bit moments a last, partial block goes to the scalar variant, which gives the same bits.
// Compiled with wide flags: only intrinsics and functions internal to this file, since anything
// shared would be emitted with instructions that other CPUs lack.
#include <immintrin.h>

#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr __mmask16 kAll = 0xffff;

struct Key {
  __m512i first, second;
};

struct Constants {
  __m512 gradient_scale, lerp_weight, beta2, one_minus_beta2, decay, negative_step_size,
      sqrt_bias_correction2, eps;
  __m512i exponent;
  __mmask16 lerp_from_gradient;
  Key weight_key, moments_key;
};

inline Key key_of(const std::uint32_t (&key)[2]) {
  return {_mm512_set1_epi32(static_cast<int>(key[0])), _mm512_set1_epi32(static_cast<int>(key[1]))};
}

inline Constants constants(const AdamWScalars& s) {
  return Constants{
      _mm512_set1_ps(s.gradient_scale),
      _mm512_set1_ps(s.lerp_weight),
      _mm512_set1_ps(s.beta2),
      _mm512_set1_ps(s.one_minus_beta2),
      _mm512_set1_ps(s.decay),
      _mm512_set1_ps(s.negative_step_size),
      _mm512_set1_ps(s.sqrt_bias_correction2),
      _mm512_set1_ps(s.eps),
      _mm512_set1_epi32(0x7f800000),
      s.lerp_from_gradient ? kAll : __mmask16{0},
      key_of(s.keys.weight),
      key_of(s.keys.moments),
  };
}

inline __m512 flush(const Constants& c, __m512 x) {
  return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(_mm512_castps_si512(x), c.exponent), x);
}

inline __mmask16 non_finite(const Constants& c, __m512i x) {
  return _mm512_cmpeq_epi32_mask(_mm512_and_si512(x, c.exponent), c.exponent);
}

inline __m512 updated_weight(const Constants& c, __m512 w, __m512 gradient, __m512& exp_avg,
                             __m512& exp_avg_sq) {
  const __m512 g = flush(c, _mm512_mul_ps(gradient, c.gradient_scale));
  const __m512 start = _mm512_mask_mov_ps(exp_avg, c.lerp_from_gradient, g);
  const __m512 m = flush(c, _mm512_fmadd_ps(c.lerp_weight, _mm512_sub_ps(g, exp_avg), start));
  const __m512 kept = _mm512_mul_ps(c.beta2, exp_avg_sq);
  const __m512 v = flush(c, _mm512_fmadd_ps(_mm512_mul_ps(c.one_minus_beta2, g), g, kept));
  const __m512 d = _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v), c.sqrt_bias_correction2), c.eps);
  exp_avg = m;
  exp_avg_sq = v;
  return _mm512_add_ps(_mm512_mul_ps(w, c.decay), _mm512_div_ps(_mm512_mul_ps(c.negative_step_size, m), d));
}

// random_word of the 16 elements from `index` on.
inline __m512i random_words(std::int64_t index, const Key& key) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  __m512i x = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(index)), lane);
  x = _mm512_xor_si512(x, key.first);
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0x85ebca6bu)));
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 13));
  x = _mm512_xor_si512(x, key.second);
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0xc2b2ae35u)));
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

inline __m512i low_half(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi32(0xffff)); }
inline __m512i high_half(__m512i x) { return _mm512_srli_epi32(x, 16); }

inline __m512 load_bf16(__mmask16 lanes, const void* from) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from)), 16));
}

// to_bf16 in the low halves; the upper ones are 0.
inline __m512i to_bf16(const Constants& c, __m512 x, __m512i random) {
  const __m512i bits = _mm512_castps_si512(x);
  return high_half(_mm512_mask_add_epi32(bits, static_cast<__mmask16>(~non_finite(c, bits)), bits, random));
}

inline void store_16(__mmask16 lanes, void* to, __m512i x) {
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(x));
}

template <class T>
inline T* at(void* section, std::int64_t i) {
  return static_cast<T*>(section) + i;
}
template <class T>
inline const T* at(const void* section, std::int64_t i) {
  return static_cast<const T*>(section) + i;
}

// store() returns the lanes whose weight is not finite.
struct SplitWeights {
  static __m512 load(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    const __m512i low = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(lanes, span.low + i));
    const __m512 high = load_bf16(lanes, at<std::uint16_t>(span.weight, i));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(high), low));
  }
  static __m512 gradient(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    return load_bf16(lanes, at<std::uint16_t>(span.gradient, i));
  }
  static __mmask16 store(const Constants& c, const AdamWSpan& span, __mmask16 lanes, std::int64_t i,
                         __m512 w) {
    const __m512i bits = _mm512_castps_si512(w);
    store_16(lanes, at<std::uint16_t>(span.weight, i),
             high_half(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000))));
    store_16(lanes, span.low + i, bits);
    return non_finite(c, bits);
  }
};

struct Bf16Weights {
  static __m512 load(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    return load_bf16(lanes, at<std::uint16_t>(span.weight, i));
  }
  static __m512 gradient(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    return SplitWeights::gradient(span, lanes, i);
  }
  static __mmask16 store(const Constants& c, const AdamWSpan& span, __mmask16 lanes, std::int64_t i,
                         __m512 w) {
    const __m512i rounded = to_bf16(c, w, low_half(random_words(span.first + i, c.weight_key)));
    store_16(lanes, at<std::uint16_t>(span.weight, i), rounded);
    return non_finite(c, _mm512_slli_epi32(rounded, 16));
  }
};

struct FloatWeights {
  static __m512 load(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    return _mm512_maskz_loadu_ps(lanes, at<float>(span.weight, i));
  }
  static __m512 gradient(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    return _mm512_maskz_loadu_ps(lanes, at<float>(span.gradient, i));
  }
  static __mmask16 store(const Constants& c, const AdamWSpan& span, __mmask16 lanes, std::int64_t i,
                         __m512 w) {
    _mm512_mask_storeu_ps(at<float>(span.weight, i), lanes, w);
    return non_finite(c, _mm512_castps_si512(w));
  }
};

// Moments of 16 elements: in, updated, the weight written, out.
template <class Weights>
inline __mmask16 update(const Constants& c, const AdamWSpan& span, __mmask16 lanes, std::int64_t i, __m512& m,
                        __m512& v) {
  const __m512 old_w = Weights::load(span, lanes, i);
  const __m512 w = updated_weight(c, old_w, Weights::gradient(span, lanes, i), m, v);
  return static_cast<__mmask16>(lanes & Weights::store(c, span, lanes, i, w));
}

template <class Weights>
inline __mmask16 with_float_moments(const Constants& c, const AdamWSpan& span, __mmask16 lanes,
                                    std::int64_t i) {
  float* const exp_avg = at<float>(span.exp_avg, i);
  float* const exp_avg_sq = at<float>(span.exp_avg_sq, i);
  __m512 m = _mm512_maskz_loadu_ps(lanes, exp_avg), v = _mm512_maskz_loadu_ps(lanes, exp_avg_sq);
  const __mmask16 bad = update<Weights>(c, span, lanes, i, m, v);
  _mm512_mask_storeu_ps(exp_avg, lanes, m);
  _mm512_mask_storeu_ps(exp_avg_sq, lanes, v);
  return bad;
}

template <class Weights>
inline __mmask16 with_bf16_moments(const Constants& c, const AdamWSpan& span, __mmask16 lanes,
                                   std::int64_t i) {
  std::uint16_t* const exp_avg = at<std::uint16_t>(span.exp_avg, i);
  std::uint16_t* const exp_avg_sq = at<std::uint16_t>(span.exp_avg_sq, i);
  __m512 m = load_bf16(lanes, exp_avg), v = load_bf16(lanes, exp_avg_sq);
  const __mmask16 bad = update<Weights>(c, span, lanes, i, m, v);
  const __m512i random = random_words(span.first + i, c.moments_key);
  store_16(lanes, exp_avg, to_bf16(c, m, high_half(random)));
  store_16(lanes, exp_avg_sq, to_bf16(c, v, low_half(random)));
  return bad;
}

// SmallFloat of adamw_math.h for one block.
template <int kMantissa>
struct BlockCode {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr unsigned kSmallestExponent = 19;
  __m512i smallest_normal, base;

  static BlockCode of(unsigned exponent) {
    const unsigned used = exponent > kSmallestExponent ? exponent : kSmallestExponent;
    return {_mm512_set1_epi32(static_cast<int>((used - 14) << 23)),
            _mm512_set1_epi32(static_cast<int>((used - 15) << 23))};
  }
  static unsigned exponent(__m512i largest) {
    const unsigned bits = _mm512_reduce_max_epu32(largest);
    if (bits >= 0x7f800000) return 255;
    const unsigned exponent = (bits + (1u << kShift) - 1) >> 23;
    return exponent > kSmallestExponent ? exponent : kSmallestExponent;
  }
  __m512i decode(__m512i code) const {
    const __mmask16 small = _mm512_cmplt_epu32_mask(code, _mm512_set1_epi32(1 << kMantissa));
    const __m512i from = _mm512_mask_mov_epi32(base, small, smallest_normal);
    const __m512 value = _mm512_castsi512_ps(_mm512_add_epi32(from, _mm512_slli_epi32(code, kShift)));
    return _mm512_castps_si512(_mm512_mask_sub_ps(value, small, value, _mm512_castsi512_ps(smallest_normal)));
  }
  __m512i encode(__m512i magnitude, __m512i random) const {
    const __mmask16 small = _mm512_cmplt_epu32_mask(magnitude, smallest_normal);
    const __m512 fixed = _mm512_castsi512_ps(magnitude);
    const __m512 value = _mm512_mask_add_ps(fixed, small, fixed, _mm512_castsi512_ps(smallest_normal));
    const __m512i from = _mm512_mask_mov_epi32(base, small, smallest_normal);
    const __m512i dither =
        _mm512_or_si512(_mm512_slli_epi32(random, kShift - 16), _mm512_set1_epi32(1 << (kShift - 17)));
    const __m512i sum = _mm512_add_epi32(_mm512_sub_epi32(_mm512_castps_si512(value), from), dither);
    return _mm512_min_epu32(_mm512_srli_epi32(sum, kShift), _mm512_set1_epi32((16 << kMantissa) - 1));
  }
};

inline __m512i load_codes(const std::uint8_t* from) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_codes(std::uint8_t* to, __m512i codes) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(codes));
}

// One whole block from element `begin` on.
template <class Weights>
inline unsigned with_int8_moments(const Constants& c, const AdamWSpan& span, std::int64_t begin) {
  std::uint8_t& m_exponent = span.exp_avg_exponents[begin / kMomentBlock];
  std::uint8_t& v_exponent = span.exp_avg_sq_exponents[begin / kMomentBlock];
  std::uint8_t* const exp_avg = at<std::uint8_t>(span.exp_avg, begin);
  std::uint8_t* const exp_avg_sq = at<std::uint8_t>(span.exp_avg_sq, begin);
  const auto m_old = BlockCode<3>::of(m_exponent);
  const auto v_old = BlockCode<4>::of(v_exponent);
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512 m[kMomentBlock / kLanes], v[kMomentBlock / kLanes];
  __m512i m_largest = _mm512_setzero_si512(), v_largest = _mm512_setzero_si512();
  unsigned bad = 0;
#pragma GCC unroll 8
  for (int k = 0; k < kMomentBlock / kLanes; ++k) {
    const __m512i code = load_codes(exp_avg + k * kLanes);
    const __m512i sign = _mm512_slli_epi32(_mm512_srli_epi32(code, 7), 31);
    const __m512i size = m_old.decode(_mm512_and_si512(code, _mm512_set1_epi32(0x7f)));
    m[k] = _mm512_castsi512_ps(_mm512_or_si512(size, sign));
    v[k] = _mm512_castsi512_ps(v_old.decode(load_codes(exp_avg_sq + k * kLanes)));
    bad |= update<Weights>(c, span, kAll, begin + k * kLanes, m[k], v[k]);
    m_largest = _mm512_max_epu32(m_largest, _mm512_and_si512(_mm512_castps_si512(m[k]), magnitude));
    v_largest = _mm512_max_epu32(v_largest, _mm512_and_si512(_mm512_castps_si512(v[k]), magnitude));
  }
  m_exponent = static_cast<std::uint8_t>(BlockCode<3>::exponent(m_largest));
  v_exponent = static_cast<std::uint8_t>(BlockCode<4>::exponent(v_largest));
  const auto m_new = BlockCode<3>::of(m_exponent);
  const auto v_new = BlockCode<4>::of(v_exponent);
#pragma GCC unroll 8
  for (int k = 0; k < kMomentBlock / kLanes; ++k) {
    const __m512i random = random_words(span.first + begin + k * kLanes, c.moments_key);
    const __m512i m_bits = _mm512_castps_si512(m[k]);
    const __m512i m_code = m_new.encode(_mm512_and_si512(m_bits, magnitude), high_half(random));
    const __mmask16 negative = _mm512_mask_cmplt_epi32_mask(_mm512_test_epi32_mask(m_code, m_code), m_bits,
                                                            _mm512_setzero_si512());  // zeros are positive
    store_codes(exp_avg + k * kLanes,
                _mm512_mask_or_epi32(m_code, negative, m_code, _mm512_set1_epi32(0x80)));
    const __m512i v_size = _mm512_and_si512(_mm512_castps_si512(v[k]), magnitude);
    const __m512i smallest =
        _mm512_maskz_set1_epi32(_mm512_test_epi32_mask(v_size, v_size), 1);  // above 0 stays above 0
    store_codes(exp_avg_sq + k * kLanes, _mm512_max_epu32(v_new.encode(v_size, low_half(random)), smallest));
  }
  return bad;
}

inline __mmask16 first_lanes(std::int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

template <class Weights>
bool with_weights(const AdamWScalars& scalars, const AdamWSpan& span) {
  const Constants c = constants(scalars);
  unsigned bad = 0;
  std::int64_t i = 0;
  if (span.moment_format == MomentFormat::kInt8) {
    for (; i + kMomentBlock <= span.count; i += kMomentBlock) bad |= with_int8_moments<Weights>(c, span, i);
    return adamw_scalar(scalars, rest_of(span, i)) && bad == 0;
  }
  if (span.moment_format == MomentFormat::kBf16) {
#pragma GCC unroll 2
    for (; i + kLanes <= span.count; i += kLanes) bad |= with_bf16_moments<Weights>(c, span, kAll, i);
    if (i < span.count) bad |= with_bf16_moments<Weights>(c, span, first_lanes(span.count - i), i);
    return bad == 0;
  }
#pragma GCC unroll 2
  for (; i + kLanes <= span.count; i += kLanes) bad |= with_float_moments<Weights>(c, span, kAll, i);
  if (i < span.count) bad |= with_float_moments<Weights>(c, span, first_lanes(span.count - i), i);
  return bad == 0;
}

}  // namespace

bool adamw_avx512(const AdamWScalars& scalars, const AdamWSpan& span) {
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
