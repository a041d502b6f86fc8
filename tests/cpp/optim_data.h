// Spans with a seeded mixture of ordinary, denormal, huge and zero values, for the tests of the update.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "optim/adamw.h"

namespace megatrain::testing {

inline std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }

// bf16 rounded to nearest, ties away from zero.
inline std::uint16_t to_bf16(float x) { return static_cast<std::uint16_t>((bits_of(x) + 0x8000) >> 16); }
inline float from_bf16(std::uint16_t x) { return std::bit_cast<float>(std::uint32_t{x} << 16); }

class Values {
 public:
  explicit Values(std::uint64_t seed) : random_(seed) {}

  float normal(float scale) { return scale * std::normal_distribution<float>()(random_); }
  // Weights, gradients and first moments of any size; some zero of either sign, denormal or huge.
  float any(float scale, float huge) {
    const float sign = random_() % 2 ? 1.0f : -1.0f;
    switch (random_() % 10) {
      case 0:
        return sign * 0.0f;
      case 1:
        return sign * std::bit_cast<float>(static_cast<std::uint32_t>(random_() % 0x00800000));  // denormal
      case 2:
        return sign * std::bit_cast<float>(0x00800000u + static_cast<std::uint32_t>(random_() % 8));
      case 3:
        return sign * huge * std::uniform_real_distribution<float>(0.5f, 1.0f)(random_);
      default:
        return normal(scale);
    }
  }
  std::mt19937_64& random() { return random_; }

 private:
  std::mt19937_64 random_;
};

// One parameter in fp32, from which spans of both formats are made. `offset` elements lie before the
// span and kGuard after it, so that spans begin unaligned and writes outside are seen.
struct Parameter {
  static constexpr std::size_t kGuard = 40;

  std::size_t offset, count;
  std::vector<float> weight, gradient, exp_avg, exp_avg_sq;
  std::vector<std::uint16_t> high, gradient16;
  std::vector<std::int16_t> low;

  Parameter(std::size_t offset, std::size_t count)
      : offset(offset),
        count(count),
        weight(size()),
        gradient(size()),
        exp_avg(size()),
        exp_avg_sq(size()),
        high(size()),
        gradient16(size()),
        low(size()) {}

  std::size_t size() const { return offset + count + kGuard; }

  void fill_any(Values& values) {
    for (std::size_t i = 0; i < size(); ++i) {
      weight[i] = values.any(0.02f, 1e30f);
      gradient[i] = values.any(1e-3f, 1e15f);
      exp_avg[i] = values.any(1e-3f, 1e15f);
      exp_avg_sq[i] = std::abs(values.any(1e-6f, 1e30f));
    }
    split();
  }

  // The split form of the same parameter; its gradient is the bf16-rounded one.
  void split() {
    (void)split_master(weight.data(), high.data(), low.data(), static_cast<std::int64_t>(size()));
    for (std::size_t i = 0; i < size(); ++i) gradient16[i] = to_bf16(gradient[i]);
  }
  std::vector<float> joined() const {
    std::vector<float> master(size());
    join_master(high.data(), low.data(), master.data(), static_cast<std::int64_t>(size()));
    return master;
  }

  AdamWSplitSpan split_span() {
    return {.high = high.data() + offset,
            .low = low.data() + offset,
            .gradient = gradient16.data() + offset,
            .exp_avg = exp_avg.data() + offset,
            .exp_avg_sq = exp_avg_sq.data() + offset,
            .count = static_cast<std::int64_t>(count)};
  }
  AdamWFloatSpan float_span() {
    return {.weight = weight.data() + offset,
            .gradient = gradient.data() + offset,
            .exp_avg = exp_avg.data() + offset,
            .exp_avg_sq = exp_avg_sq.data() + offset,
            .count = static_cast<std::int64_t>(count)};
  }
};

// Equality of bits: -0 is not +0 and a NaN equals itself.
template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
inline bool same_bits(const Parameter& a, const Parameter& b) {
  return same_bits(a.weight, b.weight) && same_bits(a.gradient, b.gradient) &&
         same_bits(a.exp_avg, b.exp_avg) && same_bits(a.exp_avg_sq, b.exp_avg_sq) &&
         same_bits(a.high, b.high) && same_bits(a.low, b.low) && same_bits(a.gradient16, b.gradient16);
}

}  // namespace megatrain::testing
