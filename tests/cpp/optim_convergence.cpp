// Long runs in every precision mode: nothing drifts, and minima are found as with fp32 moments.
#include <gtest/gtest.h>

#include <cmath>

#include "optim_formats.h"

namespace megatrain {
namespace {

using testing::Formats;
using testing::FormattedParameter;
using testing::Values;

class Convergence : public ::testing::TestWithParam<Formats> {};
INSTANTIATE_TEST_SUITE_P(AdamW, Convergence, ::testing::ValuesIn(testing::all_formats()),
                         [](const auto& tested) { return testing::format_text(tested.param); });

constexpr std::size_t kCount = 256;
constexpr int kSteps = 10000;

struct Quadratic {
  std::vector<float> target, curvature;
  explicit Quadratic(Values& values) {
    for (std::size_t i = 0; i < kCount; ++i) {
      target.push_back(values.normal(0.5f));
      curvature.push_back(std::pow(10.0f, static_cast<float>(i % 4) - 2));  // 0.01 to 10 in one block
    }
  }
};

// f(w) = sum of curvature / 2 (w - target)^2, with noise of a tenth of the curvature on the gradient.
// At the end the weight moves around its target by a few learning rates, in bf16 by a few steps of
// its own; the mean over the elements of one curvature shows a drift much sooner than any element.
TEST_P(Convergence, TenThousandStepsOnAQuadraticEndAtItsMinimumWithoutDrift) {
  for (const double beta2 : {0.95, 0.999}) {
    Values values(31);
    const Quadratic f(values);
    FormattedParameter parameter(GetParam(), kCount);
    for (std::size_t i = 0; i < kCount; ++i) parameter.set_weight(i, f.target[i] + values.normal(0.3f));
    std::vector<double> mean(kCount);
    double worst = 0;
    constexpr int kTail = 5000;
    constexpr double kLr = 1e-3;
    for (int step = 1; step <= kSteps; ++step) {
      for (std::size_t i = 0; i < kCount; ++i) {
        const float noise = values.normal(0.1f);
        parameter.set_gradient(i, f.curvature[i] * (parameter.weight(i) - f.target[i] + noise));
      }
      ASSERT_TRUE(apply_update(supported_isas().back(),
                               {.lr = kLr, .beta2 = beta2, .weight_decay = 0, .step = step, .seed = 1},
                               parameter.span()));
      if (step <= kSteps - kTail) continue;
      for (std::size_t i = 0; i < kCount; ++i) {
        const double off = parameter.weight(i) - f.target[i];
        mean[i] += off / kTail;
        worst = std::max(worst, std::abs(off));
      }
    }
    EXPECT_LT(worst, 0.1) << beta2;
    for (std::size_t group = 0; group < 4; ++group) {
      double sum = 0;
      for (std::size_t i = group; i < kCount; i += 4) {
        EXPECT_NEAR(mean[i], 0, 0.02) << i << " " << beta2;
        sum += mean[i];
      }
      EXPECT_NEAR(sum / (kCount / 4), 0, 2e-3) << "curvature group " << group << ", beta2 " << beta2;
    }
  }
}

// Pure noise has no direction: the mean way over many elements is small against that of one.
TEST_P(Convergence, NoiseWithoutAGradientDoesNotDrift) {
  Values values(37);
  FormattedParameter parameter(GetParam(), 4096);
  constexpr double kLr = 1e-4;
  constexpr int kNoiseSteps = 1000;
  for (int step = 1; step <= kNoiseSteps; ++step) {
    for (std::size_t i = 0; i < parameter.count(); ++i) {
      parameter.set_gradient(i, values.normal(std::pow(10.0f, static_cast<float>(i % 3) - 3)));
    }
    ASSERT_TRUE(apply_update(supported_isas().back(), {.lr = kLr, .weight_decay = 0, .step = step},
                             parameter.span()));
  }
  double sum = 0, squares = 0;
  for (std::size_t i = 0; i < parameter.count(); ++i) {
    sum += parameter.weight(i);
    squares += double{parameter.weight(i)} * parameter.weight(i);
  }
  const double count = static_cast<double>(parameter.count());
  EXPECT_LT(std::abs(sum / count), 5 * std::sqrt(squares / count / count));
  EXPECT_LT(std::sqrt(squares / count), 3 * kLr * std::sqrt(kNoiseSteps) * std::sqrt(10.0));
}

}  // namespace
}  // namespace megatrain
