// AdamW with AVX2 and FMA: with fp32 moments 8 parameters at a time; with narrower ones 16, those with
// even and those with odd indices. The rest of a span goes to the scalar variant, which gives the same
// bits. Compiled with wide flags: only intrinsics and functions internal to this file, since anything
// shared would be emitted with instructions that other CPUs lack.
#include <immintrin.h>

#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

constexpr std::int64_t kLanes = 8;
constexpr std::int64_t kPair = 2 * kLanes;
constexpr int kOddWords = 0xaa;  // of each 128 bits

struct Constants {
  __m256 gradient_scale, lerp_weight, lerp_from_gradient, beta2, one_minus_beta2, decay, negative_step_size,
      sqrt_bias_correction2, eps;
  __m256i exponent, first_key, second_key;
};

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
      _mm256_set1_epi32(static_cast<int>(s.key.first)),
      _mm256_set1_epi32(static_cast<int>(s.key.second)),
  };
}

inline __m256i bits_of(__m256 x) { return _mm256_castps_si256(x); }
inline __m256 floats(__m256i x) { return _mm256_castsi256_ps(x); }
inline __m256i low_half(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi32(0xffff)); }
inline __m256i high_half(__m256i x) { return _mm256_srli_epi32(x, 16); }

inline __m256 flush(const Constants& c, __m256 x) {
  const __m256i exponent = _mm256_and_si256(bits_of(x), c.exponent);
  const __m256i tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  return _mm256_andnot_ps(floats(tiny), x);
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

// random_word of the elements with these indices.
inline __m256i random_words(const Constants& c, __m256i index) {
  __m256i x = _mm256_xor_si256(index, c.first_key);
  x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
  x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0x85ebca6bu)));
  x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 13));
  x = _mm256_xor_si256(x, c.second_key);
  x = _mm256_mullo_epi32(x, _mm256_set1_epi32(static_cast<int>(0xc2b2ae35u)));
  return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

// Bits of x with `random` added: to_bf16 takes the upper halves.
inline __m256i dithered(__m256 x, __m256i random) {
  const __m256i number = bits_of(_mm256_cmp_ps(x, x, _CMP_ORD_Q));
  return _mm256_add_epi32(bits_of(x), _mm256_and_si256(number, random));
}

template <class T>
inline T* at(void* section, std::int64_t i) {
  return static_cast<T*>(section) + i;
}
template <class T>
inline const T* at(const void* section, std::int64_t i) {
  return static_cast<const T*>(section) + i;
}

inline __m256i load(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline void store(void* to, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }

// One line of a stream that is read soon. One iteration is long enough to fill the CPU's window, so
// that few loads are under way without it: on an EPYC of the Zen 4 kind one thread gains 10 % with
// fp32 moments, 30 % with bf16 and 18 % with 8-bit ones.
inline void prefetch(const void* from) { _mm_prefetch(static_cast<const char*>(from) + 1024, _MM_HINT_T0); }

inline __m256 load_bf16(const std::uint16_t* from) {
  prefetch(from);
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline __m256 load_floats(const float* from) {
  prefetch(from);
  return _mm256_loadu_ps(from);
}
// The low 16 bits of each lane; its upper ones must be 0.
inline void store_16(void* to, __m256i x) {
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  _mm_storeu_si128(static_cast<__m128i*>(to), packed);
}

// Elements i + 2 * lane and i + 2 * lane + 1. 16-bit numbers come apart and together by shifts and
// masks of 32-bit lanes.
struct Pair {
  __m256i even, odd;
};

inline Pair load_bf16_pair(const std::uint16_t* from) {
  prefetch(from);
  const __m256i both = load(from);
  return {_mm256_slli_epi32(both, 16), _mm256_blend_epi16(_mm256_setzero_si256(), both, kOddWords)};
}
inline void store_high_halves(void* to, __m256i even, __m256i odd) {
  store(to, _mm256_blend_epi16(high_half(even), odd, kOddWords));
}
inline Pair load_float_pair(const float* from) {
  prefetch(from);
  const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + kLanes);
  const __m256i even = bits_of(_mm256_shuffle_ps(a, b, 0x88)), odd = bits_of(_mm256_shuffle_ps(a, b, 0xdd));
  return {_mm256_permute4x64_epi64(even, 0xd8), _mm256_permute4x64_epi64(odd, 0xd8)};
}
inline void store_float_pair(float* to, __m256i even, __m256i odd) {
  const __m256i low = _mm256_unpacklo_epi32(even, odd), high = _mm256_unpackhi_epi32(even, odd);
  store(to, _mm256_permute2x128_si256(low, high, 0x20));
  store(to + kLanes, _mm256_permute2x128_si256(low, high, 0x31));
}
inline Pair random_pair(const Constants& c, std::int64_t index) {
  const __m256i even = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(index)),
                                        _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14));
  return {random_words(c, even), random_words(c, _mm256_add_epi32(even, _mm256_set1_epi32(1)))};
}

