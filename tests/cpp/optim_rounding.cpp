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

// As the update codes a moment for which `word` was drawn.
std::uint8_t coded_exp_avg(float x, std::uint32_t exponent, std::uint32_t word) {
  return encode_exp_avg(to_bf16(x, for_exp_avg(word)), exponent, for_exp_avg_code(word));
}
std::uint8_t coded_exp_avg_sq(float x, std::uint32_t exponent, std::uint32_t word) {
  return encode_exp_avg_sq(to_bf16(x, for_exp_avg_sq(word)), exponent, for_exp_avg_sq_code(word));
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
        const RoundingKey one = rounding_key({.step = 7, .seed = 1}, 0);
        over_elements += from_bf16(to_bf16(x, for_weight(random_word(static_cast<std::uint32_t>(i), one))));
        const RoundingKey other = rounding_key({.step = 1 + i, .seed = 1}, 0);
        over_steps += from_bf16(to_bf16(x, for_exp_avg(random_word(12345, other))));
      }
      expect_unbiased(over_elements, x, step, kDraws);
      expect_unbiased(over_steps, x, step, kDraws);
    }
  }
}

TEST(Rounding, ToEightBitCodesIsRightOnAverage) {
  const RoundingKey key = rounding_key({.step = 3, .seed = 2}, 0);
  const std::uint32_t exponent = 127;  // the unit is 1
  for (const float fraction : kFractions) {
    for (const float lower : {1.0f, 0.03125f, std::ldexp(1.0f, -14), std::ldexp(1.125f, -15)}) {
      const float power = std::exp2(std::floor(std::log2(lower)));
      const float m_step = power / 8, v_step = power / 16;
      const float m = lower + fraction * m_step, v = lower + fraction * v_step;
      double m_sum = 0, negative_sum = 0, v_sum = 0;
      for (int i = 0; i < kDraws; ++i) {
        const std::uint32_t word = random_word(static_cast<std::uint32_t>(i), key);
        m_sum += decode_exp_avg(coded_exp_avg(m, exponent, word), exponent);
        negative_sum += decode_exp_avg(coded_exp_avg(-m, exponent, word), exponent);
        v_sum += decode_exp_avg_sq(coded_exp_avg_sq(v, exponent, word), exponent);
      }
      expect_unbiased(m_sum, m, m_step, kDraws);
      expect_unbiased(negative_sum, -m, m_step, kDraws);
      expect_unbiased(v_sum, v, v_step, kDraws);
    }
  }
}

TEST(Rounding, BelowTheSmallestCodeFirstMomentsBecomeZeroAndSecondOnesDoNot) {
  const std::uint32_t exponent = 127;
  const float below = std::ldexp(0.999f, -15);
  for (const float x : {below, std::ldexp(1.0f, -40), std::numeric_limits<float>::min()}) {
    for (const std::uint32_t word : {0u, 0x12345678u, ~0u}) {
      EXPECT_EQ(decode_exp_avg(coded_exp_avg(x, exponent, word), exponent), 0);
      EXPECT_EQ(decode_exp_avg(coded_exp_avg(-x, exponent, word), exponent), 0);
      EXPECT_EQ(decode_exp_avg_sq(coded_exp_avg_sq(x, exponent, word), exponent), std::ldexp(1.0625f, -15));
    }
  }
}

