// What the update computes: against a float64 reference, at zero gradients, at non-finite values.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "optim_data.h"

namespace megatrain {
namespace {

using testing::bits_of;
using testing::Parameter;
using testing::same_bits;
using testing::Values;

class AdamW : public ::testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(Isa, AdamW, ::testing::ValuesIn(supported_isas()),
                         [](const auto& tested) { return std::string(isa_name(tested.param)); });

struct Reference {
  std::vector<double> weight, exp_avg, exp_avg_sq;

  explicit Reference(const Parameter& from)
      : weight(from.weight.begin(), from.weight.end()), exp_avg(weight.size()), exp_avg_sq(weight.size()) {}

  void update(const UpdateStep& s, std::size_t i, double gradient) {
    const double g = gradient * s.gradient_scale;
    exp_avg[i] = s.beta1 * exp_avg[i] + (1 - s.beta1) * g;
    exp_avg_sq[i] = s.beta2 * exp_avg_sq[i] + (1 - s.beta2) * g * g;
    const double m = exp_avg[i] / (1 - std::pow(s.beta1, s.step));
    const double v = exp_avg_sq[i] / (1 - std::pow(s.beta2, s.step));
    weight[i] = weight[i] * (1 - s.lr * s.weight_decay) - s.lr * m / (std::sqrt(v) + s.eps);
  }
};

// Ten steps, each element for itself. Each step rounds the weight twice (2^-24 relative each) and the
// moments a few times, which m/sqrt(v) passes on: weights are held to 3e-6 of their size plus 1e-5
// of the largest possible way, lr times the steps; moments to 1e-5 of the largest that the element
// had (a first moment near a change of sign has lost digits), second ones to 3e-6.
TEST_P(AdamW, AgreesWithAFloat64ReferenceInBothFormats) {
  constexpr int kSteps = 10;
  for (const double beta1 : {0.9, 0.3, 0.0}) {
    Values values(3);
    Parameter whole(0, 1000);
    for (float& w : whole.weight) w = values.normal(0.02f);
    Parameter split = whole;
    split.split();
    Reference whole_reference(whole), split_reference(whole);
    std::vector<double> largest(whole.size());
    const double lr = 1e-3;
    for (int step = 1; step <= kSteps; ++step) {
      for (std::size_t i = 0; i < whole.count; ++i) {
        whole.gradient[i] = values.normal(std::pow(10.0f, static_cast<float>(i % 7) - 4));
        split.gradient16[i] = testing::to_bf16(whole.gradient[i]);
        largest[i] = std::max(largest[i], 1.01 * std::abs(whole.gradient[i]));
      }
      const UpdateStep settings{
          .lr = lr, .beta1 = beta1, .beta2 = 0.95, .weight_decay = 0.1, .step = step, .gradient_scale = 0.5f};
      for (std::size_t i = 0; i < whole.count; ++i) {
        whole_reference.update(settings, i, whole.gradient[i]);
        split_reference.update(settings, i, testing::from_bf16(split.gradient16[i]));
      }
      ASSERT_TRUE(apply_update(GetParam(), settings, whole.float_span()));
      ASSERT_TRUE(apply_update(GetParam(), settings, split.split_span()));
    }
    const std::vector<float> joined = split.joined();
    const auto expect_close = [&](const Parameter& got, const std::vector<float>& weight,
                                  const Reference& reference) {
      for (std::size_t i = 0; i < got.count; ++i) {
        ASSERT_NEAR(weight[i], reference.weight[i], 3e-6 * std::abs(reference.weight[i]) + 1e-5 * lr * kSteps)
            << i;
        ASSERT_NEAR(got.exp_avg[i], reference.exp_avg[i], 1e-5 * largest[i]) << i;
        ASSERT_NEAR(got.exp_avg_sq[i], reference.exp_avg_sq[i], 3e-6 * reference.exp_avg_sq[i]) << i;
      }
    };
    expect_close(whole, whole.weight, whole_reference);
    expect_close(split, joined, split_reference);
  }
}

TEST_P(AdamW, ZeroGradientsWithoutDecayDoNotMoveWeights) {
  Values values(5);
  Parameter before(0, 1000);
  for (float& w : before.weight) w = values.any(0.02f, 1e30f);  // denormals and both zeros too
  before.split();
  Parameter after = before;
  for (int step = 1; step <= 5; ++step) {
    const UpdateStep settings{.lr = 0.1, .weight_decay = 0, .step = step};
    ASSERT_TRUE(apply_update(GetParam(), settings, after.split_span()));
    ASSERT_TRUE(apply_update(GetParam(), settings, after.float_span()));
  }
  EXPECT_TRUE(same_bits(after, before));
}

TEST_P(AdamW, MomentsReachExactlyZeroUnderZeroGradientsAndAreNeverDenormal) {
  Parameter parameter(0, 33);
  for (std::size_t i = 0; i < parameter.count; ++i) {
    const float sign = i % 2 ? 1.0f : -1.0f;
    parameter.exp_avg[i] = sign * std::ldexp(1.0f + 0.01f * static_cast<float>(i), -120);
    parameter.exp_avg_sq[i] = std::ldexp(1.0f + 0.01f * static_cast<float>(i), -120);
  }
  const float smallest_normal = std::numeric_limits<float>::min();
  for (int step = 1; step <= 100; ++step) {
    ASSERT_TRUE(apply_update(GetParam(), {.beta2 = 0.9, .step = step}, parameter.float_span()));
    for (std::size_t i = 0; i < parameter.count; ++i) {
      for (const float moment : {parameter.exp_avg[i], parameter.exp_avg_sq[i]}) {
        ASSERT_TRUE(moment == 0 || std::abs(moment) >= smallest_normal) << moment << " at step " << step;
      }
    }
  }
  for (std::size_t i = 0; i < parameter.count; ++i) {
    EXPECT_EQ(bits_of(parameter.exp_avg[i]), 0u) << i;
    EXPECT_EQ(bits_of(parameter.exp_avg_sq[i]), 0u) << i;
  }
}

TEST_P(AdamW, ADenormalGradientCountsAsZeroAndTheSmallestNormalOneDoesNot) {
  Parameter parameter(0, 17);
  const float smallest_normal = std::numeric_limits<float>::min();
  for (std::size_t i = 0; i < parameter.count; ++i) {
    parameter.gradient[i] = std::nextafter(smallest_normal, i % 2 ? 1.0f : 0.0f);
  }
  ASSERT_TRUE(apply_update(GetParam(), {.beta1 = 0, .step = 1}, parameter.float_span()));
  for (std::size_t i = 0; i < parameter.count; ++i) {
    EXPECT_EQ(parameter.exp_avg[i], i % 2 ? parameter.gradient[i] : 0.0f) << i;
    EXPECT_EQ(parameter.weight[i] != 0, i % 2 == 1) << i;
  }
}

TEST_P(AdamW, ANonFiniteWeightIsReportedWhereverItStandsAndIsWritten) {
  for (const std::size_t count : {1, 8, 15, 16, 17, 40}) {
    for (std::size_t at = 0; at < count; ++at) {
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::quiet_NaN()}) {
        Parameter parameter(0, count);
        parameter.weight[at] = bad;
        EXPECT_FALSE(apply_update(GetParam(), {}, parameter.float_span())) << count << " " << at;
        EXPECT_FALSE(std::isfinite(parameter.weight[at]));

        Parameter from_gradient(0, count);
        from_gradient.gradient16[at] = testing::to_bf16(std::numeric_limits<float>::quiet_NaN());
        ASSERT_TRUE(std::isnan(testing::from_bf16(from_gradient.gradient16[at])));
        EXPECT_FALSE(apply_update(GetParam(), {}, from_gradient.split_span())) << count << " " << at;
        EXPECT_TRUE(std::isnan(from_gradient.exp_avg[at]));
      }
    }
  }
}

