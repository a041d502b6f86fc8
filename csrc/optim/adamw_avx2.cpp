// AdamW with AVX2 and FMA, 8 parameters at a time; the rest of a span goes to the scalar variant,
// which gives the same bits. Compiled with wide flags: only intrinsics and functions internal to
// this file, since anything shared would be emitted with instructions that other CPUs lack.
#include <immintrin.h>

#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

constexpr std::int64_t kLanes = 8;

struct Key {
  __m256i first, second;
};

struct Constants {
  __m256 gradient_scale, lerp_weight, lerp_from_gradient, beta2, one_minus_beta2, decay, negative_step_size,
      sqrt_bias_correction2, eps;
  __m256i exponent;
  Key weight_key, moments_key;
};

inline Key key_of(const std::uint32_t (&key)[2]) {
  return {_mm256_set1_epi32(static_cast<int>(key[0])), _mm256_set1_epi32(static_cast<int>(key[1]))};
}

inline Constants constants(const AdamWScalars& s) {
  return Constants{
      _mm256_set1_ps(s.gradient_scale),
      _mm256_set1_ps(s.lerp_weight),
      _mm256_castsi256_ps(_mm256_set1_epi32(s.lerp_from_gradient ? -1 : 0)),
      _mm256_set1_ps(s.beta2),
      _mm256_set1_ps(s.one_minus_beta2),
      _mm256_set1_ps(s.decay),
      _mm256_set1_ps(s.negative_step_size),
      _mm256_set1_ps(s.sqrt_bias_correction2),
      _mm256_set1_ps(s.eps),
      _mm256_set1_epi32(0x7f800000),
      key_of(s.keys.weight),
      key_of(s.keys.moments),
  };
}

inline __m256 flush(const Constants& c, __m256 x) {
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), c.exponent);
  const __m256i tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  return _mm256_andnot_ps(_mm256_castsi256_ps(tiny), x);
}

// All ones in the lanes that are infinite or NaN.
inline __m256i non_finite(const Constants& c, __m256i x) {
  return _mm256_cmpeq_epi32(_mm256_and_si256(x, c.exponent), c.exponent);
}

inline __m256 updated_weight(const Constants& c, __m256 w, __m256 gradient, __m256& exp_avg,
                             __m256& exp_avg_sq) {
  const __m256 g = flush(c, _mm256_mul_ps(gradient, c.gradient_scale));
  const __m256 start = _mm256_blendv_ps(exp_avg, g, c.lerp_from_gradient);
  const __m256 m = flush(c, _mm256_fmadd_ps(c.lerp_weight, _mm256_sub_ps(g, exp_avg), start));
  const __m256 kept = _mm256_mul_ps(c.beta2, exp_avg_sq);
  const __m256 v = flush(c, _mm256_fmadd_ps(_mm256_mul_ps(c.one_minus_beta2, g), g, kept));
  const __m256 d = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v), c.sqrt_bias_correction2), c.eps);
  exp_avg = m;
  exp_avg_sq = v;
  return _mm256_add_ps(_mm256_mul_ps(w, c.decay), _mm256_div_ps(_mm256_mul_ps(c.negative_step_size, m), d));
}

// random_word of the 8 elements from `index` on.
inline __m256i random_words(std::int64_t index, const Key& key) {
  __m256i x =
      _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(index)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  x = _mm256_xor_si256(x, key.first);
  x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
  x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0x85ebca6bu)));
  x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 13));
  x = _mm256_xor_si256(x, key.second);
  x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0xc2b2ae35u)));
  return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

inline __m256i low_half(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xffff)); }
inline __m256i high_half(__m256i x) { return _mm256_srli_epi32(x, 16); }

inline __m256 load_bf16(const std::uint16_t* from) {
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// to_bf16 in the low halves; the upper ones are 0.
inline __m256i to_bf16(const Constants& c, __m256 x, __m256i random) {
  const __m256i bits = _mm256_castps_si256(x);
  return high_half(_mm256_add_epi32(bits, _mm256_andnot_si256(non_finite(c, bits), random)));
}

// The low 16 bits of each lane; its upper ones must be 0.
inline void store_16(void* to, __m256i x) {
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storeu_si128(static_cast<__m128i*>(to), packed);
}

template <class T>
inline T* at(void* section, std::int64_t i) {
  return static_cast<T*>(section) + i;
}
template <class T>
inline const T* at(const void* section, std::int64_t i) {
  return static_cast<const T*>(section) + i;
}

// store() returns all ones in the lanes whose weight is not finite.
struct SplitWeights {
  static __m256 load(const AdamWSpan& span, std::int64_t i) {
    const __m256i low =
        _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(span.low + i)));
    const __m256i high = _mm256_castps_si256(load_bf16(at<std::uint16_t>(span.weight, i)));
    return _mm256_castsi256_ps(_mm256_add_epi32(high, low));
  }
  static __m256 gradient(const AdamWSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.gradient, i));
  }
  static __m256i store(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256 w) {
    const __m256i bits = _mm256_castps_si256(w);
    store_16(at<std::uint16_t>(span.weight, i), high_half(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000))));
    store_16(span.low + i, low_half(bits));
    return non_finite(c, bits);
  }
};

