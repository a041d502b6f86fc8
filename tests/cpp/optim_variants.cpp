// Every variant against the scalar one, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>

#include "base/error.h"
#include "optim_data.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace megatrain {
namespace {

using testing::Parameter;
using testing::same_bits;
using testing::Values;

constexpr std::size_t kLengths[] = {0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 1000, 4097};

UpdateStep some_step(int which) {
  switch (which) {
    case 0:
      return {.lr = 1e-3, .beta2 = 0.95, .weight_decay = 0.1, .step = 3, .gradient_scale = 0.37f};
    case 1:
      return {.lr = 1e-5, .eps = 1e-8, .weight_decay = 0, .step = 100000};
    default:
      return {.lr = 0.1, .beta1 = 0.3, .beta2 = 0, .eps = 1e-12, .weight_decay = 0.01, .step = 1};
  }
}

class Variant : public ::testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(AdamW, Variant, ::testing::ValuesIn(supported_isas()),
                         [](const auto& tested) { return std::string(isa_name(tested.param)); });

TEST_P(Variant, EqualsScalarAtEveryLengthAndOffset) {
  std::uint64_t seed = 1;
  for (const std::size_t count : kLengths) {
    for (const std::size_t offset : {0, 1, 3, 8, 13}) {
      for (int which = 0; which < 3; ++which) {
        Values values(++seed);
        Parameter expected(offset, count);
        expected.fill_any(values);
        Parameter got = expected;
        for (int repeat = 0; repeat < 2; ++repeat) {
          UpdateStep step = some_step(which);
          step.step += repeat;
          const bool expected_finite = apply_update(Isa::kScalar, step, expected.split_span());
          EXPECT_EQ(apply_update(GetParam(), step, got.split_span()), expected_finite);
        }
        ASSERT_TRUE(same_bits(got, expected)) << "split, " << count << " at " << offset << ", seed " << seed;
        for (int repeat = 0; repeat < 2; ++repeat) {
          UpdateStep step = some_step(which);
          step.step += repeat;
          const bool expected_finite = apply_update(Isa::kScalar, step, expected.float_span());
          EXPECT_EQ(apply_update(GetParam(), step, got.float_span()), expected_finite);
        }
        ASSERT_TRUE(same_bits(got, expected)) << "fp32, " << count << " at " << offset << ", seed " << seed;
      }
    }
  }
}

TEST_P(Variant, TouchesNothingOutsideTheSpan) {
  for (const std::size_t count : kLengths) {
    Values values(count);
    Parameter before(5, count);
    before.fill_any(values);
    Parameter after = before;
    (void)apply_update(GetParam(), some_step(0), after.split_span());
    (void)apply_update(GetParam(), some_step(0), after.float_span());
    for (std::size_t i = 0; i < before.size(); ++i) {
      if (i >= 5 && i < 5 + count) {
        after.weight[i] = before.weight[i], after.high[i] = before.high[i], after.low[i] = before.low[i];
        after.exp_avg[i] = before.exp_avg[i], after.exp_avg_sq[i] = before.exp_avg_sq[i];
      }
    }
    EXPECT_TRUE(same_bits(after, before)) << count;
  }
}

// The split span is the same update as the fp32 one, on a bf16 gradient.
TEST_P(Variant, SplitEqualsFloatOnTheSameGradient) {
  Values values(7);
  Parameter parameter(0, 1000);
  for (std::size_t i = 0; i < parameter.size(); ++i) {
    parameter.weight[i] = values.normal(0.02f);
    parameter.gradient[i] = testing::from_bf16(testing::to_bf16(values.normal(1e-3f)));
  }
  parameter.split();
  Parameter split = parameter;
  for (int step = 1; step <= 20; ++step) {
    const UpdateStep settings{.lr = 1e-3, .weight_decay = 0.1, .step = step};
    ASSERT_TRUE(apply_update(GetParam(), settings, split.split_span()));
    ASSERT_TRUE(apply_update(GetParam(), settings, parameter.float_span()));
  }
  EXPECT_TRUE(same_bits(split.joined(), parameter.weight));
  EXPECT_TRUE(same_bits(split.exp_avg, parameter.exp_avg));
  EXPECT_TRUE(same_bits(split.exp_avg_sq, parameter.exp_avg_sq));
}

#if defined(__x86_64__)
TEST_P(Variant, DoesNotDependOnTheThreadsFloatModes) {
  Values values(11);
  Parameter expected(1, 1000);
  expected.fill_any(values);
  Parameter got = expected;
  (void)apply_update(GetParam(), some_step(0), expected.split_span());
  (void)apply_update(GetParam(), some_step(0), expected.float_span());

  const unsigned saved = _mm_getcsr();
  const unsigned flush_and_round_up = saved | 0x8040 | _MM_ROUND_UP;
  _mm_setcsr(flush_and_round_up);
  (void)apply_update(GetParam(), some_step(0), got.split_span());
  (void)apply_update(GetParam(), some_step(0), got.float_span());
  const unsigned after = _mm_getcsr() & ~_MM_EXCEPT_MASK;
  _mm_setcsr(saved);
  EXPECT_EQ(after, flush_and_round_up & ~_MM_EXCEPT_MASK) << "the thread's modes were not restored";
  EXPECT_TRUE(same_bits(got, expected));
}
#endif

TEST(AdamW, AnInstructionSetThatThisCpuLacksIsRefused) {
  Parameter parameter(0, 1);
  const auto isas = supported_isas();
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kNeon, static_cast<Isa>(99)}) {
    if (std::find(isas.begin(), isas.end(), isa) != isas.end()) continue;
    EXPECT_THROW((void)apply_update(isa, {}, parameter.split_span()), CallerError);
    EXPECT_THROW((void)apply_update(isa, {}, parameter.float_span()), CallerError);
  }
}

TEST(AdamW, SettingsWithoutMeaningAreRefused) {
  Parameter parameter(0, 1);
  EXPECT_THROW((void)apply_update(Isa::kScalar, {.step = 0}, parameter.split_span()), CallerError);
  EXPECT_THROW((void)apply_update(Isa::kScalar, {.beta1 = 1.0}, parameter.float_span()), CallerError);
  EXPECT_THROW((void)apply_update(Isa::kScalar, {.beta2 = -0.1}, parameter.float_span()), CallerError);
  AdamWFloatSpan negative = parameter.float_span();
  negative.count = -1;
  EXPECT_THROW((void)apply_update(Isa::kScalar, {}, negative), CallerError);
}

}  // namespace
}  // namespace megatrain
