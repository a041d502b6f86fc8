// AdamW with AVX-512 (F, BW, VL, DQ). With fp32 moments 16 parameters at a time, the end of a span
// under a mask; with narrower ones 32, those with even and those with odd indices, and the rest goes to
// the scalar variant, which gives the same bits. Compiled with wide flags: only intrinsics and
// functions internal to this file, since anything shared would be emitted with instructions that
// other CPUs lack.
//
// Narrow moments are bound by arithmetic, so what they do most is done with 16 bits a lane, and what
// happens only where a weight is not finite has a branch to itself.
#include <immintrin.h>

#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr std::int64_t kPair = 2 * kLanes;
constexpr __mmask16 kAll = 0xffff;
constexpr __mmask32 kOddWords = 0xaaaaaaaa;
constexpr int kNotFinite = 0x99;  // of vfpclass: NaN of both kinds, both infinities

inline __m512i bits_of(__m512 x) { return _mm512_castps_si512(x); }
inline __m512 floats(__m512i x) { return _mm512_castsi512_ps(x); }
inline __m512i dwords(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline __m512i words(unsigned x) { return _mm512_set1_epi16(static_cast<short>(x)); }
inline __m512i high_half(__m512i x) { return _mm512_srli_epi32(x, 16); }
inline __m512i low_half(__m512i x) { return _mm512_and_si512(x, dwords(0xffff)); }
// Bit by bit.
inline __m512i select(__m512i mask, __m512i set, __m512i clear) {
  return _mm512_ternarylogic_epi32(mask, set, clear, 0xca);
}
inline __mmask16 upper_half_not_finite(__m512i x) {
  // Without the sign bit: numbers from that size on, and NaN.
  return _mm512_cmpge_epu32_mask(_mm512_add_epi32(x, x), dwords(2 * kInfiniteUpperHalf));
}
inline __mmask16 not_finite(__m512i x) { return _mm512_fpclass_ps_mask(floats(x), kNotFinite); }

struct Constants {
  __m512 gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, negative_step_size,
      inverse_sqrt_bias_correction2, eps, no_way;
  __m512i exponent, second_key;
  std::uint32_t first_key;
};

inline Constants constants(const AdamWScalars& s) {
  return Constants{
      _mm512_set1_ps(s.gradient_scale),
      _mm512_set1_ps(s.beta1),
      _mm512_set1_ps(s.one_minus_beta1),
      _mm512_set1_ps(s.beta2),
      _mm512_set1_ps(s.one_minus_beta2),
      _mm512_set1_ps(s.decay),
      _mm512_set1_ps(s.negative_step_size),
      _mm512_set1_ps(s.inverse_sqrt_bias_correction2),
      _mm512_set1_ps(s.eps),
      _mm512_set1_ps(s.negative_step_size * 0.0f),
      dwords(0x7f800000),
      dwords(s.key.second),
      s.key.first,
  };
}

// Lanes that flush() keeps; the others become 0 where the value is used.
inline __mmask16 kept(const Constants& c, __m512 x) { return _mm512_test_epi32_mask(bits_of(x), c.exponent); }

struct Moment {
  __m512 value;
  __mmask16 kept;
  __m512 flushed() const { return _mm512_maskz_mov_ps(kept, value); }
};

inline __m512 updated_weight(const Constants& c, __m512 w, __m512 gradient, Moment& exp_avg,
                             Moment& exp_avg_sq) {
  const __m512 g = _mm512_mul_ps(gradient, c.gradient_scale);
  const __m512 m = _mm512_fmadd_ps(c.beta1, exp_avg.value, _mm512_mul_ps(c.one_minus_beta1, g));
  const __m512 decayed = _mm512_mul_ps(c.beta2, exp_avg_sq.value);
  const __m512 v = _mm512_fmadd_ps(_mm512_mul_ps(c.one_minus_beta2, g), g, decayed);
  exp_avg = {m, kept(c, m)};
  exp_avg_sq = {v, kept(c, v)};
  const __m512 root = _mm512_maskz_sqrt_ps(exp_avg_sq.kept, v);
  const __m512 d = _mm512_fmadd_ps(root, c.inverse_sqrt_bias_correction2, c.eps);
  // Of a moment that is 0 the way has the sign that its product has: a weight of -0 stays.
  const __m512 way = _mm512_mask_mul_ps(c.no_way, exp_avg.kept, c.negative_step_size, m);
  return _mm512_fmadd_ps(w, c.decay, _mm512_div_ps(way, d));
}

// random_of_two, from the terms of the Weyl sequence.
inline __m512i random_of_two(const Constants& c, __m512i x) {
  x = _mm512_ternarylogic_epi32(x, _mm512_srli_epi32(x, 15), c.second_key, 0x96);  // exclusive or of three
  x = _mm512_mullo_epi32(x, dwords(kMixing));
  return _mm512_xor_si512(x, high_half(x));
}
inline __m512i weyl_terms(const Constants& c, __m512i index_of_two) {
  return _mm512_add_epi32(dwords(c.first_key), _mm512_mullo_epi32(index_of_two, dwords(kWeyl)));
}
inline __m512i indices(std::int64_t first) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return _mm512_add_epi32(dwords(static_cast<std::uint32_t>(first)), lane);
}
// random_word of the 16 elements from `first` on.
inline __m512i random_words(const Constants& c, std::int64_t first) {
  const __m512i index = indices(first);
  const __m512i word = random_of_two(c, weyl_terms(c, _mm512_srli_epi32(index, 1)));
  return _mm512_mask_rol_epi32(word, _mm512_test_epi32_mask(index, dwords(1)), word, 16);
}
inline __m512i weight_random(__m512i word) { return low_half(_mm512_srli_epi32(word, 8)); }

