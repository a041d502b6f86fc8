// Lion over spans of host memory, and its scalar variant, which says what the bits are.
#include <algorithm>

#include "optim/lion_kernels.h"
#include "optim/scalar_weights.h"

namespace megatrain {
namespace {

template <class Weights>
bool update_element(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span, std::int64_t i,
                    float& m) {
  const float w = lion_weight(s, Weights::load(span, i), Weights::gradient(span, i), m);
  return Weights::store(key, span, i, w);
}

template <class Weights>
bool with_float_moment(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span) {
  const auto m = static_cast<float*>(span.exp_avg);
  bool finite = true;
  for (std::int64_t i = 0; i < span.count; ++i) finite &= update_element<Weights>(s, key, span, i, m[i]);
  return finite;
}

template <class Weights>
bool with_bf16_moment(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span) {
  const auto m16 = static_cast<std::uint16_t*>(span.exp_avg);
  bool finite = true;
  for (std::int64_t i = 0; i < span.count; ++i) {
    float m = from_bf16(m16[i]);
    finite &= update_element<Weights>(s, key, span, i, m);
    m16[i] = to_bf16(m, for_exp_avg(random_word(static_cast<std::uint32_t>(span.first + i), key)));
  }
  return finite;
}

template <class Weights>
bool with_int8_moment(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span) {
  const auto m8 = static_cast<std::uint8_t*>(span.exp_avg);
  bool finite = true;
  for (std::int64_t begin = 0; begin < span.count; begin += kMomentBlock) {
    const std::int64_t count = std::min(kMomentBlock, span.count - begin);
    std::uint8_t& exponent = span.exp_avg_exponents[begin / kMomentBlock];
    std::uint16_t m16[kMomentBlock];
    std::uint32_t largest = 0;
    const auto random = [&](std::int64_t j) {
      return random_word(static_cast<std::uint32_t>(span.first + begin + j), key);
    };
    for (std::int64_t j = 0; j < count; ++j) {
      float m = decode_exp_avg(m8[begin + j], exponent);
      finite &= update_element<Weights>(s, key, span, begin + j, m);
      m16[j] = to_bf16(m, for_exp_avg(random(j)));
      largest = std::max(largest, exp_avg_size(m16[j]));
    }
    const std::uint32_t renewed = FirstMomentCode::block_exponent(largest);
    for (std::int64_t j = 0; j < count; ++j) {
      m8[begin + j] = encode_exp_avg(m16[j], renewed, for_exp_avg_code(random(j)));
    }
    exponent = static_cast<std::uint8_t>(renewed);
  }
  return finite;
}

}  // namespace

bool lion_scalar(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span) {
  return with_weights_of(span.weight_format, [&]<class Weights>() {
    switch (span.moment_format) {
      case MomentFormat::kBf16:
        return with_bf16_moment<Weights>(s, key, span);
      case MomentFormat::kInt8:
        return with_int8_moment<Weights>(s, key, span);
      case MomentFormat::kFp32:
        break;
    }
    return with_float_moment<Weights>(s, key, span);
  });
}

bool update_by_lion(Isa isa, const UpdateStep& step, const RoundingKey& key, const UpdateSpan& span) {
  const LionScalars s = lion_scalars(step);
  std::int64_t done = 0;
  const bool finite = lion_vectors(isa, s, key, span, done);
  return lion_scalar(s, key, rest_of(span, done)) && finite;
}

}  // namespace megatrain