struct Bf16Weights {
  static __m256 load(const AdamWSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.weight, i));
  }
  static __m256 gradient(const AdamWSpan& span, std::int64_t i) { return SplitWeights::gradient(span, i); }
  static __m256i store(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256 w) {
    const __m256i rounded = to_bf16(c, w, low_half(random_words(span.first + i, c.weight_key)));
    store_16(at<std::uint16_t>(span.weight, i), rounded);
    return non_finite(c, _mm256_slli_epi32(rounded, 16));
  }
};

struct FloatWeights {
  static __m256 load(const AdamWSpan& span, std::int64_t i) {
    return _mm256_loadu_ps(at<float>(span.weight, i));
  }
  static __m256 gradient(const AdamWSpan& span, std::int64_t i) {
    return _mm256_loadu_ps(at<float>(span.gradient, i));
  }
  static __m256i store(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256 w) {
    _mm256_storeu_ps(at<float>(span.weight, i), w);
    return non_finite(c, _mm256_castps_si256(w));
  }
};

// Moments of 8 elements: in, updated, the weight written, out.
template <class Weights>
inline __m256i update(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256& m, __m256& v) {
  const __m256 w = updated_weight(c, Weights::load(span, i), Weights::gradient(span, i), m, v);
  return Weights::store(c, span, i, w);
}

template <class Weights>
inline __m256i with_float_moments(const Constants& c, const AdamWSpan& span, std::int64_t i) {
  __m256 m = _mm256_loadu_ps(at<float>(span.exp_avg, i));
  __m256 v = _mm256_loadu_ps(at<float>(span.exp_avg_sq, i));
  const __m256i bad = update<Weights>(c, span, i, m, v);
  _mm256_storeu_ps(at<float>(span.exp_avg, i), m);
  _mm256_storeu_ps(at<float>(span.exp_avg_sq, i), v);
  return bad;
}

template <class Weights>
inline __m256i with_bf16_moments(const Constants& c, const AdamWSpan& span, std::int64_t i) {
  std::uint16_t* const exp_avg = at<std::uint16_t>(span.exp_avg, i);
  std::uint16_t* const exp_avg_sq = at<std::uint16_t>(span.exp_avg_sq, i);
  __m256 m = load_bf16(exp_avg), v = load_bf16(exp_avg_sq);
  const __m256i bad = update<Weights>(c, span, i, m, v);
  const __m256i random = random_words(span.first + i, c.moments_key);
  store_16(exp_avg, to_bf16(c, m, high_half(random)));
  store_16(exp_avg_sq, to_bf16(c, v, low_half(random)));
  return bad;
}

// SmallFloat of adamw_math.h for one block. Comparisons are signed: nothing here reaches 2^31.
template <int kMantissa>
struct BlockCode {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr unsigned kSmallestExponent = 19;
  __m256i smallest_normal, base;

  static BlockCode of(unsigned exponent) {
    const unsigned used = exponent > kSmallestExponent ? exponent : kSmallestExponent;
    return {_mm256_set1_epi32(static_cast<int>((used - 14) << 23)),
            _mm256_set1_epi32(static_cast<int>((used - 15) << 23))};
  }
  static unsigned exponent(__m256i largest) {
    __m128i x = _mm_max_epu32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epu32(x, _mm_shuffle_epi32(x, 0xb1));
    const auto bits = static_cast<unsigned>(_mm_cvtsi128_si32(x));
    if (bits >= 0x7f800000) return 255;
    const unsigned exponent = (bits + (1u << kShift) - 1) >> 23;
    return exponent > kSmallestExponent ? exponent : kSmallestExponent;
  }
  __m256i decode(__m256i code) const {
    const __m256i small = _mm256_cmpgt_epi32(_mm256_set1_epi32(1 << kMantissa), code);
    const __m256i from = _mm256_blendv_epi8(base, smallest_normal, small);
    const __m256i bits = _mm256_add_epi32(from, _mm256_slli_epi32(code, kShift));
    const __m256i less = _mm256_and_si256(small, smallest_normal);  // or +0, which changes nothing
    return _mm256_castps_si256(_mm256_sub_ps(_mm256_castsi256_ps(bits), _mm256_castsi256_ps(less)));
  }
  __m256i encode(__m256i magnitude, __m256i random) const {
    const __m256i small = _mm256_cmpgt_epi32(smallest_normal, magnitude);
    const __m256i from = _mm256_blendv_epi8(base, smallest_normal, small);
    const __m256i more = _mm256_and_si256(small, smallest_normal);
    const __m256 value = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(more));
    const __m256i dither =
        _mm256_or_si256(_mm256_slli_epi32(random, kShift - 16), _mm256_set1_epi32(1 << (kShift - 17)));
    const __m256i sum = _mm256_add_epi32(_mm256_sub_epi32(_mm256_castps_si256(value), from), dither);
    return _mm256_min_epu32(_mm256_srli_epi32(sum, kShift), _mm256_set1_epi32((16 << kMantissa) - 1));
  }
};

