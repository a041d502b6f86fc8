// AdamW with AVX-512 (F, BW, VL, DQ). With fp32 moments 16 parameters at a time, the end of a span
// under a mask; with narrower ones 32, those with even and those with odd indices, and the rest goes to
// the scalar variant, which gives the same bits. Compiled with wide flags: only intrinsics and
// functions internal to this file, since anything shared would be emitted with instructions that
// other CPUs lack.
#include <immintrin.h>

#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kPair = 2 * kLanes;
constexpr __mmask16 kAll = 0xffff;
constexpr __mmask32 kOddWords = 0xaaaaaaaa;

struct Constants {
  __m512 gradient_scale, lerp_weight, beta2, one_minus_beta2, decay, negative_step_size,
      sqrt_bias_correction2, eps;
  __m512i exponent, first_key, second_key;
  __mmask16 lerp_from_gradient;
};

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
      _mm512_set1_epi32(static_cast<int>(s.key.first)),
      _mm512_set1_epi32(static_cast<int>(s.key.second)),
      s.lerp_from_gradient ? kAll : __mmask16{0},
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

inline __m512i bits_of(__m512 x) { return _mm512_castps_si512(x); }
inline __m512 floats(__m512i x) { return _mm512_castsi512_ps(x); }
inline __m512i low_half(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi32(0xffff)); }
inline __m512i high_half(__m512i x) { return _mm512_srli_epi32(x, 16); }

// random_word of the elements with these indices.
inline __m512i random_words(const Constants& c, __m512i index) {
  __m512i x = _mm512_xor_si512(index, c.first_key);
  x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0x85ebca6bu)));
  x = _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 13), c.second_key, 0x96);  // exclusive or of three
  x = _mm512_mullo_epi32(x, _mm512_set1_epi32(static_cast<int>(0xc2b2ae35u)));
  return _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
}

// Bits of x with `random` added: to_bf16 takes the upper halves.
inline __m512i dithered(__m512 x, __m512i random) {
  return _mm512_mask_add_epi32(bits_of(x), _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), bits_of(x), random);
}

template <class T>
inline T* at(void* section, std::int64_t i) {
  return static_cast<T*>(section) + i;
}
template <class T>
inline const T* at(const void* section, std::int64_t i) {
  return static_cast<const T*>(section) + i;
}

// One line of a stream that is read soon. One iteration is long enough to fill the CPU's window, so
// that few loads are under way without it: on an EPYC of the Zen 4 kind one thread gains 10 % with
// fp32 moments, 30 % with bf16 and 18 % with 8-bit ones.
inline void prefetch(const void* from) { _mm_prefetch(static_cast<const char*>(from) + 1024, _MM_HINT_T0); }

inline __m512 load_bf16(__mmask16 lanes, const std::uint16_t* from) {
  prefetch(from);
  return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from)), 16));
}
inline __m512 load_floats(__mmask16 lanes, const float* from) {
  prefetch(from);
  return _mm512_maskz_loadu_ps(lanes, from);
}
inline void store_16(__mmask16 lanes, void* to, __m512i x) {
  _mm256_mask_storeu_epi16(to, lanes, _mm512_cvtepi32_epi16(x));
}

// Elements i + 2 * lane and i + 2 * lane + 1. 16-bit numbers come apart and together by shifts and
// masks of 32-bit lanes.
struct Pair {
  __m512i even, odd;
};

inline Pair load_bf16_pair(const std::uint16_t* from) {
  prefetch(from);
  const __m512i both = _mm512_loadu_si512(from);
  return {_mm512_slli_epi32(both, 16), _mm512_maskz_mov_epi16(kOddWords, both)};
}
inline void store_high_halves(void* to, __m512i even, __m512i odd) {
  _mm512_storeu_si512(to, _mm512_mask_mov_epi16(high_half(even), kOddWords, odd));
}
inline Pair load_float_pair(const float* from) {
  prefetch(from);
  prefetch(from + kLanes);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + kLanes);
  return {_mm512_permutex2var_epi32(a, even, b),
          _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, _mm512_set1_epi32(1)), b)};
}
inline void store_float_pair(float* to, __m512i even, __m512i odd) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi32(even, low, odd));
  _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi32(even, high, odd));
}
inline Pair random_pair(const Constants& c, std::int64_t index) {
  const __m512i lane = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i even = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(index)), lane);
  return {random_words(c, even), random_words(c, _mm512_add_epi32(even, _mm512_set1_epi32(1)))};
}

