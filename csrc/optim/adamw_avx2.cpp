// AdamW with AVX2 and FMA, 8 parameters at a time; the rest of a span goes to the scalar variant,
// which gives the same bits. Compiled with wide flags: only intrinsics and functions internal to
// this file, since anything shared would be emitted with instructions that other CPUs lack.
#include <immintrin.h>

#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

constexpr std::int64_t kLanes = 8;

struct Constants {
  __m256 gradient_scale, lerp_weight, lerp_from_gradient, beta2, one_minus_beta2, decay, negative_step_size,
      sqrt_bias_correction2, eps;
  __m256i exponent;
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
  };
}

inline __m256 flush(const Constants& c, __m256 x) {
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(x), c.exponent);
  const __m256i tiny = _mm256_cmpeq_epi32(exponent, _mm256_setzero_si256());
  return _mm256_andnot_ps(_mm256_castsi256_ps(tiny), x);
}

// All ones in the lanes that are infinite or NaN.
inline __m256i non_finite(const Constants& c, __m256 x) {
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_castps_si256(x), c.exponent), c.exponent);
}

inline __m256 updated_weight(const Constants& c, __m256 w, __m256 gradient, float* exp_avg,
                             float* exp_avg_sq) {
  const __m256 g = flush(c, _mm256_mul_ps(gradient, c.gradient_scale));
  const __m256 old_m = _mm256_loadu_ps(exp_avg);
  const __m256 start = _mm256_blendv_ps(old_m, g, c.lerp_from_gradient);
  const __m256 m = flush(c, _mm256_fmadd_ps(c.lerp_weight, _mm256_sub_ps(g, old_m), start));
  const __m256 kept = _mm256_mul_ps(c.beta2, _mm256_loadu_ps(exp_avg_sq));
  const __m256 v = flush(c, _mm256_fmadd_ps(_mm256_mul_ps(c.one_minus_beta2, g), g, kept));
  const __m256 d = _mm256_add_ps(_mm256_div_ps(_mm256_sqrt_ps(v), c.sqrt_bias_correction2), c.eps);
  _mm256_storeu_ps(exp_avg, m);
  _mm256_storeu_ps(exp_avg_sq, v);
  return _mm256_add_ps(_mm256_mul_ps(w, c.decay), _mm256_div_ps(_mm256_mul_ps(c.negative_step_size, m), d));
}

inline __m256i load_16(const void* from) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}

// The low 16 bits of each lane.
inline void store_16(void* to, __m256i x) {
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
  const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  _mm_storeu_si128(static_cast<__m128i*>(to), packed);
}

}  // namespace

bool adamw_split_avx2(const AdamWScalars& scalars, const AdamWSplitSpan& span) {
  const Constants c = constants(scalars);
  __m256i bad = _mm256_setzero_si256();
  std::int64_t i = 0;
#pragma GCC unroll 2
  for (; i + kLanes <= span.count; i += kLanes) {
    const __m256i high = _mm256_slli_epi32(load_16(span.high + i), 16);
    const __m256i low =
        _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(span.low + i)));
    const __m256 old_w = _mm256_castsi256_ps(_mm256_add_epi32(high, low));
    const __m256 gradient = _mm256_castsi256_ps(_mm256_slli_epi32(load_16(span.gradient + i), 16));
    const __m256 w = updated_weight(c, old_w, gradient, span.exp_avg + i, span.exp_avg_sq + i);
    const __m256i bits = _mm256_castps_si256(w);
    store_16(span.high + i, _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x8000)), 16));
    store_16(span.low + i, bits);
    bad = _mm256_or_si256(bad, non_finite(c, w));
  }
  const AdamWSplitSpan rest{.high = span.high + i,
                            .low = span.low + i,
                            .gradient = span.gradient + i,
                            .exp_avg = span.exp_avg + i,
                            .exp_avg_sq = span.exp_avg_sq + i,
                            .count = span.count - i};
  return adamw_split_scalar(scalars, rest) && _mm256_testz_si256(bad, bad);
}

bool adamw_float_avx2(const AdamWScalars& scalars, const AdamWFloatSpan& span) {
  const Constants c = constants(scalars);
  __m256i bad = _mm256_setzero_si256();
  std::int64_t i = 0;
#pragma GCC unroll 2
  for (; i + kLanes <= span.count; i += kLanes) {
    const __m256 w = updated_weight(c, _mm256_loadu_ps(span.weight + i), _mm256_loadu_ps(span.gradient + i),
                                    span.exp_avg + i, span.exp_avg_sq + i);
    _mm256_storeu_ps(span.weight + i, w);
    bad = _mm256_or_si256(bad, non_finite(c, w));
  }
  const AdamWFloatSpan rest{.weight = span.weight + i,
                            .gradient = span.gradient + i,
                            .exp_avg = span.exp_avg + i,
                            .exp_avg_sq = span.exp_avg_sq + i,
                            .count = span.count - i};
  return adamw_float_scalar(scalars, rest) && _mm256_testz_si256(bad, bad);
}

}  // namespace megatrain