// How each format reads weights and gradients and writes weights. The stores return all ones in the
// lanes whose weight is not finite; the random words are those of the elements.
struct SplitWeights {
  static __m256 load_one(const AdamWSpan& span, std::int64_t i) {
    prefetch(span.low + i);
    const __m256i low =
        _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(span.low + i)));
    return floats(_mm256_add_epi32(bits_of(load_bf16(at<std::uint16_t>(span.weight, i))), low));
  }
  static __m256 gradient(const AdamWSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.gradient, i));
  }
  static __m256i store_one(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256 w) {
    const __m256i bits = bits_of(w);
    store_16(at<std::uint16_t>(span.weight, i), high_half(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000))));
    store_16(span.low + i, low_half(bits));
    return non_finite(c, bits);
  }
  static Pair load_pair(const AdamWSpan& span, std::int64_t i) {
    const Pair high = load_bf16_pair(at<std::uint16_t>(span.weight, i));
    prefetch(span.low + i);
    const __m256i lows = load(span.low + i);
    const __m256i even = _mm256_srai_epi32(_mm256_slli_epi32(lows, 16), 16),
                  odd = _mm256_srai_epi32(lows, 16);
    return {_mm256_add_epi32(high.even, even), _mm256_add_epi32(high.odd, odd)};
  }
  static Pair gradient_pair(const AdamWSpan& span, std::int64_t i) {
    return load_bf16_pair(at<std::uint16_t>(span.gradient, i));
  }
  static __m256i store_pair(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256i even,
                            __m256i odd, const Pair&) {
    const __m256i half = _mm256_set1_epi32(0x8000);
    store_high_halves(at<std::uint16_t>(span.weight, i), _mm256_add_epi32(even, half),
                      _mm256_add_epi32(odd, half));
    store(span.low + i, _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), kOddWords));
    return _mm256_or_si256(non_finite(c, even), non_finite(c, odd));
  }
};

struct Bf16Weights {
  static __m256 load_one(const AdamWSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.weight, i));
  }
  static __m256 gradient(const AdamWSpan& span, std::int64_t i) { return SplitWeights::gradient(span, i); }
  static __m256i store_one(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256 w) {
    const __m256i index = _mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(span.first + i)),
                                           _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i bits = dithered(w, low_half(_mm256_srli_epi32(random_words(c, index), 8)));
    store_16(at<std::uint16_t>(span.weight, i), high_half(bits));
    return non_finite(c, bits);
  }
  static Pair load_pair(const AdamWSpan& span, std::int64_t i) {
    return load_bf16_pair(at<std::uint16_t>(span.weight, i));
  }
  static Pair gradient_pair(const AdamWSpan& span, std::int64_t i) {
    return SplitWeights::gradient_pair(span, i);
  }
  static __m256i store_pair(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256i even,
                            __m256i odd, const Pair& random) {
    const __m256i even_bits = dithered(floats(even), low_half(_mm256_srli_epi32(random.even, 8)));
    const __m256i odd_bits = dithered(floats(odd), low_half(_mm256_srli_epi32(random.odd, 8)));
    store_high_halves(at<std::uint16_t>(span.weight, i), even_bits, odd_bits);
    return _mm256_or_si256(non_finite(c, even_bits), non_finite(c, odd_bits));
  }
};

struct FloatWeights {
  static __m256 load_one(const AdamWSpan& span, std::int64_t i) {
    return load_floats(at<float>(span.weight, i));
  }
  static __m256 gradient(const AdamWSpan& span, std::int64_t i) {
    return load_floats(at<float>(span.gradient, i));
  }
  static __m256i store_one(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256 w) {
    _mm256_storeu_ps(at<float>(span.weight, i), w);
    return non_finite(c, bits_of(w));
  }
  static Pair load_pair(const AdamWSpan& span, std::int64_t i) {
    return load_float_pair(at<float>(span.weight, i));
  }
  static Pair gradient_pair(const AdamWSpan& span, std::int64_t i) {
    return load_float_pair(at<float>(span.gradient, i));
  }
  static __m256i store_pair(const Constants& c, const AdamWSpan& span, std::int64_t i, __m256i even,
                            __m256i odd, const Pair&) {
    store_float_pair(at<float>(span.weight, i), even, odd);
    return _mm256_or_si256(non_finite(c, even), non_finite(c, odd));
  }
};

