// One thread updates four neighbours, so that every access of a warp is whole; with 8-bit moments a
// warp is one block of 128. The arithmetic is that of the scalar variant, from the same header,
// compiled without contraction, without flushing and with exact division and square root.
#include <algorithm>

#include "device/cuda_check.h"
#include "kernels/device_adamw.h"
#include "optim/adamw_math.h"

namespace megatrain {
namespace {

constexpr int kEach = 4;  // elements a thread
constexpr int kThreads = 256;
static_assert(32 * kEach == kMomentBlock, "a warp holds one block of 8-bit moments");

template <class T>
struct alignas(sizeof(T) * kEach) Four {
  T at[kEach];
};

// Elements [i, i + n) with n <= 4; the others are 0.
template <class T>
__device__ __forceinline__ Four<T> load(const void* section, std::int64_t i, int n, bool whole) {
  const T* const from = static_cast<const T*>(section) + i;
  if (whole) return *reinterpret_cast<const Four<T>*>(from);
  Four<T> values{};
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (k < n) values.at[k] = from[k];
  }
  return values;
}

template <class T>
__device__ __forceinline__ void store(void* section, std::int64_t i, int n, bool whole,
                                      const Four<T>& values) {
  T* const to = static_cast<T*>(section) + i;
  if (whole) {
    *reinterpret_cast<Four<T>*>(to) = values;
    return;
  }
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (k < n) to[k] = values.at[k];
  }
}

template <WeightFormat kWeights>
struct Weights {
  Four<float> w, gradient;

  __device__ __forceinline__ void read(const AdamWSpan& span, std::int64_t i, int n, bool whole) {
    if constexpr (kWeights == WeightFormat::kFp32) {
      w = load<float>(span.weight, i, n, whole);
      gradient = load<float>(span.gradient, i, n, whole);
    } else {
      const auto high = load<std::uint16_t>(span.weight, i, n, whole);
      const auto narrow = load<std::uint16_t>(span.gradient, i, n, whole);
      Four<std::int16_t> low{};
      if constexpr (kWeights == WeightFormat::kBf16Split) low = load<std::int16_t>(span.low, i, n, whole);
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const auto below = static_cast<std::uint32_t>(std::int32_t{low.at[k]});
        w.at[k] = float_of((std::uint32_t{high.at[k]} << 16) + below);
        gradient.at[k] = from_bf16(narrow.at[k]);
      }
    }
  }

  // False if one of the n is not finite.
  __device__ __forceinline__ bool write(const AdamWScalars& s, const AdamWSpan& span, std::int64_t i, int n,
                                        bool whole) const {
    Four<std::uint16_t> high;
    Four<std::int16_t> low;
    bool finite = true;
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      std::uint32_t bits = bits_of(w.at[k]);
      if constexpr (kWeights == WeightFormat::kBf16Split) {
        high.at[k] = static_cast<std::uint16_t>((bits + 0x8000) >> 16);
        low.at[k] = static_cast<std::int16_t>(bits);
      } else if constexpr (kWeights == WeightFormat::kBf16) {
        const auto index = static_cast<std::uint32_t>(span.first + i + k);
        high.at[k] = to_bf16(w.at[k], for_weight(random_word(index, s.key)));
        bits = std::uint32_t{high.at[k]} << 16;
      }
      finite &= k >= n || is_finite(bits);
    }
    if constexpr (kWeights == WeightFormat::kFp32) {
      store(span.weight, i, n, whole, w);
    } else {
      store(span.weight, i, n, whole, high);
      if constexpr (kWeights == WeightFormat::kBf16Split) store(span.low, i, n, whole, low);
    }
    return finite;
  }
};

template <MomentFormat kMoments>
struct Moments {
  Four<float> m, v;