// NaN is rounded with nothing added.
inline __m512i without_nan(__m512i x, __m512i random) {
  return _mm512_maskz_mov_epi32(_mm512_cmp_ps_mask(floats(x), floats(x), _CMP_ORD_Q), random);
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
// that few loads are under way without it: on 16 cores of a Sapphire Rapids kind updates are 13 % faster with
// fp32 moments, 16 to 23 % with bf16 and 14 % with 8-bit ones, and with half or twice the distance by less.
constexpr int kPrefetched = 2048;
inline void prefetch(const void* from) {
  _mm_prefetch(static_cast<const char*>(from) + kPrefetched, _MM_HINT_T0);
}

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

inline Pair from_bf16(__m512i both) {
  return {_mm512_slli_epi32(both, 16), _mm512_maskz_mov_epi16(kOddWords, both)};
}
inline __m512i high_halves(const Pair& x) {
  return _mm512_mask_mov_epi16(high_half(x.even), kOddWords, x.odd);
}
inline Pair operator+(const Pair& a, const Pair& b) {
  return {_mm512_add_epi32(a.even, b.even), _mm512_add_epi32(a.odd, b.odd)};
}
inline Pair without_nan(const Pair& x, const Pair& random) {
  return {without_nan(x.even, random.even), without_nan(x.odd, random.odd)};
}
inline __m512i load_words(const void* from) {
  prefetch(from);
  return _mm512_loadu_si512(from);
}
inline Pair load_float_pair(const float* from) {
  prefetch(from);
  prefetch(from + kLanes);
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + kLanes);
  return {_mm512_permutex2var_epi32(a, even, b),
          _mm512_permutex2var_epi32(a, _mm512_add_epi32(even, dwords(1)), b)};
}
inline void store_float_pair(float* to, const Pair& x) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, dwords(8));
  _mm512_storeu_si512(to, _mm512_permutex2var_epi32(x.even, low, x.odd));
  _mm512_storeu_si512(to + kLanes, _mm512_permutex2var_epi32(x.even, high, x.odd));
}

