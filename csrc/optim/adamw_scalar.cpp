// The specification: every other variant equals this one bit for bit.
#include <algorithm>

#include "optim/scalar_weights.h"

namespace megatrain {
namespace {

template <class Weights>
bool update_element(const AdamWScalars& s, const UpdateSpan& span, std::int64_t i, float& m, float& v) {
  const float w = updated_weight(s, Weights::load(span, i), Weights::gradient(span, i), m, v);
  return Weights::store(s.key, span, i, w);
}

template <class Weights>
bool with_float_moments(const AdamWScalars& s, const UpdateSpan& span) {
  const auto m = static_cast<float*>(span.exp_avg);
  const auto v = static_cast<float*>(span.exp_avg_sq);
  bool finite = true;
  for (std::int64_t i = 0; i < span.count; ++i) finite &= update_element<Weights>(s, span, i, m[i], v[i]);
  return finite;
}

template <class Weights>
bool with_bf16_moments(const AdamWScalars& s, const UpdateSpan& span) {
  const auto m16 = static_cast<std::uint16_t*>(span.exp_avg);
  const auto v16 = static_cast<std::uint16_t*>(span.exp_avg_sq);
  bool finite = true;
  for (std::int64_t i = 0; i < span.count; ++i) {
    float m = from_bf16(m16[i]), v = from_bf16(v16[i]);
    finite &= update_element<Weights>(s, span, i, m, v);
    const std::uint32_t random = random_word(static_cast<std::uint32_t>(span.first + i), s.key);
    m16[i] = to_bf16(m, for_exp_avg(random));
    v16[i] = to_bf16(v, for_exp_avg_sq(random));
  }
  return finite;
}

template <class Weights>
bool with_int8_moments(const AdamWScalars& s, const UpdateSpan& span) {
  const auto m8 = static_cast<std::uint8_t*>(span.exp_avg);
  const auto v8 = static_cast<std::uint8_t*>(span.exp_avg_sq);
  bool finite = true;
  for (std::int64_t begin = 0; begin < span.count; begin += kMomentBlock) {
    std::uint8_t& m_exponent = span.exp_avg_exponents[begin / kMomentBlock];
    std::uint8_t& v_exponent = span.exp_avg_sq_exponents[begin / kMomentBlock];
    const std::int64_t count = std::min(kMomentBlock, span.count - begin);
    std::uint16_t m16[kMomentBlock], v16[kMomentBlock];
    std::uint32_t random[kMomentBlock];
    std::uint32_t m_largest = 0, v_largest = 0;
    for (std::int64_t j = 0; j < count; ++j) {
      float m = decode_exp_avg(m8[begin + j], m_exponent), v = decode_exp_avg_sq(v8[begin + j], v_exponent);
      finite &= update_element<Weights>(s, span, begin + j, m, v);
      random[j] = random_word(static_cast<std::uint32_t>(span.first + begin + j), s.key);
      m16[j] = to_bf16(m, for_exp_avg(random[j]));
      v16[j] = to_bf16(v, for_exp_avg_sq(random[j]));
      m_largest = std::max(m_largest, exp_avg_size(m16[j]));
      v_largest = std::max(v_largest, exp_avg_sq_size(v16[j]));
    }
    const std::uint32_t m_new = FirstMomentCode::block_exponent(m_largest);
    const std::uint32_t v_new = SecondMomentCode::block_exponent(v_largest);
    for (std::int64_t j = 0; j < count; ++j) {
      m8[begin + j] = encode_exp_avg(m16[j], m_new, for_exp_avg_code(random[j]));
      v8[begin + j] = encode_exp_avg_sq(v16[j], v_new, for_exp_avg_sq_code(random[j]));
    }
    m_exponent = static_cast<std::uint8_t>(m_new);
    v_exponent = static_cast<std::uint8_t>(v_new);
  }
  return finite;
}

template <class Weights>
bool with_weights(const AdamWScalars& s, const UpdateSpan& span) {
  switch (span.moment_format) {
    case MomentFormat::kBf16:
      return with_bf16_moments<Weights>(s, span);
    case MomentFormat::kInt8:
      return with_int8_moments<Weights>(s, span);
    case MomentFormat::kFp32:
      break;
  }
  return with_float_moments<Weights>(s, span);
}

}  // namespace

bool adamw_scalar(const AdamWScalars& s, const UpdateSpan& span) {
  return with_weights_of(span.weight_format, [&]<class Weights>() { return with_weights<Weights>(s, span); });
}

}  // namespace megatrain