  __device__ __forceinline__ void read(const AdamWSpan& span, std::int64_t i, int n, bool whole) {
    if constexpr (kMoments == MomentFormat::kFp32) {
      m = load<float>(span.exp_avg, i, n, whole);
      v = load<float>(span.exp_avg_sq, i, n, whole);
    } else if constexpr (kMoments == MomentFormat::kBf16) {
      const auto m16 = load<std::uint16_t>(span.exp_avg, i, n, whole);
      const auto v16 = load<std::uint16_t>(span.exp_avg_sq, i, n, whole);
#pragma unroll
      for (int k = 0; k < kEach; ++k) m.at[k] = from_bf16(m16.at[k]), v.at[k] = from_bf16(v16.at[k]);
    } else {
      const auto m8 = load<std::uint8_t>(span.exp_avg, i, n, whole);
      const auto v8 = load<std::uint8_t>(span.exp_avg_sq, i, n, whole);
      const std::uint32_t m_exponent = n > 0 ? span.exp_avg_exponents[i / kMomentBlock] : 0;
      const std::uint32_t v_exponent = n > 0 ? span.exp_avg_sq_exponents[i / kMomentBlock] : 0;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        m.at[k] = decode_exp_avg(m8.at[k], m_exponent);
        v.at[k] = decode_exp_avg_sq(v8.at[k], v_exponent);
      }
    }
  }

  static __device__ __forceinline__ std::uint32_t random_of(const AdamWScalars& s, const AdamWSpan& span,
                                                            std::int64_t i) {
    return random_word(static_cast<std::uint32_t>(span.first + i), s.key);
  }

  // With 8-bit moments all lanes of a warp call this together, those with n = 0 too.
  __device__ __forceinline__ void write(const AdamWScalars& s, const AdamWSpan& span, std::int64_t i, int n,
                                        bool whole) const {
    if constexpr (kMoments == MomentFormat::kFp32) {
      store(span.exp_avg, i, n, whole, m);
      store(span.exp_avg_sq, i, n, whole, v);
    } else if constexpr (kMoments == MomentFormat::kBf16) {
      Four<std::uint16_t> m16, v16;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const std::uint32_t random = random_of(s, span, i + k);
        m16.at[k] = to_bf16(m.at[k], for_bf16_exp_avg(random));
        v16.at[k] = to_bf16(v.at[k], for_bf16_exp_avg_sq(random));
      }
      store(span.exp_avg, i, n, whole, m16);
      store(span.exp_avg_sq, i, n, whole, v16);
    } else {
      std::uint32_t m_largest = 0, v_largest = 0;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        if (k >= n) continue;
        m_largest = max(m_largest, exp_avg_size(m.at[k]));
        v_largest = max(v_largest, exp_avg_sq_size(v.at[k]));
      }
      // Every lane has read the old exponents before the first one writes the new ones.
      const std::uint32_t m_exponent = FirstMomentCode::block_exponent(__reduce_max_sync(~0u, m_largest));
      const std::uint32_t v_exponent = SecondMomentCode::block_exponent(__reduce_max_sync(~0u, v_largest));
      Four<std::uint8_t> m8, v8;
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        const std::uint32_t random = random_of(s, span, i + k);
        m8.at[k] = encode_exp_avg(m.at[k], m_exponent, for_exp_avg_code(random));
        v8.at[k] = encode_exp_avg_sq(v.at[k], v_exponent, for_exp_avg_sq_code(random));
      }
      store(span.exp_avg, i, n, whole, m8);
      store(span.exp_avg_sq, i, n, whole, v8);
      if (threadIdx.x % 32 == 0 && n > 0) {
        span.exp_avg_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(m_exponent);
        span.exp_avg_sq_exponents[i / kMomentBlock] = static_cast<std::uint8_t>(v_exponent);
      }
    }
  }
};

template <WeightFormat kWeights, MomentFormat kMoments>
__global__ void __launch_bounds__(kThreads)
    update(const AdamWScalars s, const AdamWSpan span, const bool aligned, int* const non_finite) {
  const std::int64_t i = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) * kEach;
  const std::int64_t left = span.count - i;
  const int n = left >= kEach ? kEach : left > 0 ? static_cast<int>(left) : 0;
  const bool whole = aligned && n == kEach;
  Weights<kWeights> weights;
  Moments<kMoments> moments;
  weights.read(span, i, n, whole);
  moments.read(span, i, n, whole);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    weights.w.at[k] =
        updated_weight(s, weights.w.at[k], weights.gradient.at[k], moments.m.at[k], moments.v.at[k]);
  }
  if (!weights.write(s, span, i, n, whole)) *non_finite = 1;
  moments.write(s, span, i, n, whole);
}

bool is_aligned(const AdamWSpan& span) {
  const auto ok = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  return ok(span.weight) && ok(span.low) && ok(span.gradient) && ok(span.exp_avg) && ok(span.exp_avg_sq);
}

template <WeightFormat kWeights, MomentFormat kMoments>
void launch(const AdamWScalars& scalars, const AdamWSpan& span, int* non_finite, cudaStream_t stream) {
  constexpr std::int64_t kPerBlock = std::int64_t{kThreads} * kEach;
  const auto blocks = static_cast<unsigned>((span.count + kPerBlock - 1) / kPerBlock);
  update<kWeights, kMoments><<<blocks, kThreads, 0, stream>>>(scalars, span, is_aligned(span), non_finite);
  check_cuda(cudaGetLastError(), "launch of the update kernel");
}

template <WeightFormat kWeights>
void launch(const AdamWScalars& scalars, const AdamWSpan& span, int* non_finite, cudaStream_t stream) {
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

void queue_adamw(const AdamWStep& step, const AdamWSpan& span, int* non_finite, std::uintptr_t stream) {
  check_adamw(step, span);
  AdamWScalars scalars = adamw_scalars(step);
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  AdamWSpan rest = span;
  while (rest.count > 0) {  // the kernel sees indices that share their upper 32 bits
    AdamWSpan part = rest;
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