template <class Weights>
inline __m256i with_float_moments(const Constants& c, const AdamWSpan& span, std::int64_t i) {
  __m256 m = load_floats(at<float>(span.exp_avg, i));
  __m256 v = load_floats(at<float>(span.exp_avg_sq, i));
  const __m256 w = updated_weight(c, Weights::load_one(span, i), Weights::gradient(span, i), m, v);
  _mm256_storeu_ps(at<float>(span.exp_avg, i), m);
  _mm256_storeu_ps(at<float>(span.exp_avg_sq, i), v);
  return Weights::store_one(c, span, i, w);
}

// Moments of a pair: in, updated, the weights written, out.
template <class Weights>
inline __m256i update_pair(const Constants& c, const AdamWSpan& span, std::int64_t i, const Pair& random,
                           Pair& m, Pair& v) {
  const Pair w = Weights::load_pair(span, i), g = Weights::gradient_pair(span, i);
  __m256 m_even = floats(m.even), m_odd = floats(m.odd), v_even = floats(v.even), v_odd = floats(v.odd);
  const __m256 even = updated_weight(c, floats(w.even), floats(g.even), m_even, v_even);
  const __m256 odd = updated_weight(c, floats(w.odd), floats(g.odd), m_odd, v_odd);
  m = {bits_of(m_even), bits_of(m_odd)};
  v = {bits_of(v_even), bits_of(v_odd)};
  return Weights::store_pair(c, span, i, bits_of(even), bits_of(odd), random);
}

template <class Weights>
inline __m256i with_bf16_moments(const Constants& c, const AdamWSpan& span, std::int64_t i) {
  std::uint16_t* const exp_avg = at<std::uint16_t>(span.exp_avg, i);
  std::uint16_t* const exp_avg_sq = at<std::uint16_t>(span.exp_avg_sq, i);
  const Pair random = random_pair(c, span.first + i);
  Pair m = load_bf16_pair(exp_avg), v = load_bf16_pair(exp_avg_sq);
  const __m256i bad = update_pair<Weights>(c, span, i, random, m, v);
  store_high_halves(exp_avg, dithered(floats(m.even), high_half(random.even)),
                    dithered(floats(m.odd), high_half(random.odd)));
  store_high_halves(exp_avg_sq, dithered(floats(v.even), low_half(random.even)),
                    dithered(floats(v.odd), low_half(random.odd)));
  return bad;
}

// SmallFloat of adamw_math.h for one block.
template <int kMantissa>
struct BlockCode {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr int kField = ((16 << kMantissa) - 1) << kShift;  // of a code, in its place
  __m256i base;

  static BlockCode of(unsigned exponent) {
    const unsigned used = exponent > 16 ? exponent : 16;
    return {_mm256_set1_epi32(static_cast<int>((used - 15) << 23))};
  }
  static unsigned exponent(__m256i largest) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1));
    const auto bits = static_cast<unsigned>(_mm_cvtsi128_si32(x));
    if (bits >= 0x7f800000) return 255;
    const unsigned exponent = (bits + (1u << kShift) - 1) >> 23;
    return exponent > 16 ? exponent : 16;
  }
  // `code` in its place, perhaps with a sign above it.
  __m256i decode(__m256i code) const {
    const __m256i field = _mm256_and_si256(code, _mm256_set1_epi32(kField));
    const __m256i zero = _mm256_cmpeq_epi32(field, _mm256_setzero_si256());
    return _mm256_andnot_si256(zero, _mm256_add_epi32(code, base));
  }
  // In its place, not limited to the largest code, with what is to be cut off below.
  __m256i encode(__m256i magnitude, int smallest, __m256i random) const {
    const __m256i least = _mm256_set1_epi32(smallest << kShift);
    return _mm256_add_epi32(_mm256_max_epi32(_mm256_sub_epi32(magnitude, base), least), random);
  }
};

inline __m128i load_codes(const std::uint8_t* from) {
  prefetch(from);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
// Words of at most 255.
inline void store_codes(std::uint8_t* to, __m256i words) {
  const __m128i codes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), codes);
}

