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
  __m256 gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, negative_step_size,
      inverse_sqrt_bias_correction2, eps;
  __m256i exponent, second_key;
  std::uint32_t first_key;
};

inline __m256i dwords(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline __m256i words(unsigned x) { return _mm256_set1_epi16(static_cast<short>(x)); }

inline Constants constants(const AdamWScalars& s) {
  return Constants{
      _mm256_set1_ps(s.gradient_scale),
      _mm256_set1_ps(s.beta1),
      _mm256_set1_ps(s.one_minus_beta1),
      _mm256_set1_ps(s.beta2),
      _mm256_set1_ps(s.one_minus_beta2),
      _mm256_set1_ps(s.decay),
      _mm256_set1_ps(s.negative_step_size),
      _mm256_set1_ps(s.inverse_sqrt_bias_correction2),
      _mm256_set1_ps(s.eps),
      dwords(0x7f800000),
      dwords(s.key.second),
      s.key.first,
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

// The same for the upper half of a split master.
inline __m256i upper_half_not_finite(__m256i x) {
  const __m256i size = _mm256_and_si256(x, dwords(0x7fffffff));
  return _mm256_cmpgt_epi32(size, dwords(kInfiniteUpperHalf - 1));
}

inline __m256 updated_weight(const Constants& c, __m256 w, __m256 gradient, __m256& exp_avg,
                             __m256& exp_avg_sq) {
  const __m256 g = _mm256_mul_ps(gradient, c.gradient_scale);
  const __m256 m = flush(c, _mm256_fmadd_ps(c.beta1, exp_avg, _mm256_mul_ps(c.one_minus_beta1, g)));
  const __m256 kept = _mm256_mul_ps(c.beta2, exp_avg_sq);
  const __m256 v = flush(c, _mm256_fmadd_ps(_mm256_mul_ps(c.one_minus_beta2, g), g, kept));
  const __m256 d = _mm256_fmadd_ps(_mm256_sqrt_ps(v), c.inverse_sqrt_bias_correction2, c.eps);
  exp_avg = m;
  exp_avg_sq = v;
  return _mm256_fmadd_ps(w, c.decay, _mm256_div_ps(_mm256_mul_ps(c.negative_step_size, m), d));
}

// random_of_two, from the terms of the Weyl sequence.
inline __m256i random_of_two(const Constants& c, __m256i x) {
  x = _mm256_xor_si256(x, _mm256_srli_epi32(x, 15));
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, c.second_key), dwords(kMixing));
  return _mm256_xor_si256(x, high_half(x));
}
inline __m256i weyl_terms(const Constants& c, __m256i index_of_two) {
  return _mm256_add_epi32(dwords(c.first_key), _mm256_mullo_epi32(index_of_two, dwords(kWeyl)));
}
inline __m256i indices(std::int64_t first) {
  return _mm256_add_epi32(dwords(static_cast<std::uint32_t>(first)),
                          _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline __m256i swapped_halves(__m256i x) {
  return _mm256_or_si256(_mm256_slli_epi32(x, 16), _mm256_srli_epi32(x, 16));
}
// random_word of the 8 elements from `first` on.
inline __m256i random_words(const Constants& c, std::int64_t first) {
  const __m256i index = indices(first);
  const __m256i word = random_of_two(c, weyl_terms(c, _mm256_srli_epi32(index, 1)));
  const __m256i odd = _mm256_slli_epi32(index, 31);
  return bits_of(_mm256_blendv_ps(floats(word), floats(swapped_halves(word)), floats(odd)));
}
inline __m256i weight_random(__m256i word) { return low_half(_mm256_srli_epi32(word, 8)); }

// NaN is rounded with nothing added.
inline __m256i without_nan(__m256i x, __m256i random) {
  return _mm256_and_si256(bits_of(_mm256_cmp_ps(floats(x), floats(x), _CMP_ORD_Q)), random);
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
// that few loads are under way without it; adamw_avx512.cpp says what it gains.
constexpr int kPrefetched = 2048;
inline void prefetch(const void* from) {
  _mm_prefetch(static_cast<const char*>(from) + kPrefetched, _MM_HINT_T0);
}

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

inline Pair from_bf16(__m256i both) {
  return {_mm256_slli_epi32(both, 16), _mm256_blend_epi16(_mm256_setzero_si256(), both, kOddWords)};
}
inline __m256i high_halves(const Pair& x) { return _mm256_blend_epi16(high_half(x.even), x.odd, kOddWords); }
inline Pair operator+(const Pair& a, const Pair& b) {
  return {_mm256_add_epi32(a.even, b.even), _mm256_add_epi32(a.odd, b.odd)};
}
inline Pair without_nan(const Pair& x, const Pair& random) {
  return {without_nan(x.even, random.even), without_nan(x.odd, random.odd)};
}
inline __m256i load_words(const void* from) {
  prefetch(from);
  return load(from);
}
inline Pair load_float_pair(const float* from) {
  prefetch(from);
  const __m256 a = _mm256_loadu_ps(from), b = _mm256_loadu_ps(from + kLanes);
  const __m256i even = bits_of(_mm256_shuffle_ps(a, b, 0x88)), odd = bits_of(_mm256_shuffle_ps(a, b, 0xdd));
  return {_mm256_permute4x64_epi64(even, 0xd8), _mm256_permute4x64_epi64(odd, 0xd8)};
}
inline void store_float_pair(float* to, const Pair& x) {
  const __m256i low = _mm256_unpacklo_epi32(x.even, x.odd), high = _mm256_unpackhi_epi32(x.even, x.odd);
  store(to, _mm256_permute2x128_si256(low, high, 0x20));
  store(to + kLanes, _mm256_permute2x128_si256(low, high, 0x31));
}

// Random words of the elements from an even one on, one vector for each pair.
class RandomPairs {
 public:
  RandomPairs(const Constants& c, std::int64_t first)
      : terms_(weyl_terms(c, indices(static_cast<std::uint32_t>(first) >> 1))) {}
  __m256i next(const Constants& c) {
    const __m256i word = random_of_two(c, terms_);
    terms_ = _mm256_add_epi32(terms_, dwords(std::uint32_t{kLanes} * kWeyl));
    return word;
  }

 private:
  __m256i terms_;
};

// How each format reads weights and gradients and writes weights. store_one returns what is not finite
// where the stored weight is not, store_pair all ones in such lanes; a random word is that of both elements
// of a pair.
struct SplitWeights {
  static __m256 load_one(const UpdateSpan& span, std::int64_t i) {
    prefetch(span.low + i);
    const __m256i low =
        _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(span.low + i)));
    return floats(_mm256_add_epi32(bits_of(load_bf16(at<std::uint16_t>(span.weight, i))), low));
  }
  static __m256 gradient(const UpdateSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.gradient, i));
  }
  static __m256 store_one(const Constants&, const UpdateSpan& span, std::int64_t i, __m256 w) {
    const __m256i bits = bits_of(w);
    store_16(at<std::uint16_t>(span.weight, i), high_half(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000))));
    store_16(span.low + i, low_half(bits));
    return _mm256_or_ps(w, floats(upper_half_not_finite(bits)));
  }
  // The halves side by side with the low one's sign flipped, less that: what the low half takes from the
  // high one is borrowed.
  static Pair load_pair(const UpdateSpan& span, std::int64_t i) {
    const __m256i high = load_words(at<std::uint16_t>(span.weight, i));
    const __m256i low = _mm256_xor_si256(load_words(span.low + i), words(0x8000));
    return Pair{_mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), kOddWords),
                _mm256_blend_epi16(high_half(low), high, kOddWords)} +
           Pair{dwords(0xffff8000), dwords(0xffff8000)};
  }
  static Pair gradient_pair(const UpdateSpan& span, std::int64_t i) {
    return from_bf16(load_words(at<std::uint16_t>(span.gradient, i)));
  }
  static __m256i store_pair(const Constants&, const UpdateSpan& span, std::int64_t i, const Pair& w,
                            __m256i) {
    store(at<std::uint16_t>(span.weight, i), high_halves(w + Pair{dwords(0x8000), dwords(0x8000)}));
    store(span.low + i, _mm256_blend_epi16(w.even, _mm256_slli_epi32(w.odd, 16), kOddWords));
    return _mm256_or_si256(upper_half_not_finite(w.even), upper_half_not_finite(w.odd));
  }
};

