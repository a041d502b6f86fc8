// One thread updates four or eight neighbours, so that every access of a warp is whole and no thread
// loads less than 4 bytes at once; with 8-bit moments half a warp is one block of 128. The arithmetic is that
// of the scalar variant, from the same header, compiled without contraction, without flushing and with exact
// division and square root.
#include <algorithm>

#include "device/cuda_check.h"
#include "kernels/device_adamw.h"
#include "optim/adamw_math.h"

namespace megatrain {
namespace {

constexpr int kThreads = 128;

// Elements a thread.
constexpr int each(MomentFormat moments) { return moments == MomentFormat::kFp32 ? 4 : 8; }

template <class T, int kEach>
struct alignas(std::min<std::size_t>(sizeof(T) * kEach, 16)) Several {
  T at[kEach];
};

// Elements [i, i + n) with n <= kEach; the others are 0.
template <class T, int kEach>
__device__ __forceinline__ Several<T, kEach> load(const void* section, std::int64_t i, int n, bool whole) {
  const T* const from = static_cast<const T*>(section) + i;
  if (whole) return *reinterpret_cast<const Several<T, kEach>*>(from);
  Several<T, kEach> values{};
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (k < n) values.at[k] = from[k];
  }
  return values;
}

template <class T, int kEach>
__device__ __forceinline__ void store(void* section, std::int64_t i, int n, bool whole,
                                      const Several<T, kEach>& values) {
  T* const to = static_cast<T*>(section) + i;
  if (whole) {
    *reinterpret_cast<Several<T, kEach>*>(to) = values;
    return;
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (k < n) to[k] = values.at[k];
  }
}

// 16-bit numbers are handled two at a time: integer instructions have half the rate of floating-point
// ones, and with few bytes a parameter they would bind.
using Two = std::uint32_t;
__device__ __forceinline__ Two upper_halves(std::uint32_t even, std::uint32_t odd) {
  return __byte_perm(even, odd, 0x7632);
}
__device__ __forceinline__ Two lower_halves(std::uint32_t even, std::uint32_t odd) {
  return __byte_perm(even, odd, 0x5410);
}
__device__ __forceinline__ Two both(std::uint32_t x) { return x * 0x10001u; }

template <int kEach>
struct Pairs {
  Two at[kEach / 2];

  __device__ __forceinline__ static Pairs load(const void* section, std::int64_t i, int n, bool whole) {
    return std::bit_cast<Pairs>(megatrain::load<std::uint16_t, kEach>(section, i, n, whole));
  }
  __device__ __forceinline__ void store(void* section, std::int64_t i, int n, bool whole) const {
    megatrain::store(section, i, n, whole, std::bit_cast<Several<std::uint16_t, kEach>>(*this));
  }
  // As bf16.
  __device__ __forceinline__ Several<float, kEach> floats() const {
    Several<float, kEach> values;
#pragma unroll
    for (int k = 0; k < kEach; k += 2) {
      values.at[k] = float_of(at[k / 2] << 16);
      values.at[k + 1] = float_of(at[k / 2] & 0xffff0000u);
    }
    return values;
  }
};

template <int kEach>
using Words = Several<std::uint32_t, kEach>;

template <int kEach>
__device__ __forceinline__ Pairs<kEach> upper_halves(const Words<kEach>& x) {
  Pairs<kEach> pairs;
#pragma unroll
  for (int k = 0; k < kEach; k += 2) pairs.at[k / 2] = upper_halves(x.at[k], x.at[k + 1]);
  return pairs;
}
template <int kEach>
__device__ __forceinline__ Pairs<kEach> lower_halves(const Words<kEach>& x) {
  Pairs<kEach> pairs;
#pragma unroll
  for (int k = 0; k < kEach; k += 2) pairs.at[k / 2] = lower_halves(x.at[k], x.at[k + 1]);
  return pairs;
}

// random_word of the elements from `index` on.
template <int kEach>
__device__ __forceinline__ Words<kEach> random_words(std::uint32_t index, const RoundingKey& key) {
  Words<kEach> words;
  if (index % 2 == 0) {
#pragma unroll
    for (int k = 0; k < kEach; k += 2) {
      words.at[k] = random_of_two(index + k, key);
      words.at[k + 1] = __byte_perm(words.at[k], 0, 0x1032);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kEach; ++k) words.at[k] = random_word(index + k, key);
  }
  return words;
}

// Upper halves are the values rounded to bf16; `random` are 16 bits, of which NaN takes none.
template <int kEach>
__device__ __forceinline__ Words<kEach> dithered(const Several<float, kEach>& x, const Words<kEach>& random) {
  Words<kEach> bits;
#pragma unroll
  for (int k = 0; k < kEach; ++k) bits.at[k] = bits_of(x.at[k]) + (x.at[k] == x.at[k] ? random.at[k] : 0);
  return bits;
}

template <WeightFormat kWeights, int kEach>
struct Weights {
  Several<float, kEach> w, gradient;

