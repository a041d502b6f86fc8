// AdamW with AVX-512 (F, BW, VL, DQ), 16 parameters at a time, the end of a span under a mask.
// Compiled with wide flags: only intrinsics and functions internal to this file, since anything
// shared would be emitted with instructions that other CPUs lack.
#include <immintrin.h>

#include "optim/adamw_kernels.h"

namespace megatrain {
namespace {

constexpr std::int64_t kLanes = 16;
constexpr __mmask16 kAll = 0xffff;

struct Constants {
  __m512 gradient_scale, lerp_weight, beta2, one_minus_beta2, decay, negative_step_size,
      sqrt_bias_correction2, eps;
  __m512i exponent;
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
      s.lerp_from_gradient ? kAll : __mmask16{0},
  };
}

inline __m512 flush(const Constants& c, __m512 x) {
  return _mm512_maskz_mov_ps(_mm512_test_epi32_mask(_mm512_castps_si512(x), c.exponent), x);
}

inline __mmask16 non_finite(const Constants& c, __m512 x) {
  return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(x), c.exponent), c.exponent);
}

inline __m512 updated_weight(const Constants& c, __mmask16 lanes, __m512 w, __m512 gradient, float* exp_avg,
                             float* exp_avg_sq) {
  const __m512 g = flush(c, _mm512_mul_ps(gradient, c.gradient_scale));
  const __m512 old_m = _mm512_maskz_loadu_ps(lanes, exp_avg);
  const __m512 start = _mm512_mask_mov_ps(old_m, c.lerp_from_gradient, g);
  const __m512 m = flush(c, _mm512_fmadd_ps(c.lerp_weight, _mm512_sub_ps(g, old_m), start));
  const __m512 kept = _mm512_mul_ps(c.beta2, _mm512_maskz_loadu_ps(lanes, exp_avg_sq));
  const __m512 v = flush(c, _mm512_fmadd_ps(_mm512_mul_ps(c.one_minus_beta2, g), g, kept));
  const __m512 d = _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v), c.sqrt_bias_correction2), c.eps);
  _mm512_mask_storeu_ps(exp_avg, lanes, m);
  _mm512_mask_storeu_ps(exp_avg_sq, lanes, v);
  return _mm512_add_ps(_mm512_mul_ps(w, c.decay), _mm512_div_ps(_mm512_mul_ps(c.negative_step_size, m), d));
}

inline __mmask16 update_split(const Constants& c, __mmask16 lanes, const AdamWSplitSpan& span,
                              std::int64_t i) {
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, span.high + i));
  const __m512i low = _mm512_cvtepi16_epi32(_mm256_maskz_loadu_epi16(lanes, span.low + i));
  const __m512 old_w = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 16), low));
  const __m512i gradient = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, span.gradient + i));
  const __m512 w = updated_weight(c, lanes, old_w, _mm512_castsi512_ps(_mm512_slli_epi32(gradient, 16)),
                                  span.exp_avg + i, span.exp_avg_sq + i);
  const __m512i bits = _mm512_castps_si512(w);
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)), 16);
  _mm256_mask_storeu_epi16(span.high + i, lanes, _mm512_cvtepi32_epi16(rounded));
  _mm256_mask_storeu_epi16(span.low + i, lanes, _mm512_cvtepi32_epi16(bits));
  return static_cast<__mmask16>(lanes & non_finite(c, w));
}

inline __mmask16 update_float(const Constants& c, __mmask16 lanes, const AdamWFloatSpan& span,
                              std::int64_t i) {
  const __m512 w =
      updated_weight(c, lanes, _mm512_maskz_loadu_ps(lanes, span.weight + i),
                     _mm512_maskz_loadu_ps(lanes, span.gradient + i), span.exp_avg + i, span.exp_avg_sq + i);
  _mm512_mask_storeu_ps(span.weight + i, lanes, w);
  return static_cast<__mmask16>(lanes & non_finite(c, w));
}

inline __mmask16 first_lanes(std::int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }

}  // namespace

bool adamw_split_avx512(const AdamWScalars& scalars, const AdamWSplitSpan& span) {
  const Constants c = constants(scalars);
  unsigned bad = 0;
  std::int64_t i = 0;
#pragma GCC unroll 2
  for (; i + kLanes <= span.count; i += kLanes) bad |= update_split(c, kAll, span, i);
  if (i < span.count) bad |= update_split(c, first_lanes(span.count - i), span, i);
  return bad == 0;
}

bool adamw_float_avx512(const AdamWScalars& scalars, const AdamWFloatSpan& span) {
  const Constants c = constants(scalars);
  unsigned bad = 0;
  std::int64_t i = 0;
#pragma GCC unroll 2
  for (; i + kLanes <= span.count; i += kLanes) bad |= update_float(c, kAll, span, i);
  if (i < span.count) bad |= update_float(c, first_lanes(span.count - i), span, i);
  return bad == 0;
}

}  // namespace megatrain