struct Bf16Weights {
  static __m256 load_one(const UpdateSpan& span, std::int64_t i) {
    return load_bf16(at<std::uint16_t>(span.weight, i));
  }
  static __m256 gradient(const UpdateSpan& span, std::int64_t i) { return SplitWeights::gradient(span, i); }
  static __m256 store_one(const Constants& c, const UpdateSpan& span, std::int64_t i, __m256 w) {
    const __m256i random = weight_random(random_words(c, span.first + i));
    const __m256i bits = _mm256_add_epi32(bits_of(w), without_nan(bits_of(w), random));
    store_16(at<std::uint16_t>(span.weight, i), high_half(bits));
    return floats(bits);
  }
  static Pair load_pair(const UpdateSpan& span, std::int64_t i) {
    return from_bf16(load_words(at<std::uint16_t>(span.weight, i)));
  }
  static Pair gradient_pair(const UpdateSpan& span, std::int64_t i) {
    return SplitWeights::gradient_pair(span, i);
  }
  static __m256i store_pair(const Constants& c, const UpdateSpan& span, std::int64_t i, const Pair& w,
                            __m256i random) {
    const Pair bits = w + without_nan(w, {weight_random(random), weight_random(swapped_halves(random))});
    store(at<std::uint16_t>(span.weight, i), high_halves(bits));
    return _mm256_or_si256(non_finite(c, bits.even), non_finite(c, bits.odd));
  }
};