inline __m256i load_codes(const std::uint8_t* from) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
inline void store_codes(std::uint8_t* to, __m256i codes) {
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}

// One whole block from element `begin` on.
template <class Weights>
inline __m256i with_int8_moments(const Constants& c, const AdamWSpan& span, std::int64_t begin) {
  std::uint8_t& m_exponent = span.exp_avg_exponents[begin / kMomentBlock];
  std::uint8_t& v_exponent = span.exp_avg_sq_exponents[begin / kMomentBlock];
  std::uint8_t* const exp_avg = at<std::uint8_t>(span.exp_avg, begin);
  std::uint8_t* const exp_avg_sq = at<std::uint8_t>(span.exp_avg_sq, begin);
  const auto m_old = BlockCode<3>::of(m_exponent);
  const auto v_old = BlockCode<4>::of(v_exponent);
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256 m[kMomentBlock / kLanes], v[kMomentBlock / kLanes];
  __m256i m_largest = _mm256_setzero_si256(), v_largest = m_largest, bad = m_largest;
  for (int k = 0; k < kMomentBlock / kLanes; ++k) {
    const __m256i code = load_codes(exp_avg + k * kLanes);
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 7), 31);
    const __m256i size = m_old.decode(_mm256_and_si256(code, _mm256_set1_epi32(0x7f)));
    m[k] = _mm256_castsi256_ps(_mm256_or_si256(size, sign));
    v[k] = _mm256_castsi256_ps(v_old.decode(load_codes(exp_avg_sq + k * kLanes)));
    bad = _mm256_or_si256(bad, update<Weights>(c, span, begin + k * kLanes, m[k], v[k]));
    m_largest = _mm256_max_epu32(m_largest, _mm256_and_si256(_mm256_castps_si256(m[k]), magnitude));
    v_largest = _mm256_max_epu32(v_largest, _mm256_and_si256(_mm256_castps_si256(v[k]), magnitude));
  }
  m_exponent = static_cast<std::uint8_t>(BlockCode<3>::exponent(m_largest));
  v_exponent = static_cast<std::uint8_t>(BlockCode<4>::exponent(v_largest));
  const auto m_new = BlockCode<3>::of(m_exponent);
  const auto v_new = BlockCode<4>::of(v_exponent);
  for (int k = 0; k < kMomentBlock / kLanes; ++k) {
    const __m256i random = random_words(span.first + begin + k * kLanes, c.moments_key);
    const __m256i m_bits = _mm256_castps_si256(m[k]);
    const __m256i m_code = m_new.encode(_mm256_and_si256(m_bits, magnitude), high_half(random));
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(m_bits, 31), 7);
    const __m256i zero = _mm256_cmpeq_epi32(m_code, _mm256_setzero_si256());  // zeros are positive
    store_codes(exp_avg + k * kLanes, _mm256_or_si256(m_code, _mm256_andnot_si256(zero, sign)));
    const __m256i v_size = _mm256_and_si256(_mm256_castps_si256(v[k]), magnitude);
    const __m256i smallest = _mm256_min_epu32(v_size, _mm256_set1_epi32(1));  // above 0 stays above 0
    store_codes(exp_avg_sq + k * kLanes, _mm256_max_epu32(v_new.encode(v_size, low_half(random)), smallest));
  }
  return bad;
}

template <class Weights>
bool with_weights(const AdamWScalars& scalars, const AdamWSpan& span) {
  const Constants c = constants(scalars);
  __m256i bad = _mm256_setzero_si256();
  std::int64_t i = 0;
  switch (span.moment_format) {
    case MomentFormat::kInt8:
      for (; i + kMomentBlock <= span.count; i += kMomentBlock) {
        bad = _mm256_or_si256(bad, with_int8_moments<Weights>(c, span, i));
      }
      break;
    case MomentFormat::kBf16:
#pragma GCC unroll 2
      for (; i + kLanes <= span.count; i += kLanes) {
        bad = _mm256_or_si256(bad, with_bf16_moments<Weights>(c, span, i));
      }
      break;
    case MomentFormat::kFp32:
#pragma GCC unroll 2
      for (; i + kLanes <= span.count; i += kLanes) {
        bad = _mm256_or_si256(bad, with_float_moments<Weights>(c, span, i));
      }
      break;
  }
  return adamw_scalar(scalars, rest_of(span, i)) && _mm256_testz_si256(bad, bad);
}

}  // namespace

bool adamw_avx2(const AdamWScalars& scalars, const AdamWSpan& span) {
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