// Random words of the elements from an even one on, one vector for each pair.
class RandomPairs {
 public:
  RandomPairs(const Constants& c, std::int64_t first)
      : terms_(weyl_terms(c, indices(static_cast<std::uint32_t>(first) >> 1))) {}
  __m512i next(const Constants& c) {
    const __m512i word = random_of_two(c, terms_);
    terms_ = _mm512_add_epi32(terms_, dwords(std::uint32_t{kLanes} * kWeyl));
    return word;
  }

 private:
  __m512i terms_;
};

// How each format reads weights and gradients and writes weights. The stores return the lanes whose
// weight is not finite; a random word is that of both elements of a pair.
struct SplitWeights {
  static __m512 load(const UpdateSpan& span, __mmask16 lanes, std::int64_t i) {
    prefetch(span.low + i);
    const __m512i low = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(lanes, span.low + i));
    return floats(_mm512_add_epi32(bits_of(load_bf16(lanes, at<std::uint16_t>(span.weight, i))), low));
  }
  static __m512 gradient(const UpdateSpan& span, __mmask16 lanes, std::int64_t i) {
    return load_bf16(lanes, at<std::uint16_t>(span.gradient, i));
  }
  static __mmask16 store(const Constants&, const UpdateSpan& span, __mmask16 lanes, std::int64_t i,
                         __m512 w) {
    const __m512i bits = bits_of(w);
    store_16(lanes, at<std::uint16_t>(span.weight, i), high_half(_mm512_add_epi32(bits, dwords(0x8000))));
    store_16(lanes, span.low + i, bits);
    return upper_half_not_finite(bits);
  }
  // The halves side by side with the low one's sign flipped, less that: what the low half takes from the
  // high one is borrowed.
  static Pair load_pair(const UpdateSpan& span, std::int64_t i) {
    const __m512i high = load_words(at<std::uint16_t>(span.weight, i));
    const __m512i low = _mm512_xor_si512(load_words(span.low + i), words(0x8000));
    const __m512i lower = dwords(0xffff);
    return Pair{select(lower, low, _mm512_slli_epi32(high, 16)), select(lower, high_half(low), high)} +
           Pair{dwords(0xffff8000), dwords(0xffff8000)};
  }
  static Pair gradient_pair(const UpdateSpan& span, std::int64_t i) {
    return from_bf16(load_words(at<std::uint16_t>(span.gradient, i)));
  }
  static unsigned store_pair(const UpdateSpan& span, std::int64_t i, const Pair& w, __m512i) {
    _mm512_storeu_si512(at<std::uint16_t>(span.weight, i),
                        high_halves(w + Pair{dwords(0x8000), dwords(0x8000)}));
    _mm512_storeu_si512(span.low + i, _mm512_mask_mov_epi16(w.even, kOddWords, _mm512_slli_epi32(w.odd, 16)));
    return upper_half_not_finite(w.even) | upper_half_not_finite(w.odd);
  }
};

struct Bf16Weights {
  static __m512 load(const UpdateSpan& span, __mmask16 lanes, std::int64_t i) {
    return load_bf16(lanes, at<std::uint16_t>(span.weight, i));
  }
  static __m512 gradient(const UpdateSpan& span, __mmask16 lanes, std::int64_t i) {
    return SplitWeights::gradient(span, lanes, i);
  }
  static __mmask16 store(const Constants& c, const UpdateSpan& span, __mmask16 lanes, std::int64_t i,
                         __m512 w) {
    const __m512i random = weight_random(random_words(c, span.first + i));
    const __m512i bits = _mm512_add_epi32(bits_of(w), without_nan(bits_of(w), random));
    store_16(lanes, at<std::uint16_t>(span.weight, i), high_half(bits));
    return not_finite(bits);
  }
  static Pair load_pair(const UpdateSpan& span, std::int64_t i) {
    return from_bf16(load_words(at<std::uint16_t>(span.weight, i)));
  }
  static Pair gradient_pair(const UpdateSpan& span, std::int64_t i) {
    return SplitWeights::gradient_pair(span, i);
  }
  static unsigned store_pair(const UpdateSpan& span, std::int64_t i, const Pair& w, __m512i random) {
    Pair added{weight_random(random), low_half(_mm512_rol_epi32(random, 8))};
    if ((not_finite(w.even) | not_finite(w.odd)) != 0) [[unlikely]]
      added = without_nan(w, added);
    const Pair bits = w + added;
    _mm512_storeu_si512(at<std::uint16_t>(span.weight, i), high_halves(bits));
    return not_finite(bits.even) | not_finite(bits.odd);
  }
};