struct FloatWeights {
  static __m256 load_one(const UpdateSpan& span, std::int64_t i) {
    return load_floats(at<float>(span.weight, i));
  }
  static __m256 gradient(const UpdateSpan& span, std::int64_t i) {
    return load_floats(at<float>(span.gradient, i));
  }
  static __m256 store_one(const Constants&, const UpdateSpan& span, std::int64_t i, __m256 w) {
    _mm256_storeu_ps(at<float>(span.weight, i), w);
    return w;
  }
  static Pair load_pair(const UpdateSpan& span, std::int64_t i) {
    return load_float_pair(at<float>(span.weight, i));
  }
  static Pair gradient_pair(const UpdateSpan& span, std::int64_t i) {
    return load_float_pair(at<float>(span.gradient, i));
  }
  static __m256i store_pair(const Constants& c, const UpdateSpan& span, std::int64_t i, const Pair& w,
                            __m256i) {
    store_float_pair(at<float>(span.weight, i), w);
    return _mm256_or_si256(non_finite(c, w.even), non_finite(c, w.odd));
  }
};

template <class Weights>
inline __m256 with_float_moments(const Constants& c, const UpdateSpan& span, std::int64_t i) {
  __m256 m = load_floats(at<float>(span.exp_avg, i));
  __m256 v = load_floats(at<float>(span.exp_avg_sq, i));
  const __m256 w = updated_weight(c, Weights::load_one(span, i), Weights::gradient(span, i), m, v);
  _mm256_storeu_ps(at<float>(span.exp_avg, i), m);
  _mm256_storeu_ps(at<float>(span.exp_avg_sq, i), v);
  return Weights::store_one(c, span, i, w);
}

// Both moments of a pair of vectors, as bf16.
struct Moments {
  __m256i exp_avg, exp_avg_sq;
};