// How each format reads weights and gradients and writes weights. The stores return the lanes whose
// weight is not finite; the random words are those of the elements.
struct SplitWeights {
  static __m512 load(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    prefetch(span.low + i);
    const __m512i low = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(lanes, span.low + i));
    return floats(_mm512_add_epi32(bits_of(load_bf16(lanes, at<std::uint16_t>(span.weight, i))), low));
  }
  static __m512 gradient(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    return load_bf16(lanes, at<std::uint16_t>(span.gradient, i));
  }
  static __mmask16 store(const Constants& c, const AdamWSpan& span, __mmask16 lanes, std::int64_t i,
                         __m512 w) {
    const __m512i bits = bits_of(w);
    store_16(lanes, at<std::uint16_t>(span.weight, i),
             high_half(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000))));
    store_16(lanes, span.low + i, bits);
    return non_finite(c, bits);
  }
  static Pair load_pair(const AdamWSpan& span, std::int64_t i) {
    const Pair high = load_bf16_pair(at<std::uint16_t>(span.weight, i));
    prefetch(span.low + i);
    const __m512i lows = _mm512_loadu_si512(span.low + i);
    const __m512i even = _mm512_srai_epi32(_mm512_slli_epi32(lows, 16), 16),
                  odd = _mm512_srai_epi32(lows, 16);
    return {_mm512_add_epi32(high.even, even), _mm512_add_epi32(high.odd, odd)};
  }
  static Pair gradient_pair(const AdamWSpan& span, std::int64_t i) {
    return load_bf16_pair(at<std::uint16_t>(span.gradient, i));
  }
  static unsigned store_pair(const Constants& c, const AdamWSpan& span, std::int64_t i, __m512i even,
                             __m512i odd, const Pair&) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    store_high_halves(at<std::uint16_t>(span.weight, i), _mm512_add_epi32(even, half),
                      _mm512_add_epi32(odd, half));
    _mm512_storeu_si512(span.low + i, _mm512_mask_mov_epi16(even, kOddWords, _mm512_slli_epi32(odd, 16)));
    return non_finite(c, even) | non_finite(c, odd);
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
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(span.first + i)), lane);
    const __m512i bits = dithered(w, low_half(_mm512_srli_epi32(random_words(c, index), 8)));
    store_16(lanes, at<std::uint16_t>(span.weight, i), high_half(bits));
    return non_finite(c, bits);
  }
  static Pair load_pair(const AdamWSpan& span, std::int64_t i) {
    return load_bf16_pair(at<std::uint16_t>(span.weight, i));
  }
  static Pair gradient_pair(const AdamWSpan& span, std::int64_t i) {
    return SplitWeights::gradient_pair(span, i);
  }
  static unsigned store_pair(const Constants& c, const AdamWSpan& span, std::int64_t i, __m512i even,
                             __m512i odd, const Pair& random) {
    const __m512i even_bits = dithered(floats(even), low_half(_mm512_srli_epi32(random.even, 8)));
    const __m512i odd_bits = dithered(floats(odd), low_half(_mm512_srli_epi32(random.odd, 8)));
    store_high_halves(at<std::uint16_t>(span.weight, i), even_bits, odd_bits);
    return non_finite(c, even_bits) | non_finite(c, odd_bits);
  }
};

struct FloatWeights {
  static __m512 load(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    return load_floats(lanes, at<float>(span.weight, i));
  }
  static __m512 gradient(const AdamWSpan& span, __mmask16 lanes, std::int64_t i) {
    return load_floats(lanes, at<float>(span.gradient, i));
  }
  static __mmask16 store(const Constants& c, const AdamWSpan& span, __mmask16 lanes, std::int64_t i,
                         __m512 w) {
    _mm512_mask_storeu_ps(at<float>(span.weight, i), lanes, w);
    return non_finite(c, bits_of(w));
  }
  static Pair load_pair(const AdamWSpan& span, std::int64_t i) {
    return load_float_pair(at<float>(span.weight, i));
  }
  static Pair gradient_pair(const AdamWSpan& span, std::int64_t i) {
    return load_float_pair(at<float>(span.gradient, i));
  }
  static unsigned store_pair(const Constants& c, const AdamWSpan& span, std::int64_t i, __m512i even,
                             __m512i odd, const Pair&) {
    store_float_pair(at<float>(span.weight, i), even, odd);
    return non_finite(c, even) | non_finite(c, odd);
  }
};

template <class Weights>
inline __mmask16 with_float_moments(const Constants& c, const AdamWSpan& span, __mmask16 lanes,
                                    std::int64_t i) {
  float* const exp_avg = at<float>(span.exp_avg, i);
  float* const exp_avg_sq = at<float>(span.exp_avg_sq, i);
  __m512 m = load_floats(lanes, exp_avg), v = load_floats(lanes, exp_avg_sq);
  const __m512 w = updated_weight(c, Weights::load(span, lanes, i), Weights::gradient(span, lanes, i), m, v);
  _mm512_mask_storeu_ps(exp_avg, lanes, m);
  _mm512_mask_storeu_ps(exp_avg_sq, lanes, v);
  return static_cast<__mmask16>(lanes & Weights::store(c, span, lanes, i, w));
}