struct FloatWeights {
  static __m512 load(const UpdateSpan& span, __mmask16 lanes, std::int64_t i) {
    return load_floats(lanes, at<float>(span.weight, i));
  }
  static __m512 gradient(const UpdateSpan& span, __mmask16 lanes, std::int64_t i) {
    return load_floats(lanes, at<float>(span.gradient, i));
  }
  static __mmask16 store(const Constants&, const UpdateSpan& span, __mmask16 lanes, std::int64_t i,
                         __m512 w) {
    _mm512_mask_storeu_ps(at<float>(span.weight, i), lanes, w);
    return not_finite(bits_of(w));
  }
  static Pair load_pair(const UpdateSpan& span, std::int64_t i) {
    return load_float_pair(at<float>(span.weight, i));
  }
  static Pair gradient_pair(const UpdateSpan& span, std::int64_t i) {
    return load_float_pair(at<float>(span.gradient, i));
  }
  static unsigned store_pair(const UpdateSpan& span, std::int64_t i, const Pair& w, __m512i) {
    store_float_pair(at<float>(span.weight, i), w);
    return not_finite(w.even) | not_finite(w.odd);
  }
};

template <class Weights>
inline unsigned with_float_moments(const Constants& c, const UpdateSpan& span, __mmask16 lanes,
                                   std::int64_t i) {
  float* const exp_avg = at<float>(span.exp_avg, i);
  float* const exp_avg_sq = at<float>(span.exp_avg_sq, i);
  Moment m{load_floats(lanes, exp_avg), kAll}, v{load_floats(lanes, exp_avg_sq), kAll};
  const __m512 w = updated_weight(c, Weights::load(span, lanes, i), Weights::gradient(span, lanes, i), m, v);
  _mm512_mask_storeu_ps(exp_avg, lanes, m.flushed());
  _mm512_mask_storeu_ps(exp_avg_sq, lanes, v.flushed());
  return lanes & Weights::store(c, span, lanes, i, w);
}

// Both moments of a pair of vectors, as bf16.
struct Moments {
  __m512i exp_avg, exp_avg_sq;
};

// Flushed and rounded, with random bits added below what is kept.
inline __m512i rounded(const Moment& even, const Moment& odd, const Pair& random) {
  return high_halves({_mm512_maskz_add_epi32(even.kept, bits_of(even.value), random.even),
                      _mm512_maskz_add_epi32(odd.kept, bits_of(odd.value), random.odd)});
}
inline Pair without_nan(const Moment& even, const Moment& odd, const Pair& random) {
  return without_nan({bits_of(even.value), bits_of(odd.value)}, random);
}