  __device__ __forceinline__ void read(const UpdateSpan& span, std::int64_t i, int n, bool whole) {
    if constexpr (kWeights == WeightFormat::kFp32) {
      w = load<float, kEach>(span.weight, i, n, whole);
      gradient = load<float, kEach>(span.gradient, i, n, whole);
    } else {
      const auto high = Pairs<kEach>::load(span.weight, i, n, whole);
      gradient = Pairs<kEach>::load(span.gradient, i, n, whole).floats();
      if constexpr (kWeights == WeightFormat::kBf16) {
        w = high.floats();
      } else {
        const auto low = Pairs<kEach>::load(span.low, i, n, whole);
        // The low half's sign flipped, less that: what it takes from the high half is borrowed.
#pragma unroll
        for (int k = 0; k < kEach; k += 2) {
          const Two flipped = low.at[k / 2] ^ 0x80008000u;
          w.at[k] = float_of(lower_halves(flipped, high.at[k / 2]) - 0x8000u);
          w.at[k + 1] = float_of(upper_halves(flipped, high.at[k / 2]) - 0x8000u);
        }
      }
    }
  }

  // False if one of the n is not finite.
  __device__ __forceinline__ bool write(const UpdateSpan& span, std::int64_t i, int n, bool whole,
                                        const Words<kEach>& words) const {
    Words<kEach> bits;
#pragma unroll
    for (int k = 0; k < kEach; ++k) bits.at[k] = bits_of(w.at[k]);
    if constexpr (kWeights == WeightFormat::kFp32) {
      store(span.weight, i, n, whole, w);
    } else if constexpr (kWeights == WeightFormat::kBf16) {
      Words<kEach> random;
#pragma unroll
      for (int k = 0; k < kEach; ++k) random.at[k] = for_weight(words.at[k]);
      bits = dithered(w, random);
      upper_halves(bits).store(span.weight, i, n, whole);
    } else {
      Words<kEach> rounded;
#pragma unroll
      for (int k = 0; k < kEach; ++k) rounded.at[k] = bits.at[k] + 0x8000u;
      upper_halves(rounded).store(span.weight, i, n, whole);
      lower_halves(bits).store(span.low, i, n, whole);
    }
    const float limit = kWeights == WeightFormat::kBf16Split ? float_of(kInfiniteUpperHalf) : INFINITY;
    bool finite = true;
#pragma unroll
    for (int k = 0; k < kEach; ++k) finite &= k >= n || ::fabsf(float_of(bits.at[k])) < limit;
    return finite;
  }
};

// SmallFloat of adamw_math.h for two elements.
template <int kMantissa>
struct TwoCodes {
  using Code = SmallFloat<kMantissa>;
  Two base;

  __device__ __forceinline__ explicit TwoCodes(std::uint32_t exponent) : base(both(Code::base(exponent))) {}
  // Codes in 16 bits each.
  __device__ __forceinline__ Two decode(Two codes) const {
    return (codes << Code::kShift) + __vminu2(codes, 0x10001u) * (base & 0xffffu);
  }
  // In bytes 0 and 2; what is above a byte does not belong to a code.
  __device__ __forceinline__ Two encode(Two sizes, Two least, Two random) const {
    const Two above = __vmaxu2(__vmaxu2(sizes, base) - base, least) + random;
    return __vminu2(above, both((Code::kLargest << Code::kShift) | ((1u << Code::kShift) - 1))) >>
           Code::kShift;
  }
};

// Of the lanes that share a block.
template <int kEach>
__device__ __forceinline__ std::uint32_t largest_of_block(const Pairs<kEach>& sizes) {
  Two largest = sizes.at[0];
#pragma unroll
  for (int k = 1; k < kEach / 2; ++k) largest = __vmaxu2(largest, sizes.at[k]);
  constexpr unsigned kLanes = kMomentBlock / kEach;
  const unsigned block = (~0u >> (32 - kLanes)) << (threadIdx.x % 32 / kLanes * kLanes);
  return __reduce_max_sync(block, max(largest & 0xffffu, largest >> 16));
}

template <MomentFormat kMoments, int kEach>
struct Moments {
  Several<float, kEach> m, v;

