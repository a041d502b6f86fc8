// Plain loops, compiled once for each instruction set; the loader picks the widest that the CPU has.
#include "memory_passes.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__)
#define MEGATRAIN_EVERY_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MEGATRAIN_EVERY_ISA
#endif

namespace megatrain::bench {

MEGATRAIN_EVERY_ISA
std::uint64_t pass_read(const float* a, std::int64_t count) {
  // As integers: a sum of floats has an order that the compiler must keep, one element at a time.
  const auto* bits = reinterpret_cast<const std::uint32_t*>(a);
  std::uint32_t sum = 0;
  for (std::int64_t i = 0; i < count; ++i) sum += bits[i];
  return sum;
}

MEGATRAIN_EVERY_ISA
void pass_write(float* a, float value, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) a[i] = value;
}

MEGATRAIN_EVERY_ISA
void pass_copy(float* __restrict a, const float* __restrict b, std::int64_t count) {
  // The empty statement keeps the compiler from calling memcpy, whose stores go past the cache.
  for (std::int64_t i = 0; i < count; ++i) {
    a[i] = b[i];
  }
}

MEGATRAIN_EVERY_ISA
void pass_triad(float* __restrict a, const float* __restrict b, const float* __restrict c, float scalar,
                std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) a[i] = b[i] + scalar * c[i];
}

#if defined(__x86_64__)

const bool kHasStreamingStores = true;

void pass_triad_streaming(float* __restrict a, const float* __restrict b, const float* __restrict c,
                          float scalar, std::int64_t count) {
  const __m128 factor = _mm_set1_ps(scalar);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {  // a whole cache line, so that it leaves the core in one piece
    for (std::int64_t k = i; k < i + 16; k += 4) {
      _mm_stream_ps(a + k, _mm_add_ps(_mm_loadu_ps(b + k), _mm_mul_ps(factor, _mm_loadu_ps(c + k))));
    }
  }
  for (; i < count; ++i) a[i] = b[i] + scalar * c[i];
  _mm_sfence();
}

#else

const bool kHasStreamingStores = false;

void pass_triad_streaming(float* __restrict a, const float* __restrict b, const float* __restrict c,
                          float scalar, std::int64_t count) {
  pass_triad(a, b, c, scalar, count);
}

#endif

MEGATRAIN_EVERY_ISA
void pass_mix(const SplitMix& streams, const MixScalars& scalars) {
  std::uint16_t* __restrict high = streams.high;
  std::uint16_t* __restrict low = streams.low;
  const std::uint16_t* __restrict gradient = streams.gradient;
  float* __restrict exp_avg = streams.exp_avg;
  float* __restrict exp_avg_sq = streams.exp_avg_sq;
  const std::uint16_t mask = scalars.mask;
  const float scale = scalars.scale, shift = scalars.shift;
  for (std::int64_t i = 0; i < streams.count; ++i) {
    const auto g = static_cast<std::uint16_t>(gradient[i] & mask);
    high[i] = static_cast<std::uint16_t>(high[i] + g);
    low[i] = static_cast<std::uint16_t>(low[i] + g);
    exp_avg[i] = exp_avg[i] * scale + shift;
    exp_avg_sq[i] = exp_avg_sq[i] * scale + shift;
  }
}

MEGATRAIN_EVERY_ISA
void pass_mix(const FloatMix& streams, const MixScalars& scalars) {
  float* __restrict weight = streams.weight;
  const float* __restrict gradient = streams.gradient;
  float* __restrict exp_avg = streams.exp_avg;
  float* __restrict exp_avg_sq = streams.exp_avg_sq;
  const float scale = scalars.scale, shift = scalars.shift;
  for (std::int64_t i = 0; i < streams.count; ++i) {
    weight[i] = weight[i] + gradient[i] * shift;
    exp_avg[i] = exp_avg[i] * scale + shift;
    exp_avg_sq[i] = exp_avg_sq[i] * scale + shift;
  }
}

}  // namespace megatrain::bench