// Weights in memory and the moments of 32 elements; adds to `bad` where a weight is not finite.
template <class Weights>
inline Moments updated(const Constants& c, const UpdateSpan& span, std::int64_t i, const Moments& old,
                       __m512i random, unsigned& bad) {
  const Pair w = Weights::load_pair(span, i), g = Weights::gradient_pair(span, i);
  const Pair m = from_bf16(old.exp_avg), v = from_bf16(old.exp_avg_sq);
  Moment m_even{floats(m.even), kAll}, m_odd{floats(m.odd), kAll};
  Moment v_even{floats(v.even), kAll}, v_odd{floats(v.odd), kAll};
  const __m512 even = updated_weight(c, floats(w.even), floats(g.even), m_even, v_even);
  const __m512 odd = updated_weight(c, floats(w.odd), floats(g.odd), m_odd, v_odd);
  const Pair m_random{high_half(random), low_half(random)}, v_random{m_random.odd, m_random.even};
  Moments now{rounded(m_even, m_odd, m_random), rounded(v_even, v_odd, v_random)};
  const unsigned here = Weights::store_pair(span, i, {bits_of(even), bits_of(odd)}, random);
  if (here != 0) [[unlikely]] {  // a moment that is NaN makes the weight so
    bad = here;
    now = {rounded(m_even, m_odd, without_nan(m_even, m_odd, m_random)),
           rounded(v_even, v_odd, without_nan(v_even, v_odd, v_random))};
  }
  return now;
}

template <class Weights>
inline void with_bf16_moments(const Constants& c, const UpdateSpan& span, std::int64_t i, RandomPairs& random,
                              unsigned& bad) {
  void* const exp_avg = at<std::uint16_t>(span.exp_avg, i);
  void* const exp_avg_sq = at<std::uint16_t>(span.exp_avg_sq, i);
  const Moments old{load_words(exp_avg), load_words(exp_avg_sq)};
  const Moments moments = updated<Weights>(c, span, i, old, random.next(c), bad);
  _mm512_storeu_si512(exp_avg, moments.exp_avg);
  _mm512_storeu_si512(exp_avg_sq, moments.exp_avg_sq);
}

// SmallFloat of adamw_math.h for one block, 32 elements at a time.
template <int kMantissa>
struct BlockCode {
  static constexpr int kShift = 7 - kMantissa;
  static constexpr unsigned kField = ((16u << kMantissa) - 1) << kShift;  // of a code, in its place
  __m512i base;

  static BlockCode of(unsigned exponent) { return {words(((exponent > 16 ? exponent : 16) - 15) << 7)}; }
  static std::uint8_t exponent(__m512i sizes) {
    const __m256i x = _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
    const __m128i y = _mm_max_epu16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(y, _mm_set1_epi32(-1)));
    const unsigned largest = 0xffff ^ static_cast<unsigned>(_mm_extract_epi16(smallest, 0));
    const unsigned exponent = (largest + (1u << kShift) - 1) >> 7;
    return static_cast<std::uint8_t>(exponent < 16 ? 16 : exponent < 255 ? exponent : 255);
  }
  // `code` in its place, perhaps with a sign above it.
  __m512i decode(__m512i code) const {
    return _mm512_maskz_add_epi16(_mm512_test_epi16_mask(code, words(kField)), code, base);
  }
  // Not limited to the largest code.
  __m512i encode(__m512i size, __m512i least, __m512i random) const {
    const __m512i above = _mm512_max_epu16(_mm512_subs_epu16(size, base), least);
    return _mm512_srli_epi16(_mm512_add_epi16(above, random), kShift);
  }
};

inline __m256i load_codes(const std::uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}
// 64 codes whose halves are interleaved by 128 bits, as the packing instructions leave them.
inline void store_codes(std::uint8_t* to, __m512i codes) {
  _mm512_storeu_si512(to, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), codes));
}