  __device__ __forceinline__ void read(const UpdateSpan& span, std::int64_t i, int n, bool whole) {
    if constexpr (kMoments == MomentFormat::kFp32) {
      m = load<float, kEach>(span.exp_avg, i, n, whole);
      v = load<float, kEach>(span.exp_avg_sq, i, n, whole);
    } else if constexpr (kMoments == MomentFormat::kBf16) {
      m = Pairs<kEach>::load(span.exp_avg, i, n, whole).floats();
      v = Pairs<kEach>::load(span.exp_avg_sq, i, n, whole).floats();
    } else {
      const auto m8 = load_codes(span.exp_avg, i, n, whole), v8 = load_codes(span.exp_avg_sq, i, n, whole);
      const TwoCodes<3> m_codes(n > 0 ? span.exp_avg_exponents[i / kMomentBlock] : 0);
      const TwoCodes<4> v_codes(n > 0 ? span.exp_avg_sq_exponents[i / kMomentBlock] : 0);
      Pairs<kEach> m16, v16;
#pragma unroll
      for (int k = 0; k < kEach / 2; ++k) {
        const unsigned bytes = k % 2 == 0 ? 0x4140 : 0x4342;
        const Two code = __byte_perm(m8.at[k / 2], 0, bytes);
        m16.at[k] = m_codes.decode(code & 0x7f007fu) | (code & 0x800080u) << 8;
        v16.at[k] = v_codes.decode(__byte_perm(v8.at[k / 2], 0, bytes));
      }
      m = m16.floats();
      v = v16.floats();
    }
  }

  // With 8-bit moments all lanes of a block call this together, those with n = 0 too.
  __device__ __forceinline__ void write(const UpdateSpan& span, std::int64_t i, int n, bool whole,
                                        const Words<kEach>& words) const {
    if constexpr (kMoments == MomentFormat::kFp32) {
      store(span.exp_avg, i, n, whole, m);
      store(span.exp_avg_sq, i, n, whole, v);
    } else {
      Words<kEach> m_random, v_random;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        m_random.at[k] = for_exp_avg(words.at[k]);
        v_random.at[k] = for_exp_avg_sq(words.at[k]);
      }
      const Pairs<kEach> m16 = upper_halves(dithered(m, m_random)), v16 = upper_halves(dithered(v, v_random));
      if constexpr (kMoments == MomentFormat::kBf16) {
        m16.store(span.exp_avg, i, n, whole);
        v16.store(span.exp_avg_sq, i, n, whole);
      } else {
        write_codes(span, i, n, whole, m16, v16, lower_halves(words));
      }
    }
  }

 private:
  using Codes = Words<kEach / 4>;  // four a word

  static __device__ __forceinline__ Codes load_codes(const void* section, std::int64_t i, int n, bool whole) {
    return std::bit_cast<Codes>(load<std::uint8_t, kEach>(section, i, n, whole));
  }
  // From codes in bytes 0 and 2 of each pair.
  static __device__ __forceinline__ void store_codes(void* section, std::int64_t i, int n, bool whole,
                                                     const Pairs<kEach>& codes) {
    Codes packed;
#pragma unroll
    for (int k = 0; k < kEach / 4; ++k) {
      packed.at[k] = __byte_perm(codes.at[2 * k], codes.at[2 * k + 1], 0x6420);
    }
    store(section, i, n, whole, std::bit_cast<Several<std::uint8_t, kEach>>(packed));
  }