// Moments of a pair: in, updated, the weights written, out.
template <class Weights>
inline unsigned update_pair(const Constants& c, const AdamWSpan& span, std::int64_t i, const Pair& random,
                            Pair& m, Pair& v) {
  const Pair w = Weights::load_pair(span, i), g = Weights::gradient_pair(span, i);
  __m512 m_even = floats(m.even), m_odd = floats(m.odd), v_even = floats(v.even), v_odd = floats(v.odd);
  const __m512 even = updated_weight(c, floats(w.even), floats(g.even), m_even, v_even);
  const __m512 odd = updated_weight(c, floats(w.odd), floats(g.odd), m_odd, v_odd);
  m = {bits_of(m_even), bits_of(m_odd)};
  v = {bits_of(v_even), bits_of(v_odd)};
  return Weights::store_pair(c, span, i, bits_of(even), bits_of(odd), random);
}

template <class Weights>
inline unsigned with_bf16_moments(const Constants& c, const AdamWSpan& span, std::int64_t i) {
  std::uint16_t* const exp_avg = at<std::uint16_t>(span.exp_avg, i);
  std::uint16_t* const exp_avg_sq = at<std::uint16_t>(span.exp_avg_sq, i);
  const Pair random = random_pair(c, span.first + i);
  Pair m = load_bf16_pair(exp_avg), v = load_bf16_pair(exp_avg_sq);
  const unsigned bad = update_pair<Weights>(c, span, i, random, m, v);
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
  __m512i base;

  static BlockCode of(unsigned exponent) {
    const unsigned used = exponent > 16 ? exponent : 16;
    return {_mm512_set1_epi32(static_cast<int>((used - 15) << 23))};
  }
  static unsigned exponent(__m512i largest) {
    const auto bits = static_cast<unsigned>(_mm512_reduce_max_epi32(largest));
    if (bits >= 0x7f800000) return 255;
    const unsigned exponent = (bits + (1u << kShift) - 1) >> 23;
    return exponent > 16 ? exponent : 16;
  }
  // `code` in its place, perhaps with a sign above it.
  __m512i decode(__m512i code) const {
    const __mmask16 lanes = _mm512_test_epi32_mask(code, _mm512_set1_epi32(kField));
    return _mm512_maskz_add_epi32(lanes, code, base);
  }
  // In its place, not limited to the largest code, with what is to be cut off below.
  __m512i encode(__m512i magnitude, int smallest, __m512i random) const {
    const __m512i least = _mm512_set1_epi32(smallest << kShift);
    return _mm512_add_epi32(_mm512_max_epi32(_mm512_sub_epi32(magnitude, base), least), random);
  }
};

inline __m256i load_codes(const std::uint8_t* from) {
  prefetch(from);
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

inline Pair decode_exp_avg(const BlockCode<3>& block, const std::uint8_t* from) {
  const __m512i words = _mm512_cvtepi8_epi16(load_codes(from));  // spreads the sign over the upper bits
  const __m512i wanted = _mm512_set1_epi32(static_cast<int>(0x87f00000u));
  return {block.decode(_mm512_and_si512(_mm512_slli_epi32(words, 20), wanted)),
          block.decode(_mm512_and_si512(_mm512_slli_epi32(words, 4), wanted))};
}
inline Pair decode_exp_avg_sq(const BlockCode<4>& block, const std::uint8_t* from) {
  const __m512i words = _mm512_cvtepu8_epi16(load_codes(from));
  const __m512i odd = _mm512_and_si512(_mm512_slli_epi32(words, 3), _mm512_set1_epi32(0x07f80000));
  return {block.decode(_mm512_slli_epi32(words, 19)), block.decode(odd)};
}
inline void encode_exp_avg(const BlockCode<3>& block, std::uint8_t* to, const Pair& m, const Pair& random) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i even =
      block.encode(_mm512_and_si512(m.even, magnitude), 0, _mm512_srli_epi32(random.even, 12));
  const __m512i odd = block.encode(_mm512_and_si512(m.odd, magnitude), 0, _mm512_srli_epi32(random.odd, 12));
  __m512i words = _mm512_mask_mov_epi16(_mm512_srli_epi32(even, 20), kOddWords, _mm512_srli_epi32(odd, 4));
  words = _mm512_min_epu16(words, _mm512_set1_epi16(0x7f));
  const __m512i signs =
      _mm512_mask_mov_epi16(_mm512_srli_epi32(m.even, 24), kOddWords, _mm512_srli_epi32(m.odd, 8));
  words = _mm512_ternarylogic_epi32(words, signs, _mm512_set1_epi16(0x80), 0xf8);  // a | (b & c)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(words));
}
inline void encode_exp_avg_sq(const BlockCode<4>& block, std::uint8_t* to, const Pair& v,
                              const Pair& random) {
  const __m512i cut = _mm512_set1_epi32(0x7ffff);
  const __m512i even = block.encode(v.even, 1, _mm512_and_si512(random.even, cut));
  const __m512i odd = block.encode(v.odd, 1, _mm512_and_si512(random.odd, cut));
  const __m512i even_code = _mm512_maskz_srli_epi32(_mm512_test_epi32_mask(v.even, v.even), even, 19);
  const __m512i odd_code = _mm512_maskz_srli_epi32(_mm512_test_epi32_mask(v.odd, v.odd), odd, 3);
  const __m512i words = _mm512_mask_mov_epi16(even_code, kOddWords, odd_code);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtusepi16_epi8(words));  // limits
}