// Weights in memory and the moments of 16 elements; adds to `bad` where a weight is not finite.
template <class Weights>
inline Moments updated(const Constants& c, const UpdateSpan& span, std::int64_t i, const Moments& old,
                       __m256i random, __m256i& bad) {
  const Pair w = Weights::load_pair(span, i), g = Weights::gradient_pair(span, i);
  const Pair m = from_bf16(old.exp_avg), v = from_bf16(old.exp_avg_sq);
  __m256 m_even = floats(m.even), m_odd = floats(m.odd), v_even = floats(v.even), v_odd = floats(v.odd);
  const __m256 even = updated_weight(c, floats(w.even), floats(g.even), m_even, v_even);
  const __m256 odd = updated_weight(c, floats(w.odd), floats(g.odd), m_odd, v_odd);
  const __m256i here = Weights::store_pair(c, span, i, {bits_of(even), bits_of(odd)}, random);
  const Pair new_m{bits_of(m_even), bits_of(m_odd)}, new_v{bits_of(v_even), bits_of(v_odd)};
  Pair m_random{high_half(random), low_half(random)}, v_random{m_random.odd, m_random.even};
  if (!_mm256_testz_si256(here, here)) [[unlikely]] {  // a moment that is NaN makes the weight so
    bad = here;
    m_random = without_nan(new_m, m_random);
    v_random = without_nan(new_v, v_random);
  }
  return {high_halves(new_m + m_random), high_halves(new_v + v_random)};
}

template <class Weights>
inline void with_bf16_moments(const Constants& c, const UpdateSpan& span, std::int64_t i, RandomPairs& random,
                              __m256i& bad) {
  void* const exp_avg = at<std::uint16_t>(span.exp_avg, i);
  void* const exp_avg_sq = at<std::uint16_t>(span.exp_avg_sq, i);
  const Moments old{load_words(exp_avg), load_words(exp_avg_sq)};
  const Moments moments = updated<Weights>(c, span, i, old, random.next(c), bad);
  store(exp_avg, moments.exp_avg);
  store(exp_avg_sq, moments.exp_avg_sq);
}

// SmallFloat of adamw_math.h for one block, 16 elements at a time.
template <int kMantissa>
struct BlockCode {
  static constexpr int kShift = 7 - kMantissa;
  static constexpr unsigned kField = ((16u << kMantissa) - 1) << kShift;  // of a code, in its place
  __m256i base;