  // Elements past n are 0 and so change no exponent.
  static __device__ __forceinline__ void write_codes(const UpdateSpan& span, std::int64_t i, int n,
                                                     bool whole, const Pairs<kEach>& m, const Pairs<kEach>& v,
                                                     const Pairs<kEach>& random) {
    Pairs<kEach> m_sizes;
#pragma unroll
    for (int k = 0; k < kEach / 2; ++k) m_sizes.at[k] = m.at[k] & 0x7fff7fffu;
    // Every lane has read the old exponents before the first one writes the new ones.
    const std::uint32_t m_exponent = FirstMomentCode::block_exponent(largest_of_block(m_sizes));
    const std::uint32_t v_exponent = SecondMomentCode::block_exponent(largest_of_block(v));
    const TwoCodes<3> m_codes(m_exponent);
    const TwoCodes<4> v_codes(v_exponent);
    Pairs<kEach> m8, v8;
#pragma unroll
    for (int k = 0; k < kEach / 2; ++k) {
      const Two m_code = m_codes.encode(m_sizes.at[k], 0, random.at[k] >> 12 & 0xf000fu);
      m8.at[k] = (m_code & 0x7f007fu) | (m.at[k] >> 8 & 0x800080u);
      // Above 0, a second moment is at least the smallest code.
      v8.at[k] = v_codes.encode(v.at[k], __vminu2(v.at[k], both(8)), random.at[k] & 0x70007u);
    }
    store_codes(span.exp_avg, i, n, whole, m8);
    store_codes(span.exp_avg_sq, i, n, whole, v8);
    if (threadIdx.x % (kMomentBlock / kEach) == 0 && n > 0) {
      span.exp_avg_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(m_exponent);
      span.exp_avg_sq_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(v_exponent);
    }
  }
};

template <WeightFormat kWeights, MomentFormat kMoments>
__global__ void __launch_bounds__(kThreads)
    update(const AdamWScalars s, const UpdateSpan span, const bool aligned, int* const non_finite) {
  constexpr int kEach = each(kMoments);
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kEach;
  const std::int64_t left = span.count - i;
  const int n = left >= kEach ? kEach : left > 0 ? static_cast<int>(left) : 0;
  const bool whole = aligned && n == kEach;
  Weights<kWeights, kEach> weights;
  Moments<kMoments, kEach> moments;
  weights.read(span, i, n, whole);
  moments.read(span, i, n, whole);
  const auto words = random_words<kEach>(static_cast<std::uint32_t>(span.first + i), s.key);  // if taken
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    weights.w.at[k] =
        updated_weight(s, weights.w.at[k], weights.gradient.at[k], moments.m.at[k], moments.v.at[k]);
  }
  if (!weights.write(span, i, n, whole, words)) *non_finite = 1;
  moments.write(span, i, n, whole, words);
}

bool is_aligned(const UpdateSpan& span) {
  const auto ok = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  return ok(span.weight) && ok(span.low) && ok(span.gradient) && ok(span.exp_avg) && ok(span.exp_avg_sq);
}

template <WeightFormat kWeights, MomentFormat kMoments>
void launch(const AdamWScalars& scalars, const UpdateSpan& span, int* non_finite, cudaStream_t stream) {
  constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * each(kMoments);
  const auto blocks = static_cast<unsigned>((span.count + kPerBlock - 1) / kPerBlock);
  update<kWeights, kMoments><<<blocks, kThreads, 0, stream>>>(scalars, span, is_aligned(span), non_finite);
  check_cuda(cudaGetLastError(), "launch of the update kernel");
}

template <WeightFormat kWeights>
void launch(const AdamWScalars& scalars, const UpdateSpan& span, int* non_finite, cudaStream_t stream) {
  switch (span.moment_format) {
    case MomentFormat::kFp32:
      return launch<kWeights, MomentFormat::kFp32>(scalars, span, non_finite, stream);
    case MomentFormat::kBf16:
      return launch<kWeights, MomentFormat::kBf16>(scalars, span, non_finite, stream);
    case MomentFormat::kInt8:
      return launch<kWeights, MomentFormat::kInt8>(scalars, span, non_finite, stream);
  }
}

}  // namespace

void queue_adamw(const UpdateStep& step, const UpdateSpan& span, int* non_finite, std::uintptr_t stream) {
  check_update(step, span);
  AdamWScalars scalars = adamw_scalars(step);
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  UpdateSpan rest = span;
  while (rest.count > 0) {  // the kernel sees indices that share their upper 32 bits
    UpdateSpan part = rest;
    part.count = std::min(rest.count, (std::int64_t{1} << 32) - (rest.first & 0xffffffff));
    scalars.key = rounding_key(step, static_cast<std::uint32_t>(part.first >> 32));
    switch (part.weight_format) {
      case WeightFormat::kBf16Split:
        launch<WeightFormat::kBf16Split>(scalars, part, non_finite, on);
        break;
      case WeightFormat::kBf16:
        launch<WeightFormat::kBf16>(scalars, part, non_finite, on);
        break;
      case WeightFormat::kFp32:
        launch<WeightFormat::kFp32>(scalars, part, non_finite, on);
        break;
    }
    rest = rest_of(rest, part.count);
  }
}

}  // namespace megatrain
