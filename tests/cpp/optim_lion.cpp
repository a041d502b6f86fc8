// Lion: against its formula, and with what every rule must do: cuts, zeros and non-finite values.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "optim/adamw_math.h"
#include "optim/update_kernels.h"
#include "optim_data.h"
#include "optim_formats.h"

namespace megatrain {
namespace {

using testing::Parameter;
using testing::same_bits;
using testing::Values;

constexpr UpdateStep kStep{
    .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1, .step = 3, .seed = 5};

UpdateSpan lion(UpdateSpan span) {
  span.rule = Rule::kLion;
  span.exp_avg_sq = nullptr;
  return span;
}

// The formula as Chen et al. write it, in the order and rounding of lion.cpp.
void expect_formula(float w, float g, float m, float new_w, float new_m, float scale) {
  g *= scale;
  const float c = 0.9f * m + static_cast<float>(1 - 0.9) * g;
  const float step = c > 0 ? 1e-3f : c < 0 ? -1e-3f : 0.0f;
  EXPECT_EQ(new_w, w * static_cast<float>(1 - 1e-3 * 0.1) - step) << w << ' ' << g << ' ' << m;
  const float expected = 0.99f * m + static_cast<float>(1 - 0.99) * g;
  EXPECT_EQ(new_m, std::abs(expected) < std::numeric_limits<float>::min() ? 0.0f : expected);
}

class Lion : public ::testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Variants, Lion, ::testing::ValuesIn(supported_isas()),
                         [](const auto& tested) { return std::string(isa_name(tested.param)); });

TEST_P(Lion, FollowsItsFormulaAndTouchesNothingElse) {
  for (const std::size_t count : {0, 1, 15, 16, 17, 1000}) {
    for (const float scale : {1.0f, 0.37f}) {
      Values values(count + 1);
      Parameter before(5, count);
      before.fill_any(values);
      UpdateStep step = kStep;
      step.gradient_scale = scale;

      Parameter after = before;
      ASSERT_TRUE(apply_update(GetParam(), step, lion(after.float_span())));
      EXPECT_TRUE(same_bits(after.exp_avg_sq, before.exp_avg_sq));
      for (std::size_t i = 0; i < before.size(); ++i) {
        if (i < 5 || i >= 5 + count) {
          EXPECT_EQ(testing::bits_of(after.weight[i]), testing::bits_of(before.weight[i])) << i;
          EXPECT_EQ(testing::bits_of(after.exp_avg[i]), testing::bits_of(before.exp_avg[i])) << i;
        } else {
          expect_formula(before.weight[i], before.gradient[i], before.exp_avg[i], after.weight[i],
                         after.exp_avg[i], scale);
        }
      }

      after = before;
      ASSERT_TRUE(apply_update(GetParam(), step, lion(after.split_span())));
      const std::vector<float> old_master = before.joined(), master = after.joined();
      for (std::size_t i = 5; i < 5 + count; ++i) {
        expect_formula(old_master[i], testing::from_bf16(before.gradient16[i]), before.exp_avg[i], master[i],
                       after.exp_avg[i], scale);
      }
    }
  }
}

TEST_P(Lion, ZeroGradientsWithoutDecayMoveNothing) {
  std::vector<std::uint16_t> weights(300, 0x3f80), gradients(300, 0);
  std::vector<std::uint8_t> codes(300, 0), exponents(3, 0);
  const std::vector<std::uint16_t> before = weights;
  UpdateStep step = kStep;
  step.weight_decay = 0;
  for (step.step = 1; step.step < 50; ++step.step) {
    ASSERT_TRUE(apply_update(GetParam(), step,
                             {.weight_format = WeightFormat::kBf16,
                              .moment_format = MomentFormat::kInt8,
                              .weight = weights.data(),
                              .gradient = gradients.data(),
                              .exp_avg = codes.data(),
                              .exp_avg_exponents = exponents.data(),
                              .count = 300,
                              .rule = Rule::kLion}));
  }
  EXPECT_TRUE(same_bits(weights, before));
}

TEST_P(Lion, NotANumberIsFound) {
  Parameter parameter(0, 20);
  parameter.gradient[13] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(apply_update(GetParam(), kStep, lion(parameter.float_span())));
  EXPECT_TRUE(std::isnan(parameter.weight[13]));
  EXPECT_TRUE(std::isfinite(parameter.weight[12]));
}

// Any values: denormals, infinities and NaN among them.
TEST_P(Lion, EqualsScalarInEveryFormatAtEveryLength) {
  std::uint64_t seed = 1;
  for (const testing::Formats formats : testing::all_formats()) {
    for (const std::size_t count : {1, 7, 8, 15, 16, 17, 33, 127, 128, 129, 256, 1000}) {
      // The last one crosses 2^32, where the upper half of the index changes.
      for (const std::int64_t first : {std::int64_t{0}, std::int64_t{1}, (std::int64_t{1} << 32) - 128}) {
        if (formats.moments == MomentFormat::kInt8 && first % kMomentBlock != 0) continue;
        Values values(++seed);
        testing::FormattedParameter expected(formats, count, 3, first);
        expected.fill_any(values);
        testing::FormattedParameter got = expected;
        for (int repeat = 0; repeat < 3; ++repeat) {
          UpdateStep step = kStep;
          step.step += repeat;
          step.gradient_scale = 0.37f;
          const bool finite = apply_update(Isa::kScalar, step, lion(expected.span()));
          EXPECT_EQ(apply_update(GetParam(), step, lion(got.span())), finite);
        }
        ASSERT_TRUE(got == expected) << testing::format_text(formats) << ", " << count << " from " << first
                                     << ", seed " << seed;
      }
    }
  }
}

// Stochastic rounding in weights and moments: keyed by the element, wherever a span is cut.
TEST(LionFormats, CutsChangeNoBit) {
  for (const MomentFormat moments : {MomentFormat::kBf16, MomentFormat::kInt8}) {
    constexpr std::int64_t kCount = 700, kCut = 256;
    Values values(3);
    std::vector<std::uint16_t> weights(kCount), gradients(kCount), moments16(kCount);
    for (auto& x : weights) x = testing::to_bf16(values.normal(0.02f));
    for (auto& x : gradients) x = testing::to_bf16(values.normal(1e-3f));
    std::vector<std::uint8_t> exponents(kCount / kMomentBlock + 1);
    std::vector<std::uint16_t> cut_weights = weights, cut_moments = moments16;
    std::vector<std::uint8_t> cut_exponents = exponents;
    const auto span = [&](auto& w, auto& m, auto& e) {
      return UpdateSpan{.weight_format = WeightFormat::kBf16,
                        .moment_format = moments,
                        .weight = w.data(),
                        .gradient = gradients.data(),
                        .exp_avg = m.data(),
                        .exp_avg_exponents = e.data(),
                        .count = kCount,
                        .rule = Rule::kLion};
    };
    UpdateStep step = kStep;
    for (step.step = 1; step.step < 6; ++step.step) {
      ASSERT_TRUE(apply_update(Isa::kScalar, step, span(weights, moments16, exponents)));
      UpdateSpan first = span(cut_weights, cut_moments, cut_exponents);
      const UpdateSpan second = rest_of(first, kCut);
      first.count = kCut;
      ASSERT_TRUE(apply_update(Isa::kScalar, step, second));
      ASSERT_TRUE(apply_update(Isa::kScalar, step, first));
    }
    EXPECT_TRUE(same_bits(weights, cut_weights));
    EXPECT_TRUE(same_bits(moments16, cut_moments));
    EXPECT_TRUE(same_bits(exponents, cut_exponents));
    EXPECT_NE(moments16[0], 0);
  }
}

TEST(LionFormats, BytesOfOneMoment) {
  EXPECT_EQ(update_bytes(WeightFormat::kBf16Split, MomentFormat::kFp32, 100, Rule::kLion), 1800);
  EXPECT_EQ(update_bytes(WeightFormat::kBf16Split, MomentFormat::kFp32, 100), 2600);
  EXPECT_EQ(update_bytes(WeightFormat::kBf16, MomentFormat::kInt8, 256, Rule::kLion), 256 * 8 + 4);
}

}  // namespace
}  // namespace megatrain