// Values just outside the span must not be taken for the span's.
TEST_P(AdamW, NonFiniteNeighboursOfTheSpanAreNotReported) {
  for (const std::size_t count : {0, 1, 7, 15, 17, 33}) {
    Parameter parameter(3, count);
    for (std::size_t i = 0; i < parameter.size(); ++i) {
      if (i < 3 || i >= 3 + count) parameter.weight[i] = std::numeric_limits<float>::quiet_NaN();
    }
    parameter.split();
    EXPECT_TRUE(
        apply_update(GetParam(), {.eps = kLeastEps, .weight_decay = 0}, Parameter(0, 0).float_span()));
    EXPECT_TRUE(apply_update(GetParam(), {}, parameter.float_span())) << count;
    EXPECT_TRUE(apply_update(GetParam(), {}, parameter.split_span())) << count;
  }
}

TEST_P(AdamW, OrdinaryStepMovesEveryWeightByAboutTheLearningRate) {
  Parameter parameter(0, 100);
  for (std::size_t i = 0; i < parameter.count; ++i) {
    parameter.weight[i] = 1.0f;  // a norm weight: bf16 alone would not move at this rate
    parameter.gradient[i] = i % 2 ? 1e-4f : -1e-4f;
  }
  parameter.split();
  ASSERT_TRUE(apply_update(GetParam(), {.lr = 1e-5, .weight_decay = 0}, parameter.split_span()));
  const std::vector<float> weight = parameter.joined();
  for (std::size_t i = 0; i < parameter.count; ++i) {
    EXPECT_NEAR(weight[i] - 1.0f, i % 2 ? -1e-5 : 1e-5, 1.2e-7) << i;  // one ulp at 1.0
  }
}

}  // namespace
}  // namespace megatrain