// One whole block from element `begin` on.
template <class Weights>
inline void with_int8_moments(const Constants& c, const UpdateSpan& span, std::int64_t begin,
                              RandomPairs& random, unsigned& bad) {
  constexpr int kPairs = kMomentBlock / kPair;
  std::uint8_t& m_exponent = span.exp_avg_exponents[begin / kMomentBlock];
  std::uint8_t& v_exponent = span.exp_avg_sq_exponents[begin / kMomentBlock];
  std::uint8_t* const exp_avg = at<std::uint8_t>(span.exp_avg, begin);
  std::uint8_t* const exp_avg_sq = at<std::uint8_t>(span.exp_avg_sq, begin);
  const auto m_old = BlockCode<3>::of(m_exponent);
  const auto v_old = BlockCode<4>::of(v_exponent);
  const __m512i magnitude = words(0x7fff);
  Moments moments[kPairs];
  __m512i code_random[kPairs];
  __m512i m_sizes = _mm512_setzero_si512(), v_sizes = m_sizes;
#pragma GCC unroll 4
  for (int k = 0; k < kPairs; ++k) {
    if (k % 2 == 0) prefetch(exp_avg + k * kPair), prefetch(exp_avg_sq + k * kPair);
    const __m512i m_code = _mm512_cvtepi8_epi16(load_codes(exp_avg + k * kPair));  // the sign above it
    const __m512i v_code = _mm512_cvtepu8_epi16(load_codes(exp_avg_sq + k * kPair));
    const Moments old{m_old.decode(_mm512_and_si512(_mm512_slli_epi16(m_code, 4), words(0x87f0))),
                      v_old.decode(_mm512_slli_epi16(v_code, 3))};
    code_random[k] = random.next(c);
    moments[k] = updated<Weights>(c, span, begin + k * kPair, old, code_random[k], bad);
    m_sizes = _mm512_max_epu16(m_sizes, _mm512_and_si512(moments[k].exp_avg, magnitude));
    v_sizes = _mm512_max_epu16(v_sizes, moments[k].exp_avg_sq);
  }
  m_exponent = BlockCode<3>::exponent(m_sizes);
  v_exponent = BlockCode<4>::exponent(v_sizes);
  const auto m_new = BlockCode<3>::of(m_exponent);
  const auto v_new = BlockCode<4>::of(v_exponent);
  __m512i m_codes[kPairs], v_codes[kPairs];
#pragma GCC unroll 4
  for (int k = 0; k < kPairs; ++k) {
    const __m512i m = _mm512_and_si512(moments[k].exp_avg, magnitude), v = moments[k].exp_avg_sq;
    m_codes[k] = m_new.encode(m, _mm512_setzero_si512(), _mm512_srli_epi16(code_random[k], 12));
    // Above 0, a second moment is at least the smallest code.
    v_codes[k] = v_new.encode(v, _mm512_min_epu16(v, words(8)), _mm512_and_si512(code_random[k], words(7)));
  }
#pragma GCC unroll 2
  for (int k = 0; k < kPairs; k += 2) {  // packing limits to the largest code
    const __m512i sizes = _mm512_packs_epi16(m_codes[k], m_codes[k + 1]);
    const __m512i signs = _mm512_packs_epi16(moments[k].exp_avg, moments[k + 1].exp_avg);
    store_codes(exp_avg + k * kPair, select(dwords(0x80808080), signs, sizes));
    store_codes(exp_avg_sq + k * kPair, _mm512_packus_epi16(v_codes[k], v_codes[k + 1]));
  }
}

inline __mmask16 first_lanes(std::int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

template <class Weights>
bool with_weights(const AdamWScalars& scalars, const UpdateSpan& span) {
  if (span.count > 0 && span.first % 2 != 0 &&
      span.moment_format == MomentFormat::kBf16) {  // pairs begin at even indices
    UpdateSpan one = span;
    one.count = 1;
    const bool finite = adamw_scalar(scalars, one);
    return with_weights<Weights>(scalars, rest_of(span, 1)) && finite;
  }
  const Constants c = constants(scalars);
  RandomPairs random(c, span.first);
  unsigned bad = 0;
  std::int64_t i = 0;
  switch (span.moment_format) {
    case MomentFormat::kInt8:
      for (; i + kMomentBlock <= span.count; i += kMomentBlock) {
        with_int8_moments<Weights>(c, span, i, random, bad);
      }
      break;
    case MomentFormat::kBf16:
      for (; i + kPair <= span.count; i += kPair) with_bf16_moments<Weights>(c, span, i, random, bad);
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

bool adamw_avx512(const AdamWScalars& scalars, const UpdateSpan& span) {
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