TEST(Rounding, EveryCodeIsReadAndWrittenUnchangedAtEveryExponent) {
  for (std::uint32_t exponent = kSmallestBlockExponent; exponent <= 254; ++exponent) {
    for (std::uint32_t code = 0; code < 256; ++code) {
      const auto byte = static_cast<std::uint8_t>(code);
      for (const std::uint32_t word : {0u, 0x80008000u, ~0u}) {
        const float m = decode_exp_avg(byte, exponent), v = decode_exp_avg_sq(byte, exponent);
        ASSERT_TRUE(std::isfinite(m) && std::isfinite(v));
        ASSERT_TRUE(m == 0 || std::isnormal(m)) << exponent << " " << code;
        ASSERT_TRUE(v == 0 || std::isnormal(v)) << exponent << " " << code;
        ASSERT_EQ(coded_exp_avg(m, exponent, word), byte == 0x80 ? 0 : byte) << exponent;
        ASSERT_EQ(coded_exp_avg_sq(v, exponent, word), byte) << exponent;
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
    if (x < 1e-30f) continue;  // blocks so small share the smallest exponent
    for (const std::uint32_t word : {0u, ~0u}) {
      const std::uint32_t m = FirstMomentCode::block_exponent(to_bf16(x, for_exp_avg(word)));
      const std::uint32_t v = SecondMomentCode::block_exponent(to_bf16(x, for_exp_avg_sq(word)));
      if (m == 255 || v == 255) continue;
      ASSERT_NEAR(decode_exp_avg(coded_exp_avg(x, m, word), m), x, x * 0.125);
      ASSERT_NEAR(decode_exp_avg_sq(coded_exp_avg_sq(x, v, word), v), x, x * 0.0625);
    }
  }
}

TEST(Rounding, InfinitiesAndNanStayWhatTheyAre) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float nan = std::numeric_limits<float>::quiet_NaN(), full_nan = float_of(0x7fffffff);
  for (const std::uint32_t word : {0u, 1u, 0x80008000u, ~0u}) {
    const std::uint32_t half = for_exp_avg(word);
    EXPECT_EQ(from_bf16(to_bf16(kInfinity, half)), kInfinity);
    EXPECT_EQ(from_bf16(to_bf16(-kInfinity, half)), -kInfinity);
    for (const float x : {nan, -nan, full_nan}) {
      EXPECT_TRUE(std::isnan(from_bf16(to_bf16(x, half))));
      EXPECT_TRUE(std::isnan(decode_exp_avg(coded_exp_avg(x, 255, word), 255)));
    }
    EXPECT_EQ(decode_exp_avg(coded_exp_avg(-kInfinity, 255, word), 255), -kInfinity);
    const std::uint8_t code = coded_exp_avg_sq(kInfinity, 255, word);
    EXPECT_EQ(decode_exp_avg_sq(code, 255), kInfinity);
  }
  EXPECT_EQ(FirstMomentCode::block_exponent(exp_avg_size(0xffff)), 255u);
  EXPECT_EQ(SecondMomentCode::block_exponent(exp_avg_sq_size(0x7f80)), 255u);
  EXPECT_EQ(SecondMomentCode::block_exponent(exp_avg_sq_size(0xffc0)), 255u) << "NaN with a sign";
}

// Words of neighbours, of steps and of seeds: bits are balanced and unrelated.
TEST(Rounding, RandomWordsAreBalancedAndUnrelated) {
  constexpr int kOthers = 4;
  const RoundingKey key = rounding_key({.step = 5, .seed = 11}, 0);
  const RoundingKey next = rounding_key({.step = 6, .seed = 11}, 0);
  const RoundingKey other = rounding_key({.step = 5, .seed = 12}, 0);
  const RoundingKey upper = rounding_key({.step = 5, .seed = 11}, 1);
  int ones[32] = {}, equal[kOthers][32] = {};
  for (int i = 0; i < kDraws; ++i) {
    const auto index = static_cast<std::uint32_t>(i);
    const std::uint32_t word = random_word(index, key);
    const std::uint32_t others[kOthers] = {random_word(index + 1, key), random_word(index, next),
                                           random_word(index, other), random_word(index, upper)};
    for (int bit = 0; bit < 32; ++bit) {
      ones[bit] += word >> bit & 1;
      for (int k = 0; k < kOthers; ++k) equal[k][bit] += ~(word ^ others[k]) >> bit & 1;
    }
  }
  const double limit = 2.5 * std::sqrt(kDraws);  // five times the spread of a fair coin
  for (int bit = 0; bit < 32; ++bit) {
    EXPECT_NEAR(ones[bit], kDraws / 2, limit) << bit;
    for (int k = 0; k < kOthers; ++k) EXPECT_NEAR(equal[k][bit], kDraws / 2, limit) << bit << " " << k;
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
    EXPECT_TRUE(apply_update(Isa::kScalar, {.lr = 1e-3, .weight_decay = 0, .step = step, .seed = seed},
                             parameter.span()));
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
    ASSERT_TRUE(apply_update(supported_isas().back(), {.lr = 1e-5, .weight_decay = 0, .step = step},
                             parameter.span()));
  }
  double sum = 0;
  for (std::size_t i = 0; i < kCount; ++i) sum += 1.0 - parameter.weight(i);
  // Each element moves by 2^-8 with a probability of 20 * 1e-5 / 2^-8; the mean's spread is 3.3e-6.
  EXPECT_NEAR(sum / kCount, kSteps * 1e-5, 1.7e-5);
}

// Over all random bits, exactly.
TEST(MomentCodes, ExpectationsAreTheValuesFromTheSmallestCodeOn) {
  constexpr std::uint32_t kExponent = 120, kSteps = 16;
  const std::uint32_t base = FirstMomentCode::base(kExponent);
  const double smallest = decode_exp_avg(1, kExponent);
  for (std::uint32_t size = 1; size < base + kSteps * FirstMomentCode::kLargest; ++size) {
    double sum = 0;
    for (std::uint32_t random = 0; random < kSteps; ++random) {
      sum += decode_exp_avg(encode_exp_avg(static_cast<std::uint16_t>(size), kExponent, random), kExponent);
    }
    const double value = from_bf16(static_cast<std::uint16_t>(size));
    if (size >= base + kSteps) {
      ASSERT_EQ(sum / kSteps, value) << size;
    } else {
      const double share = size <= base ? 0.0 : static_cast<double>(size - base) / kSteps;
      ASSERT_EQ(sum / kSteps, share * smallest) << size;
      ASSERT_LE(value - sum / kSteps, smallest * 8 / 9) << size;
    }
  }
}

}  // namespace
}  // namespace megatrain
