// Lion (Chen et al., 2023, arXiv 2302.06675), one moment. The arithmetic, in fp32 with every operation
// rounded once and nothing fused, so that a compiler's vectors of any width write the same bits:
//
//   g = gradient * gradient_scale
//   c = beta1 * m + one_minus_beta1 * g
//   w = w * decay - lr * sign(c)          sign(0) = 0, sign(NaN) = NaN
//   m = flush(beta2 * m + one_minus_beta2 * g)
//
// The moment is stored as AdamW's first one is, in every format.
#include <algorithm>

#include "optim/scalar_weights.h"

namespace megatrain {
namespace {

struct LionScalars {
  float gradient_scale, beta1, one_minus_beta1, beta2, one_minus_beta2, decay, lr;
};

LionScalars lion_scalars(const UpdateStep& step) {
  return {
      .gradient_scale = step.gradient_scale,
      .beta1 = static_cast<float>(step.beta1),
      .one_minus_beta1 = static_cast<float>(1 - step.beta1),
      .beta2 = static_cast<float>(step.beta2),
      .one_minus_beta2 = static_cast<float>(1 - step.beta2),
      .decay = static_cast<float>(1 - step.lr * step.weight_decay),
      .lr = static_cast<float>(step.lr),
  };
}

float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }

template <class Weights>
bool update_element(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span, std::int64_t i,
                    float& m) {
  const float g = Weights::gradient(span, i) * s.gradient_scale;
  const float c = s.beta1 * m + s.one_minus_beta1 * g;
  m = flush(s.beta2 * m + s.one_minus_beta2 * g);
  return Weights::store(key, span, i, Weights::load(span, i) * s.decay - s.lr * sign(c));
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

bool update_by_lion(Isa, const UpdateStep& step, const RoundingKey& key, const UpdateSpan& span) {
  const LionScalars s = lion_scalars(step);
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

}  // namespace megatrain
