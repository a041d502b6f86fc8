// Plain loops, compiled once for each instruction set; the loader picks the widest that the CPU has.
#include "memory_passes.h"

#include <algorithm>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#if defined(__x86_64__) && defined(__gnu_linux__)
#define MEGATRAIN_EVERY_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define MEGATRAIN_EVERY_ISA
#endif

namespace megatrain::bench {
namespace {

// Words of any memory, whatever its type.
using Word = std::uint32_t __attribute__((may_alias));
// Elements; 4 to 16 cache lines of each stream. From 64 to 1024 the speed is the same.
constexpr std::int64_t kMixBlock = 256;
// Bytes ahead of each stream, as in the update.
constexpr std::int64_t kPrefetched = 2048;
constexpr std::int64_t kLineWords = 16;

}  // namespace

MEGATRAIN_EVERY_ISA
std::uint64_t pass_read(const float* a, std::int64_t count) {
  // As integers: a sum of floats has an order that the compiler must keep, one element at a time.
  const auto* const bits = reinterpret_cast<const Word*>(a);
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
std::uint32_t pass_mix(const MixStream* streams, int count, std::int64_t begin, std::int64_t end,
                       std::uint32_t mask) {
  std::uint32_t sum = 0;
  for (std::int64_t block = begin; block < end; block += kMixBlock) {
    const std::int64_t elements = std::min(kMixBlock, end - block);
    for (int s = 0; s < count; ++s) {
      auto* const words = reinterpret_cast<Word*>(streams[s].data + block * streams[s].element_bytes);
      const std::int64_t size = elements * streams[s].element_bytes / static_cast<std::int64_t>(sizeof(Word));
      for (std::int64_t i = 0; i < size; i += kLineWords) {
        __builtin_prefetch(reinterpret_cast<const std::byte*>(words + i) + kPrefetched);
      }
      if (streams[s].written) {
        for (std::int64_t i = 0; i < size; ++i) words[i] ^= mask;
      } else {
        for (std::int64_t i = 0; i < size; ++i) sum += words[i];
      }
    }
  }
  return sum;
}

}  // namespace megatrain::bench
