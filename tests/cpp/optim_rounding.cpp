// Stochastic rounding: expectations, keys, and what it must leave alone. Codes of 8-bit moments.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "optim_formats.h"

namespace megatrain {
namespace {

using testing::Formats;
using testing::FormattedParameter;
using testing::Values;

// The mean of n roundings of x between neighbours `step` apart is off by 2^-16 of a step at most, and
// by chance by step / 2 / sqrt(n) in one of three cases; five of those are never reached here.
void expect_unbiased(double sum, double x, double step, int n) {
  EXPECT_NEAR(sum / n, x, step * (std::ldexp(1.0, -16) + 2.5 / std::sqrt(static_cast<double>(n)))) << x;
}

constexpr int kDraws = 1 << 16;
constexpr float kFractions[] = {0.0f, 0.01f, 0.25f, 0.5f, 0.77f, 0.99f};

TEST(Rounding, ToBf16IsRightOnAverageOverElementsAndOverSteps) {
  for (const float fraction : kFractions) {
    for (const float lower : {1.0f, -1.0f, 0.0078125f, 1e-38f * 0}) {
      const float step = lower == 0 ? std::ldexp(1.0f, -133) : std::ldexp(std::abs(lower), -7);
      const float x = lower + (lower < 0 ? -step : step) * fraction;
      double over_elements = 0, over_steps = 0;
      for (int i = 0; i < kDraws; ++i) {
        const RoundingKeys one = rounding_keys({.step = 7, .seed = 1}, 0);
        over_elements +=
            from_bf16(to_bf16(x, random_word(static_cast<std::uint32_t>(i), one.weight) & 0xffff));
        const RoundingKeys other = rounding_keys({.step = 1 + i, .seed = 1}, 0);
        over_steps += from_bf16(to_bf16(x, random_word(12345, other.moments) >> 16));
      }
      expect_unbiased(over_elements, x, step, kDraws);
      expect_unbiased(over_steps, x, step, kDraws);
    }
  }
}

// Element i of a block that begins with the largest value.
TEST(Rounding, ToEightBitCodesIsRightOnAverage) {
  const RoundingKeys keys = rounding_keys({.step = 3, .seed = 2}, 0);
  const std::uint32_t exponent = 127;  // the unit is 1
  for (const float fraction : kFractions) {
    for (const float lower : {1.0f, 0.03125f, std::ldexp(1.0f, -14), std::ldexp(3.0f, -17), 0.0f}) {
      const float m_step = std::max(std::ldexp(lower, -3), std::ldexp(1.0f, -17));
      const float v_step = std::max(std::ldexp(lower, -4), std::ldexp(1.0f, -18));
      double m_sum = 0, negative_sum = 0, v_sum = 0;
      for (int i = 0; i < kDraws; ++i) {
        const std::uint32_t random = random_word(static_cast<std::uint32_t>(i), keys.moments);
        const float m = lower + fraction * m_step;
        m_sum += decode_exp_avg(encode_exp_avg(m, exponent, random >> 16), exponent);
        negative_sum += decode_exp_avg(encode_exp_avg(-m, exponent, random >> 16), exponent);
        v_sum += decode_exp_avg_sq(encode_exp_avg_sq(lower + fraction * v_step, exponent, random & 0xffff),
                                   exponent);
      }
      expect_unbiased(m_sum, lower + fraction * m_step, m_step, kDraws);
      expect_unbiased(negative_sum, -lower - fraction * m_step, m_step, kDraws);
      if (lower == 0) {  // the one bias: above 0 stays above 0
        EXPECT_EQ(v_sum, fraction == 0 ? 0 : kDraws * double{v_step});
      } else {
        expect_unbiased(v_sum, lower + fraction * v_step, v_step, kDraws);
      }
    }
  }
}

TEST(Rounding, EveryCodeIsReadAndWrittenUnchangedAtEveryExponent) {
  for (std::uint32_t exponent = kSmallestBlockExponent; exponent <= 254; ++exponent) {
    for (std::uint32_t code = 0; code < 256; ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      for (const std::uint32_t random : {0u, 0x8000u, 0xffffu}) {
        const float m = decode_exp_avg(byte, exponent), v = decode_exp_avg_sq(byte, exponent);
        ASSERT_TRUE(std::isfinite(m) && std::isfinite(v));
        ASSERT_TRUE(m == 0 || std::isnormal(m)) << exponent << " " << code;
        ASSERT_TRUE(v == 0 || std::isnormal(v)) << exponent << " " << code;
        ASSERT_EQ(encode_exp_avg(m, exponent, random), byte == 0x80 ? 0 : byte) << exponent;  // -0
        ASSERT_EQ(encode_exp_avg_sq(v, exponent, random), byte) << exponent;
      }
    }
    EXPECT_EQ(bits_of(decode_exp_avg(0, exponent)), 0u);
    EXPECT_EQ(bits_of(decode_exp_avg_sq(0, exponent)), 0u);
  }
  EXPECT_EQ(bits_of(decode_exp_avg(0, 0)), 0u) << "a fresh tile";
  EXPECT_EQ(bits_of(decode_exp_avg_sq(0, 0)), 0u);
}

// The largest value of a block is held as well as any other: no rounding takes it past the last code.
TEST(Rounding, ABlocksExponentLeavesRoomForItsLargestValue) {
  Values values(29);
  for (int i = 0; i < 100000; ++i) {
    const float x = std::abs(values.any(1.0f, 1e38f));
    if (x < std::numeric_limits<float>::min()) continue;
    const std::uint32_t m = FirstMomentCode::block_exponent(bits_of(x));
    const std::uint32_t v = SecondMomentCode::block_exponent(bits_of(x));
    if (m == 255 || v == 255) continue;
    for (const std::uint32_t random : {0u, 0xffffu}) {
      const double m_unit = std::ldexp(1.0, static_cast<int>(m) - 127 - 17);
      const double v_unit = std::ldexp(1.0, static_cast<int>(v) - 127 - 18);
      ASSERT_NEAR(decode_exp_avg(encode_exp_avg(x, m, random), m), x, std::max(x * 0.125, m_unit));
      ASSERT_NEAR(decode_exp_avg_sq(encode_exp_avg_sq(x, v, random), v), x, std::max(x * 0.0625, v_unit));
    }
  }
}

TEST(Rounding, InfinitiesAndNanStayWhatTheyAre) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN(), full_nan = float_of(0x7fffffff);
  for (const std::uint32_t random : {0u, 1u, 0x8000u, 0xffffu}) {
    EXPECT_EQ(from_bf16(to_bf16(kInfinity, random)), kInfinity);
    EXPECT_EQ(from_bf16(to_bf16(-kInfinity, random)), -kInfinity);
    for (const float x : {nan, -nan, full_nan}) {
      EXPECT_TRUE(std::isnan(from_bf16(to_bf16(x, random))));
      EXPECT_TRUE(std::isnan(decode_exp_avg(encode_exp_avg(x, 255, random), 255)));
      EXPECT_TRUE(std::isnan(decode_exp_avg_sq(encode_exp_avg_sq(x, 255, random), 255)));
    }
    EXPECT_EQ(decode_exp_avg(encode_exp_avg(-kInfinity, 255, random), 255), -kInfinity);
    EXPECT_EQ(decode_exp_avg_sq(encode_exp_avg_sq(kInfinity, 255, random), 255), kInfinity);
  }
  EXPECT_EQ(FirstMomentCode::block_exponent(0x7fffffff), 255u);
  EXPECT_EQ(SecondMomentCode::block_exponent(bits_of(kInfinity)), 255u);
}

// Words of neighbours, of steps and of seeds: bits are balanced and unrelated.
TEST(Rounding, RandomWordsAreBalancedAndUnrelated) {
  const RoundingKeys keys = rounding_keys({.step = 5, .seed = 11}, 0);
  const RoundingKeys next = rounding_keys({.step = 6, .seed = 11}, 0);
  const RoundingKeys other = rounding_keys({.step = 5, .seed = 12}, 0);
  const RoundingKeys upper = rounding_keys({.step = 5, .seed = 11}, 1);
  int ones[32] = {}, equal[5][32] = {};
  for (int i = 0; i < kDraws; ++i) {
    const auto index = static_cast<std::uint32_t>(i);
    const std::uint32_t word = random_word(index, keys.weight);
    const std::uint32_t others[5] = {random_word(index + 1, keys.weight), random_word(index, keys.moments),
                                     random_word(index, next.weight), random_word(index, other.weight),
                                     random_word(index, upper.weight)};
    for (int bit = 0; bit < 32; ++bit) {
      ones[bit] += word >> bit & 1;
      for (int k = 0; k < 5; ++k) equal[k][bit] += ~(word ^ others[k]) >> bit & 1;
    }
  }
  const double limit = 2.5 * std::sqrt(kDraws);  // five times the spread of a fair coin
  for (int bit = 0; bit < 32; ++bit) {
    EXPECT_NEAR(ones[bit], kDraws / 2, limit) << bit;
    for (int k = 0; k < 5; ++k) EXPECT_NEAR(equal[k][bit], kDraws / 2, limit) << bit << " " << k;
  }
}

// Rounding depends on the seed, the step and the index in the parameter, and on nothing else.
TEST(Rounding, IsKeyedBySeedStepAndIndex) {
  const Formats formats{WeightFormat::kBf16, MomentFormat::kBf16};
  const auto result = [&](std::uint64_t seed, std::int64_t step, std::int64_t first) {
    FormattedParameter parameter(formats, 256, 0, first);
    for (std::size_t i = 0; i < parameter.count(); ++i) {
      parameter.set_weight(i, 1.0f);
      parameter.set_gradient(i, 1.0f);
    }
    // lr makes the way a fraction of the distance between neighbours.
    EXPECT_TRUE(
        adamw(Isa::kScalar, {.lr = 1e-3, .weight_decay = 0, .step = step, .seed = seed}, parameter.span()));
    std::vector<float> weights;
    for (std::size_t i = 0; i < parameter.count(); ++i) weights.push_back(parameter.weight(i));
    return weights;
  };
  EXPECT_EQ(result(1, 1, 0), result(1, 1, 0));
  EXPECT_NE(result(1, 1, 0), result(2, 1, 0));
  EXPECT_NE(result(1, 1000, 0), result(1, 1001, 0));
  EXPECT_NE(result(1, 1, 0), result(1, 1, 1));
  EXPECT_NE(result(1, 1, 0), result(1, 1, std::int64_t{1} << 32));
}

TEST(Rounding, WeightsMoveByTheLearningRateOnAverageWhereBf16AloneWouldNotMove) {
  constexpr std::size_t kCount = 1 << 16;
  FormattedParameter parameter({WeightFormat::kBf16, MomentFormat::kFp32}, kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    parameter.set_weight(i, 1.0f);
    parameter.set_gradient(i, 1e-4f);
  }
  constexpr int kSteps = 20;
  for (int step = 1; step <= kSteps; ++step) {
    ASSERT_TRUE(
        adamw(supported_isas().back(), {.lr = 1e-5, .weight_decay = 0, .step = step}, parameter.span()));
  }
  double sum = 0;
  for (std::size_t i = 0; i < kCount; ++i) sum += 1.0 - parameter.weight(i);
  // Each element moves by 2^-8 with a probability of 20 * 1e-5 / 2^-8; the mean's spread is 3.3e-6.
  EXPECT_NEAR(sum / kCount, kSteps * 1e-5, 1.7e-5);
}

}  // namespace
}  // namespace megatrain