inline Pair decode_exp_avg(const BlockCode<3>& block, const std::uint8_t* from) {
  const __m256i words = _mm256_cvtepi8_epi16(load_codes(from));  // spreads the sign over the upper bits
  const __m256i wanted = _mm256_set1_epi32(static_cast<int>(0x87f00000u));
  return {block.decode(_mm256_and_si256(_mm256_slli_epi32(words, 20), wanted)),
          block.decode(_mm256_and_si256(_mm256_slli_epi32(words, 4), wanted))};
}
inline Pair decode_exp_avg_sq(const BlockCode<4>& block, const std::uint8_t* from) {
  const __m256i words = _mm256_cvtepu8_epi16(load_codes(from));
  const __m256i odd = _mm256_and_si256(_mm256_slli_epi32(words, 3), _mm256_set1_epi32(0x07f80000));
  return {block.decode(_mm256_slli_epi32(words, 19)), block.decode(odd)};
}
inline void encode_exp_avg(const BlockCode<3>& block, std::uint8_t* to, const Pair& m, const Pair& random) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const __m256i even =
      block.encode(_mm256_and_si256(m.even, magnitude), 0, _mm256_srli_epi32(random.even, 12));
  const __m256i odd = block.encode(_mm256_and_si256(m.odd, magnitude), 0, _mm256_srli_epi32(random.odd, 12));
  const __m256i codes = _mm256_blend_epi16(_mm256_srli_epi32(even, 20), _mm256_srli_epi32(odd, 4), kOddWords);
  const __m256i signs =
      _mm256_blend_epi16(_mm256_srli_epi32(m.even, 24), _mm256_srli_epi32(m.odd, 8), kOddWords);
  store_codes(to, _mm256_or_si256(_mm256_min_epu16(codes, _mm256_set1_epi16(0x7f)),
                                  _mm256_and_si256(signs, _mm256_set1_epi16(0x80))));
}
inline void encode_exp_avg_sq(const BlockCode<4>& block, std::uint8_t* to, const Pair& v,
                              const Pair& random) {
  const __m256i cut = _mm256_set1_epi32(0x7ffff), nothing = _mm256_setzero_si256();
  const __m256i even = block.encode(v.even, 1, _mm256_and_si256(random.even, cut));
  const __m256i odd = block.encode(v.odd, 1, _mm256_and_si256(random.odd, cut));
  const __m256i even_code =
      _mm256_andnot_si256(_mm256_cmpeq_epi32(v.even, nothing), _mm256_srli_epi32(even, 19));
  const __m256i odd_code = _mm256_andnot_si256(_mm256_cmpeq_epi32(v.odd, nothing), _mm256_srli_epi32(odd, 3));
  const __m256i codes = _mm256_blend_epi16(even_code, odd_code, kOddWords);
  store_codes(to, _mm256_min_epu16(codes, _mm256_set1_epi16(0xff)));
}

// One whole block from element `begin` on.
template <class Weights>
inline __m256i with_int8_moments(const Constants& c, const AdamWSpan& span, std::int64_t begin) {
  constexpr int kPairs = kMomentBlock / kPair;
  std::uint8_t& m_exponent = span.exp_avg_exponents[begin / kMomentBlock];
  std::uint8_t& v_exponent = span.exp_avg_sq_exponents[begin / kMomentBlock];
  std::uint8_t* const exp_avg = at<std::uint8_t>(span.exp_avg, begin);
  std::uint8_t* const exp_avg_sq = at<std::uint8_t>(span.exp_avg_sq, begin);
  const auto m_old = BlockCode<3>::of(m_exponent);
  const auto v_old = BlockCode<4>::of(v_exponent);
  Pair m[kPairs], v[kPairs], random[kPairs];
  __m256i m_largest = _mm256_setzero_si256(), v_largest = m_largest, bad = m_largest;
  for (int k = 0; k < kPairs; ++k) {
    const std::int64_t i = begin + k * kPair;
    random[k] = random_pair(c, span.first + i);
    m[k] = decode_exp_avg(m_old, exp_avg + k * kPair);
    v[k] = decode_exp_avg_sq(v_old, exp_avg_sq + k * kPair);
    bad = _mm256_or_si256(bad, update_pair<Weights>(c, span, i, random[k], m[k], v[k]));
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    m_largest = _mm256_max_epi32(m_largest, _mm256_and_si256(m[k].even, magnitude));
    m_largest = _mm256_max_epi32(m_largest, _mm256_and_si256(m[k].odd, magnitude));
    v_largest = _mm256_max_epi32(v_largest, _mm256_max_epi32(v[k].even, v[k].odd));
  }
  m_exponent = static_cast<std::uint8_t>(BlockCode<3>::exponent(m_largest));
  v_exponent = static_cast<std::uint8_t>(BlockCode<4>::exponent(v_largest));
  const auto m_new = BlockCode<3>::of(m_exponent);
  const auto v_new = BlockCode<4>::of(v_exponent);
  for (int k = 0; k < kPairs; ++k) {
    encode_exp_avg(m_new, exp_avg + k * kPair, m[k], random[k]);
    encode_exp_avg_sq(v_new, exp_avg_sq + k * kPair, v[k], random[k]);
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
      for (; i + kPair <= span.count; i += kPair) {
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
