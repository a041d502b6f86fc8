// In its simplest form: one element a thread, and one block of 8-bit moments a block of threads.
#include <algorithm>

#include "device/cuda_check.h"
#include "kernels/device_lion.h"
#include "optim/lion_math.h"
#include "optim/scalar_weights.h"

namespace megatrain {
namespace {

constexpr int kThreads = static_cast<int>(kMomentBlock);

// Moments of a whole block of threads; those past the end of the span bring 0 and write nothing.
template <MomentFormat kMoments>
__device__ float load_moment(const UpdateSpan& span, std::int64_t i) {
  if (i >= span.count) return 0.0f;
  if constexpr (kMoments == MomentFormat::kFp32) return static_cast<const float*>(span.exp_avg)[i];
  if constexpr (kMoments == MomentFormat::kBf16) {
    return from_bf16(static_cast<const std::uint16_t*>(span.exp_avg)[i]);
  }
  return decode_exp_avg(static_cast<const std::uint8_t*>(span.exp_avg)[i],
                        span.exp_avg_exponents[blockIdx.x]);
}

template <MomentFormat kMoments>
__device__ void store_moment(const RoundingKey& key, const UpdateSpan& span, std::int64_t i, float m) {
  const bool mine = i < span.count;
  if constexpr (kMoments == MomentFormat::kFp32) {
    if (mine) static_cast<float*>(span.exp_avg)[i] = m;
    return;
  }
  const std::uint32_t random = random_word(static_cast<std::uint32_t>(span.first + i), key);
  const std::uint16_t m16 = mine ? to_bf16(m, for_exp_avg(random)) : std::uint16_t{0};
  if constexpr (kMoments == MomentFormat::kBf16) {
    if (mine) static_cast<std::uint16_t*>(span.exp_avg)[i] = m16;
  } else {
    __shared__ unsigned largest;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    atomicMax(&largest, exp_avg_size(m16));
    __syncthreads();  // also: every thread has decoded with the old exponent
    const std::uint32_t exponent = FirstMomentCode::block_exponent(largest);
    if (mine) {
      static_cast<std::uint8_t*>(span.exp_avg)[i] = encode_exp_avg(m16, exponent, for_exp_avg_code(random));
    }
    if (threadIdx.x == 0) span.exp_avg_exponents[blockIdx.x] = static_cast<std::uint8_t>(exponent);
  }
}

template <class Weights, MomentFormat kMoments>
__global__ void update(LionScalars scalars, RoundingKey key, UpdateSpan span, int* non_finite) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  float m = load_moment<kMoments>(span, i);
  if (i < span.count) {
    const float w = lion_weight(scalars, Weights::load(span, i), Weights::gradient(span, i), m);
    if (!Weights::store(key, span, i, w)) *non_finite = 1;
  }
  store_moment<kMoments>(key, span, i, m);
}

template <class Weights>
void launch(const LionScalars& scalars, const RoundingKey& key, const UpdateSpan& span, int* non_finite,
            cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((span.count + kThreads - 1) / kThreads);
  switch (span.moment_format) {
    case MomentFormat::kFp32:
      update<Weights, MomentFormat::kFp32><<<blocks, kThreads, 0, stream>>>(scalars, key, span, non_finite);
      break;
    case MomentFormat::kBf16:
      update<Weights, MomentFormat::kBf16><<<blocks, kThreads, 0, stream>>>(scalars, key, span, non_finite);
      break;
    case MomentFormat::kInt8:
      update<Weights, MomentFormat::kInt8><<<blocks, kThreads, 0, stream>>>(scalars, key, span, non_finite);
      break;
  }
  check_cuda(cudaGetLastError(), "launch of the update kernel");
}

}  // namespace

void queue_lion(const UpdateStep& step, const UpdateSpan& span, int* non_finite, std::uintptr_t stream) {
  check_update(step, span);
  const LionScalars scalars = lion_scalars(step);
  const auto on = reinterpret_cast<cudaStream_t>(stream);
  UpdateSpan rest = span;
  while (rest.count > 0) {  // the kernel sees indices that share their upper 32 bits
    UpdateSpan part = rest;
    part.count = std::min(rest.count, (std::int64_t{1} << 32) - (rest.first & 0xffffffff));
    const RoundingKey key = rounding_key(step, static_cast<std::uint32_t>(part.first >> 32));
    switch (part.weight_format) {
      case WeightFormat::kBf16Split:
        launch<SplitWeights>(scalars, key, part, non_finite, on);
        break;
      case WeightFormat::kBf16:
        launch<Bf16Weights>(scalars, key, part, non_finite, on);
        break;
      case WeightFormat::kFp32:
        launch<FloatWeights>(scalars, key, part, non_finite, on);
        break;
    }
    rest = rest_of(rest, part.count);
  }
}

}  // namespace megatrain
