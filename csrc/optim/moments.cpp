#include "optim/moments.h"

#include <algorithm>
#include <cstring>

#include "optim/adamw_math.h"

namespace megatrain {
namespace {

struct First {
  using Code = FirstMomentCode;
  static constexpr auto encode = encode_exp_avg;
  static constexpr auto size = exp_avg_size;
  static constexpr auto decode = decode_exp_avg;
};
struct Second {
  using Code = SecondMomentCode;
  static constexpr auto encode = encode_exp_avg_sq;
  static constexpr auto size = exp_avg_sq_size;
  static constexpr auto decode = decode_exp_avg_sq;
};

template <class Kind>
void read_codes(const MomentSpan& span, float* values) {
  const auto codes = static_cast<const std::uint8_t*>(span.values);
  for (std::int64_t i = 0; i < span.count; ++i) {
    values[i] = Kind::decode(codes[i], span.exponents[i / kMomentBlock]);
  }
}

// Truncated: what is cut off decides nothing where the code is then rounded to nearest.
std::uint16_t bf16_below(float x) { return static_cast<std::uint16_t>(bits_of(flush(x)) >> 16); }

template <class Kind>
void write_codes(const MomentSpan& span, const float* values) {
  const auto codes = static_cast<std::uint8_t*>(span.values);
  for (std::int64_t begin = 0; begin < span.count; begin += kMomentBlock) {
    const std::int64_t end = std::min(begin + kMomentBlock, span.count);
    std::uint32_t largest = 0;
    for (std::int64_t i = begin; i < end; ++i) largest = std::max(largest, Kind::size(bf16_below(values[i])));
    const std::uint32_t exponent = Kind::Code::block_exponent(largest);
    for (std::int64_t i = begin; i < end; ++i) {
      codes[i] = Kind::encode(bf16_below(values[i]), exponent, Kind::Code::kNearest);
    }
    span.exponents[begin / kMomentBlock] = static_cast<std::uint8_t>(exponent);
  }
}

}  // namespace

void read_moments(const MomentSpan& span, float* values) {
  switch (span.format) {
    case MomentFormat::kFp32:
      std::memmove(values, span.values, static_cast<std::size_t>(span.count) * sizeof(float));
      return;
    case MomentFormat::kBf16:
      for (std::int64_t i = 0; i < span.count; ++i) {
        values[i] = from_bf16(static_cast<const std::uint16_t*>(span.values)[i]);
      }
      return;
    case MomentFormat::kInt8:
      return span.moment == Moment::kExpAvg ? read_codes<First>(span, values)
                                            : read_codes<Second>(span, values);
  }
}

void write_moments(const MomentSpan& span, const float* values) {
  switch (span.format) {
    case MomentFormat::kFp32:  // a checkpoint may be a view of the very same moments
      std::memmove(span.values, values, static_cast<std::size_t>(span.count) * sizeof(float));
      return;
    case MomentFormat::kBf16:
      for (std::int64_t i = 0; i < span.count; ++i) {
        static_cast<std::uint16_t*>(span.values)[i] = to_bf16(values[i], 0x8000);
      }
      return;
    case MomentFormat::kInt8:
      return span.moment == Moment::kExpAvg ? write_codes<First>(span, values)
                                            : write_codes<Second>(span, values);
  }
}

}  // namespace megatrain
