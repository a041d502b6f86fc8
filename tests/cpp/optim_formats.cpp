// Every precision mode: variants against the scalar one to the bit, and the scalar one against
// arithmetic in float64, within what one rounding to the mode's bits may change.
#include "optim_formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>

#include "base/error.h"

namespace megatrain {
namespace {

using testing::all_formats;
using testing::Formats;
using testing::FormattedParameter;
using testing::Values;

UpdateStep some_step(int which) {
  switch (which) {
    case 0:
      return {.lr = 1e-3, .beta2 = 0.95, .weight_decay = 0.1, .step = 3, .gradient_scale = 0.37f, .seed = 5};
    case 1:
      return {.lr = 1e-5, .weight_decay = 0, .step = 100000, .seed = ~std::uint64_t{0}};
    default:
      return {.lr = 0.1, .beta1 = 0.3, .beta2 = 0, .eps = 1e-12, .weight_decay = 0.01, .step = 1};
  }
}

class Mode : public ::testing::TestWithParam<std::tuple<Isa, Formats>> {
 protected:
  static Isa isa() { return std::get<0>(GetParam()); }
  static Formats formats() { return std::get<1>(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(AdamW, Mode,
                         ::testing::Combine(::testing::ValuesIn(supported_isas()),
                                            ::testing::ValuesIn(all_formats())),
                         [](const auto& tested) {
                           return std::string(isa_name(std::get<0>(tested.param))) + "_" +
                                  testing::format_text(std::get<1>(tested.param));
                         });

TEST_P(Mode, EqualsScalarAtEveryLengthAndTouchesNothingElse) {
  std::uint64_t seed = 1;
  for (const std::size_t count : {0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 255, 256, 257, 1000}) {
    for (const std::size_t offset : {0, 3}) {
      for (int which = 0; which < 3; ++which) {
        Values values(++seed);
        FormattedParameter expected(formats(), count, offset);
        expected.fill_any(values);
        FormattedParameter got = expected;
        for (int repeat = 0; repeat < 3; ++repeat) {
          UpdateStep step = some_step(which);
          step.step += repeat;
          const bool finite = apply_update(Isa::kScalar, step, expected.span());
          EXPECT_EQ(apply_update(isa(), step, got.span()), finite);
        }
        ASSERT_TRUE(got == expected) << count << " at " << offset << ", seed " << seed;
        UpdateSpan before = got.span();
        before.count = 0;
        EXPECT_TRUE(apply_update(isa(), some_step(which), before));
        EXPECT_TRUE(got == expected) << "an empty span was written";
      }
    }
  }
}

TEST_P(Mode, DoesNotDependOnWhereASpanIsCut) {
  constexpr std::int64_t kEnd = 1000;
  // The second one crosses 2^32, where the upper half of the index changes.
  for (const std::int64_t first : {std::int64_t{0}, (std::int64_t{1} << 32) - 512}) {
    Values values(23);
    FormattedParameter whole(formats(), kEnd, 0, first);
    whole.fill_any(values);
    FormattedParameter cut = whole;
    FormattedParameter scalar = whole;
    const UpdateStep step = some_step(0);
    (void)apply_update(Isa::kScalar, step, scalar.span());
    (void)apply_update(isa(), step, whole.span());
    for (std::int64_t begin = 0; begin < kEnd;) {
      const std::int64_t end = std::min(begin + (begin == 0 ? 128 : 384), kEnd);
      UpdateSpan part = rest_of(cut.span(), begin);
      part.count = end - begin;
      (void)apply_update(isa(), step, part);
      begin = end;
    }
    EXPECT_TRUE(whole == scalar) << first;
    EXPECT_TRUE(cut == whole) << first;
  }
}

// Neighbours share a random word: a span may begin with the second one.
TEST_P(Mode, SpansMayBeginAndEndBetweenTheTwoElementsThatShareARandomWord) {
  if (formats().moments == MomentFormat::kInt8) return;  // spans begin at blocks
  for (const std::int64_t first : {0, 1}) {
    Values values(41);
    FormattedParameter expected(formats(), 300, 0, first);
    expected.fill_any(values);
    FormattedParameter cut = expected;
    const UpdateStep step = some_step(0);
    (void)apply_update(Isa::kScalar, step, expected.span());
    std::int64_t begin = 0;
    for (const std::int64_t end : {1, 2, 35, 100, 101, 300}) {
      UpdateSpan part = rest_of(cut.span(), begin);
      part.count = end - begin;
      (void)apply_update(isa(), step, part);
      begin = end;
    }
    EXPECT_TRUE(cut == expected) << first;
  }
}

// From the stored state, one step in float64. The stored result may differ by fp32's rounding of a
// few operations and by one rounding to fewer bits: less than a step between neighbours, which is
// 2^-7 of a bf16 value, 2^-3 of an 8-bit first moment and 2^-4 of a second one, or the smallest code.
TEST_P(Mode, AgreesWithFloat64Elementwise) {
  constexpr double kLr = 1e-3, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kDecay = 0.1, kScale = 0.5;
  Values values(3);
  FormattedParameter parameter(formats(), 1000);
  for (std::size_t i = 0; i < parameter.count(); ++i) parameter.set_weight(i, values.normal(0.02f));
  for (int step = 1; step <= 10; ++step) {
    std::vector<double> weights;
    for (std::size_t i = 0; i < parameter.count(); ++i) {
      weights.push_back(parameter.weight(i));
      parameter.set_gradient(i, values.normal(std::pow(10.0f, static_cast<float>(i % 5) - 4)));
    }
    const std::vector<float> old_m = parameter.moments(Moment::kExpAvg);
    const std::vector<float> old_v = parameter.moments(Moment::kExpAvgSq);
    ASSERT_TRUE(apply_update(isa(),
                             {.lr = kLr,
                              .beta1 = kBeta1,
                              .beta2 = kBeta2,
                              .eps = kEps,
                              .weight_decay = kDecay,
                              .step = step,
                              .gradient_scale = static_cast<float>(kScale),
                              .seed = 9},
                             parameter.span()));
    const std::vector<float> m = parameter.moments(Moment::kExpAvg);
    const std::vector<float> v = parameter.moments(Moment::kExpAvgSq);
    for (std::size_t i = 0; i < parameter.count(); ++i) {
      const double g = parameter.gradient(i) * kScale;
      const double expected_m = kBeta1 * old_m[i] + (1 - kBeta1) * g;
      const double expected_v = kBeta2 * old_v[i] + (1 - kBeta2) * g * g;
      const double way = kLr * (expected_m / (1 - std::pow(kBeta1, step))) /
                         (std::sqrt(expected_v / (1 - std::pow(kBeta2, step))) + kEps);
      const double expected_w = weights[i] * (1 - kLr * kDecay) - way;
      double m_tolerance = 1e-6 * (std::abs(double{old_m[i]}) + std::abs(g));
      double v_tolerance = 1e-6 * expected_v;
      double w_tolerance = 1e-6 * (std::abs(weights[i]) + std::abs(way)) + 1e-5 * kLr;
      if (formats().moments == MomentFormat::kBf16) {
        m_tolerance += std::ldexp(std::abs(expected_m), -7);
        v_tolerance += std::ldexp(expected_v, -7);
      } else if (formats().moments == MomentFormat::kInt8) {
        m_tolerance += std::max(std::ldexp(std::abs(expected_m), -3),
                                std::ldexp(double{parameter.block_unit(Moment::kExpAvg, i)} * 1.125, -15));
        v_tolerance += std::max(std::ldexp(expected_v, -4),
                                std::ldexp(double{parameter.block_unit(Moment::kExpAvgSq, i)} * 1.0625, -15));
      }
      if (formats().weights == WeightFormat::kBf16) w_tolerance += std::ldexp(std::abs(expected_w), -7);
      ASSERT_NEAR(parameter.weight(i), expected_w, w_tolerance) << i << ", step " << step;
      ASSERT_NEAR(m[i], expected_m, m_tolerance) << i << ", step " << step;
      ASSERT_NEAR(v[i], expected_v, v_tolerance) << i << ", step " << step;
      ASSERT_EQ(v[i] == 0, expected_v == 0) << i << ", step " << step;
    }
  }
}

TEST_P(Mode, ZeroGradientsWithoutDecayDoNotMoveWeights) {
  Values values(5);
  FormattedParameter before(formats(), 1000);
  for (std::size_t i = 0; i < before.count(); ++i) before.set_weight(i, values.any(0.02f, 1e30f));
  FormattedParameter after = before;
  for (int step = 1; step <= 5; ++step) {
    ASSERT_TRUE(apply_update(isa(), {.lr = 0.1, .weight_decay = 0, .step = step, .seed = 3}, after.span()));
  }
  for (std::size_t i = 0; i < before.count(); ++i) {
    ASSERT_EQ(bits_of(after.weight(i)), bits_of(before.weight(i))) << i;
  }
  for (const Moment moment : {Moment::kExpAvg, Moment::kExpAvgSq}) {
    for (const float value : after.moments(moment)) ASSERT_EQ(bits_of(value), 0u);
  }
}

TEST_P(Mode, ANonFiniteWeightIsReportedWhereverItStandsAndIsWritten) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const std::size_t count : {1, 16, 17, 128, 131, 256}) {
    for (std::size_t at = 0; at < count; at += at < 20 ? 1 : 27) {
      for (const float bad : {kInfinity, -kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
        FormattedParameter of_weight(formats(), count);
        of_weight.set_weight(at, bad);
        EXPECT_FALSE(apply_update(isa(), {}, of_weight.span())) << count << " " << at;
        EXPECT_FALSE(std::isfinite(of_weight.weight(at)));

        FormattedParameter of_gradient(formats(), count);
        of_gradient.set_gradient(at, bad);
        EXPECT_FALSE(apply_update(isa(), {}, of_gradient.span())) << count << " " << at;
        EXPECT_FALSE(std::isfinite(of_gradient.weight(at)));
        EXPECT_FALSE(std::isfinite(of_gradient.moments(Moment::kExpAvg)[at]));
        for (std::size_t i = 0; i < count; ++i) {
          if (i == at) continue;
          ASSERT_EQ(of_gradient.weight(i), 0.0f) << "a neighbour changed";
        }
      }
    }
  }
}

// The GPU would get infinity.
TEST_P(Mode, ASplitWeightWhoseUpperHalfIsInfiniteIsReported) {
  const UpdateStep step{.lr = 0};
  for (const Rule rule : {Rule::kAdamW, Rule::kLion}) {
    for (const std::size_t count : {1, 16, 17, 128, 131}) {
      for (std::size_t at = 0; at < count; at += at < 20 ? 1 : 27) {
        for (const std::uint32_t bits : {0x7f7f7fffu, 0x7f7f8000u, 0xff7f8000u, 0x7f7fffffu, 0x7fffffffu}) {
          if (formats().weights == WeightFormat::kBf16) continue;
          const bool upper_half_only = (bits & 0x7fffffff) >= 0x7f7f8000 && (bits & 0x7fffffff) < 0x7f800000;
          const bool is_split = formats().weights == WeightFormat::kBf16Split;
          FormattedParameter parameter(formats(), count);
          parameter.set_weight(at, float_of(bits));
          UpdateSpan span = parameter.span();
          span.rule = rule;
          const bool finite = bits == 0x7f7f7fff || (upper_half_only && !is_split);
          EXPECT_EQ(apply_update(isa(), step, span), finite)
              << std::hex << bits << " at " << at << " of " << count;
        }
      }
    }
  }
}

TEST(AdamWStep, EpsThatWouldBeLostIsRefused) {
  FormattedParameter parameter({WeightFormat::kFp32, MomentFormat::kFp32}, 10);
  EXPECT_TRUE(apply_update(Isa::kScalar, {.eps = 1e-16}, parameter.span()));
  for (const double eps : {0.0, 9e-17, -1e-8, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROW((void)apply_update(Isa::kScalar, {.eps = eps}, parameter.span()), CallerError) << eps;
  }
}

// Where the second moment is flushed to 0, in the first step, in which bias correction makes most of it.
TEST_P(Mode, TheLeastEpsOutweighsAFlushedSecondMoment) {
  if (formats().weights == WeightFormat::kBf16 || formats().moments != MomentFormat::kFp32) {
    GTEST_SKIP() << "weights or moments are rounded";
  }
  const UpdateStep step{.lr = 1, .eps = kLeastEps, .weight_decay = 0};
  for (const float gradient : {1e-20f, 5e-19f, 3.4e-18f}) {
    FormattedParameter parameter(formats(), 40);
    for (std::size_t i = 0; i < 40; ++i) parameter.set_gradient(i, gradient);
    const double g = parameter.gradient(0), exact = g / (g + kLeastEps);
    ASSERT_TRUE(apply_update(isa(), step, parameter.span()));
    EXPECT_EQ(parameter.moments(Moment::kExpAvgSq)[7], 0.0f);
    EXPECT_GE(-parameter.weight(7), exact * (1 - 1e-6));
    EXPECT_LE(-parameter.weight(7), exact * 1.04);
  }
}

TEST(AdamWSpans, EightBitMomentsBeginAtABlock) {
  FormattedParameter parameter({WeightFormat::kFp32, MomentFormat::kInt8}, 100, 0, 64);
  EXPECT_THROW((void)apply_update(Isa::kScalar, {}, parameter.span()), CallerError);
  FormattedParameter negative({WeightFormat::kFp32, MomentFormat::kFp32}, 100, 0, -1);
  EXPECT_THROW((void)apply_update(Isa::kScalar, {}, negative.span()), CallerError);
}

TEST(AdamWBytes, AreThoseOfTheDesign) {
  const auto bytes = [](WeightFormat weights, MomentFormat moments, std::int64_t count) {
    return update_bytes(weights, moments, count);
  };
  EXPECT_EQ(bytes(WeightFormat::kBf16Split, MomentFormat::kFp32, 10), 260);
  EXPECT_EQ(bytes(WeightFormat::kFp32, MomentFormat::kFp32, 10), 280);
  EXPECT_EQ(bytes(WeightFormat::kBf16, MomentFormat::kFp32, 10), 220);
  EXPECT_EQ(bytes(WeightFormat::kBf16Split, MomentFormat::kBf16, 10), 180);
  EXPECT_EQ(bytes(WeightFormat::kBf16, MomentFormat::kInt8, 129), 1290 + 8);
  EXPECT_EQ(bytes(WeightFormat::kBf16Split, MomentFormat::kInt8, 0), 0);
}

}  // namespace
}  // namespace megatrain