  static BlockCode of(unsigned exponent) { return {words(((exponent > 16 ? exponent : 16) - 15) << 7)}; }
  static std::uint8_t exponent(__m256i sizes) {
    const __m128i x = _mm_max_epu16(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
    const __m128i smallest = _mm_minpos_epu16(_mm_xor_si128(x, _mm_set1_epi32(-1)));
    const unsigned largest = 0xffff ^ static_cast<unsigned>(_mm_extract_epi16(smallest, 0));
    const unsigned exponent = (largest + (1u << kShift) - 1) >> 7;
    return static_cast<std::uint8_t>(exponent < 16 ? 16 : exponent < 255 ? exponent : 255);
  }
  // `code` in its place, perhaps with a sign above it.
  __m256i decode(__m256i code) const {
    const __m256i field = _mm256_and_si256(code, words(kField));
    const __m256i zero = _mm256_cmpeq_epi16(field, _mm256_setzero_si256());
    return _mm256_andnot_si256(zero, _mm256_add_epi16(code, base));
  }
  // Not limited to the largest code.
  __m256i encode(__m256i size, __m256i least, __m256i random) const {
    const __m256i above = _mm256_max_epu16(_mm256_subs_epu16(size, base), least);
    return _mm256_srli_epi16(_mm256_add_epi16(above, random), kShift);
  }
};

inline __m128i load_codes(const std::uint8_t* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}
// 32 codes whose halves are interleaved by 64 bits, as the packing instructions leave them.
inline void store_codes(std::uint8_t* to, __m256i codes) { store(to, _mm256_permute4x64_epi64(codes, 0xd8)); }

// One whole block from element `begin` on.
template <class Weights>
inline void with_int8_moments(const Constants& c, const UpdateSpan& span, std::int64_t begin,
                              RandomPairs& random, __m256i& bad) {
  constexpr int kPairs = kMomentBlock / kPair;
  std::uint8_t& m_exponent = span.exp_avg_exponents[begin / kMomentBlock];
  std::uint8_t& v_exponent = span.exp_avg_sq_exponents[begin / kMomentBlock];
  std::uint8_t* const exp_avg = at<std::uint8_t>(span.exp_avg, begin);
  std::uint8_t* const exp_avg_sq = at<std::uint8_t>(span.exp_avg_sq, begin);
  const auto m_old = BlockCode<3>::of(m_exponent);
  const auto v_old = BlockCode<4>::of(v_exponent);
  const __m256i magnitude = words(0x7fff);
  Moments moments[kPairs];
  __m256i code_random[kPairs];
  __m256i m_sizes = _mm256_setzero_si256(), v_sizes = m_sizes;
  for (int k = 0; k < kPairs; ++k) {
    if (k % 4 == 0) prefetch(exp_avg + k * kPair), prefetch(exp_avg_sq + k * kPair);
    const __m256i m_code = _mm256_cvtepi8_epi16(load_codes(exp_avg + k * kPair));  // the sign above it
    const __m256i v_code = _mm256_cvtepu8_epi16(load_codes(exp_avg_sq + k * kPair));
    const Moments old{m_old.decode(_mm256_and_si256(_mm256_slli_epi16(m_code, 4), words(0x87f0))),
                      v_old.decode(_mm256_slli_epi16(v_code, 3))};
    code_random[k] = random.next(c);
    moments[k] = updated<Weights>(c, span, begin + k * kPair, old, code_random[k], bad);
    m_sizes = _mm256_max_epu16(m_sizes, _mm256_and_si256(moments[k].exp_avg, magnitude));
    v_sizes = _mm256_max_epu16(v_sizes, moments[k].exp_avg_sq);
  }
  m_exponent = BlockCode<3>::exponent(m_sizes);
  v_exponent = BlockCode<4>::exponent(v_sizes);
  const auto m_new = BlockCode<3>::of(m_exponent);
  const auto v_new = BlockCode<4>::of(v_exponent);
  for (int k = 0; k < kPairs; k += 2) {
    __m256i m_codes[2], v_codes[2];
    for (int half = 0; half < 2; ++half) {
      const Moments& now = moments[k + half];
      const __m256i bits = code_random[k + half], m = _mm256_and_si256(now.exp_avg, magnitude);
      m_codes[half] = m_new.encode(m, _mm256_setzero_si256(), _mm256_srli_epi16(bits, 12));
      // Above 0, a second moment is at least the smallest code.
      v_codes[half] = v_new.encode(now.exp_avg_sq, _mm256_min_epu16(now.exp_avg_sq, words(8)),
                                   _mm256_and_si256(bits, words(7)));
    }
    // Packing limits to the largest code.
    const __m256i sizes = _mm256_packs_epi16(m_codes[0], m_codes[1]);
    const __m256i signs = _mm256_packs_epi16(moments[k].exp_avg, moments[k + 1].exp_avg);
    store_codes(exp_avg + k * kPair, _mm256_or_si256(sizes, _mm256_and_si256(signs, dwords(0x80808080))));
    store_codes(exp_avg_sq + k * kPair, _mm256_packus_epi16(v_codes[0], v_codes[1]));
  }
}

template <class Weights>
bool with_weights(const AdamWScalars& scalars, const UpdateSpan& span) {
  if (span.count > 0 && span.first % 2 != 0 && span.moment_format == MomentFormat::kBf16) {
    UpdateSpan one = span;  // pairs begin at even indices
    one.count = 1;
    const bool finite = adamw_scalar(scalars, one);
    return with_weights<Weights>(scalars, rest_of(span, 1)) && finite;
  }
  const Constants c = constants(scalars);
  RandomPairs random(c, span.first);
  __m256i bad = _mm256_setzero_si256();
  __m256 nothing = _mm256_setzero_ps();  // a sum of weights times 0: NaN once one is not finite
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
      for (; i + kLanes <= span.count; i += kLanes) {
        nothing = _mm256_fmadd_ps(with_float_moments<Weights>(c, span, i), _mm256_setzero_ps(), nothing);
      }
      bad = bits_of(_mm256_cmp_ps(nothing, nothing, _CMP_UNORD_Q));
      break;
  }
  return adamw_scalar(scalars, rest_of(span, i)) && _mm256_testz_si256(bad, bad);
}

}  // namespace

bool adamw_avx2(const AdamWScalars& scalars, const UpdateSpan& span) {
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