// One whole block from element `begin` on.
template <class Weights>
inline unsigned with_int8_moments(const Constants& c, const AdamWSpan& span, std::int64_t begin) {
  constexpr int kPairs = kMomentBlock / kPair;
  std::uint8_t& m_exponent = span.exp_avg_exponents[begin / kMomentBlock];
  std::uint8_t& v_exponent = span.exp_avg_sq_exponents[begin / kMomentBlock];
  std::uint8_t* const exp_avg = at<std::uint8_t>(span.exp_avg, begin);
  std::uint8_t* const exp_avg_sq = at<std::uint8_t>(span.exp_avg_sq, begin);
  const auto m_old = BlockCode<3>::of(m_exponent);
  const auto v_old = BlockCode<4>::of(v_exponent);
  Pair m[kPairs], v[kPairs], random[kPairs];
  __m512i m_largest = _mm512_setzero_si512(), v_largest = _mm512_setzero_si512();
  unsigned bad = 0;
#pragma GCC unroll 4
  for (int k = 0; k < kPairs; ++k) {
    const std::int64_t i = begin + k * kPair;
    random[k] = random_pair(c, span.first + i);
    m[k] = decode_exp_avg(m_old, exp_avg + k * kPair);
    v[k] = decode_exp_avg_sq(v_old, exp_avg_sq + k * kPair);
    bad |= update_pair<Weights>(c, span, i, random[k], m[k], v[k]);
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    m_largest = _mm512_max_epi32(m_largest, _mm512_and_si512(m[k].even, magnitude));
    m_largest = _mm512_max_epi32(m_largest, _mm512_and_si512(m[k].odd, magnitude));
    v_largest = _mm512_max_epi32(v_largest, _mm512_max_epi32(v[k].even, v[k].odd));
  }
  m_exponent = static_cast<std::uint8_t>(BlockCode<3>::exponent(m_largest));
  v_exponent = static_cast<std::uint8_t>(BlockCode<4>::exponent(v_largest));
  const auto m_new = BlockCode<3>::of(m_exponent);
  const auto v_new = BlockCode<4>::of(v_exponent);
#pragma GCC unroll 4
  for (int k = 0; k < kPairs; ++k) {
    encode_exp_avg(m_new, exp_avg + k * kPair, m[k], random[k]);
    encode_exp_avg_sq(v_new, exp_avg_sq + k * kPair, v[k], random[k]);
  }
  return bad;
}

inline __mmask16 first_lanes(std::int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

template <class Weights>
bool with_weights(const AdamWScalars& scalars, const AdamWSpan& span) {
  const Constants c = constants(scalars);
  unsigned bad = 0;
  std::int64_t i = 0;
  switch (span.moment_format) {
    case MomentFormat::kInt8:
      for (; i + kMomentBlock <= span.count; i += kMomentBlock) bad |= with_int8_moments<Weights>(c, span, i);
      break;
    case MomentFormat::kBf16:
      for (; i + kPair <= span.count; i += kPair) bad |= with_bf16_moments<Weights>(c, span, i);
      break;
    case MomentFormat::kFp32:
#pragma GCC unroll 2
      for (; i + kLanes <= span.count; i += kLanes) bad |= with_float_moments<Weights>(c, span, kAll, i);
      if (i < span.count) bad |= with_float_moments<Weights>(c, span, first_lanes(span.count - i), i);
      return bad == 0;
  }
  return adamw_scalar(scalars, rest_of(span, i)) && bad == 0;
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
