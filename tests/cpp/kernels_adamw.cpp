// The CUDA updates against those of the host, bit for bit, in every precision mode.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "device/backend.h"
#include "device_memory.h"
#include "kernels/device_adamw.h"
#include "kernels/device_lion.h"
#include "optim_formats.h"

namespace megatrain {
namespace {

using testing::Formats;
using testing::FormattedParameter;
using testing::Values;

void ok(cudaError_t code) { ASSERT_EQ(code, cudaSuccess) << cudaGetErrorString(code); }

// The arrays of a parameter on the device. They begin 256 bytes apart at least, as cudaMalloc aligns.
class OnDevice {
 public:
  explicit OnDevice(FormattedParameter& parameter, Rule rule = Rule::kAdamW)
      : parameter_(parameter), rule_(rule) {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      const auto from = parameter.arrays()[i];
      arrays_[i] = static_cast<std::byte*>(testing::cuda_allocate(0, std::max<std::size_t>(from.size(), 1)));
      ok(cudaMemcpy(arrays_[i], from.data(), from.size(), cudaMemcpyHostToDevice));
    }
    non_finite_ = static_cast<int*>(testing::cuda_allocate(0, sizeof(int)));
    ok(cudaMemset(non_finite_, 0, sizeof(int)));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    for (std::byte* array : arrays_) testing::cuda_free(array);
    testing::cuda_free(non_finite_);
  }

  void update(const UpdateStep& step) {
    const auto queue = rule_ == Rule::kLion ? queue_lion : queue_adamw;
    queue(step, parameter_.span_in(arrays_), non_finite_, 0);
  }
  // Copies everything back; whether all weights were finite.
  bool finish() {
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      const auto to = parameter_.arrays()[i];
      ok(cudaMemcpy(to.data(), arrays_[i], to.size(), cudaMemcpyDeviceToHost));
    }
    int non_finite = 0;
    ok(cudaMemcpy(&non_finite, non_finite_, sizeof(int), cudaMemcpyDeviceToHost));
    return non_finite == 0;
  }

 private:
  FormattedParameter& parameter_;
  Rule rule_;
  std::array<std::byte*, FormattedParameter::kArrays> arrays_{};
  int* non_finite_ = nullptr;
};

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

UpdateSpan lion(UpdateSpan span) {
  span.rule = Rule::kLion;
  return span;
}

class DeviceAdamW : public ::testing::TestWithParam<Formats> {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << cuda_unavailable_reason();
  }
};
INSTANTIATE_TEST_SUITE_P(Kernels, DeviceAdamW, ::testing::ValuesIn(testing::all_formats()),
                         [](const auto& tested) { return testing::format_text(tested.param); });

TEST_P(DeviceAdamW, EqualsScalarAtEveryLengthAndAlignment) {
  std::uint64_t seed = 100;
  for (const std::size_t count : {0, 1, 3, 4, 5, 127, 128, 129, 1000, 1024, 1025, 100003}) {
    for (const std::size_t offset : {0, 3, 16}) {
      for (int which = 0; which < 3; ++which) {
        Values values(++seed);
        FormattedParameter expected(GetParam(), count, offset);
        expected.fill_any(values);
        FormattedParameter got = expected;
        OnDevice device(got);
        bool finite = true;
        for (int repeat = 0; repeat < 3; ++repeat) {
          UpdateStep step = some_step(which);
          step.step += repeat;
          finite &= apply_update(Isa::kScalar, step, expected.span());
          device.update(step);
        }
        EXPECT_EQ(device.finish(), finite);
        ASSERT_TRUE(got == expected) << count << " at " << offset << ", seed " << seed;
      }
    }
  }
}

TEST_P(DeviceAdamW, EqualsScalarFromAnOddElementOn) {
  if (GetParam().moments == MomentFormat::kInt8) GTEST_SKIP() << "spans begin at blocks";
  Values values(8);
  FormattedParameter expected(GetParam(), 1000, 0, 7);
  expected.fill_any(values);
  FormattedParameter got = expected;
  OnDevice device(got);
  device.update(some_step(0));
  EXPECT_EQ(apply_update(Isa::kScalar, some_step(0), expected.span()), device.finish());
  EXPECT_TRUE(got == expected);
}

TEST_P(DeviceAdamW, EqualsScalarWhereTheUpperHalfOfTheIndexChanges) {
  Values values(7);
  FormattedParameter expected(GetParam(), 1000, 0, (std::int64_t{1} << 32) - 512);
  expected.fill_any(values);
  FormattedParameter got = expected;
  OnDevice device(got);
  device.update(some_step(0));
  EXPECT_EQ(apply_update(Isa::kScalar, some_step(0), expected.span()), device.finish());
  EXPECT_TRUE(got == expected);
}

TEST_P(DeviceAdamW, ANonFiniteWeightIsReportedWhereverItStandsAndIsWritten) {
  for (const std::size_t count : {1, 5, 128, 131}) {
    for (std::size_t at = 0; at < count; at += 13) {
      for (const float bad :
           {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
        FormattedParameter of_weight(GetParam(), count);
        of_weight.set_weight(at, bad);
        OnDevice first(of_weight);
        first.update({});
        EXPECT_FALSE(first.finish());
        EXPECT_FALSE(std::isfinite(of_weight.weight(at)));

        FormattedParameter of_gradient(GetParam(), count);
        of_gradient.set_gradient(at, bad);
        OnDevice second(of_gradient);
        second.update({});
        EXPECT_FALSE(second.finish());
        EXPECT_FALSE(std::isfinite(of_gradient.moments(Moment::kExpAvg)[at]));
      }
    }
  }
}

TEST_P(DeviceAdamW, ASplitWeightWhoseUpperHalfIsInfiniteIsReported) {
  if (GetParam().weights == WeightFormat::kBf16) GTEST_SKIP() << "has one half";
  const bool is_split = GetParam().weights == WeightFormat::kBf16Split;
  for (const Rule rule : {Rule::kAdamW, Rule::kLion}) {
    for (const std::uint32_t bits : {0x7f7f7fffu, 0x7f7f8000u, 0xff7f8000u, 0x7fffffffu}) {
      FormattedParameter parameter(GetParam(), 131);
      parameter.set_weight(97, float_of(bits));
      OnDevice device(parameter, rule);
      device.update({.lr = 0});
      EXPECT_EQ(device.finish(), bits == 0x7f7f7fff || (bits != 0x7fffffff && !is_split)) << std::hex << bits;
    }
  }
}

TEST_P(DeviceAdamW, LionEqualsTheHosts) {
  std::uint64_t seed = 500;
  for (const std::size_t count : {0, 1, 127, 128, 129, 1000, 100003}) {
    for (const std::int64_t first : {std::int64_t{0}, (std::int64_t{1} << 32) - 512}) {
      Values values(++seed);
      FormattedParameter expected(GetParam(), count, 0, first);
      expected.fill_any(values);
      FormattedParameter got = expected;
      OnDevice device(got, Rule::kLion);
      bool finite = true;
      for (int repeat = 0; repeat < 3; ++repeat) {
        UpdateStep step = some_step(0);
        step.step += repeat;
        finite &= apply_update(Isa::kScalar, step, lion(expected.span()));
        device.update(step);
      }
      EXPECT_EQ(device.finish(), finite);
      ASSERT_TRUE(got == expected) << count << " from " << first << ", seed " << seed;
    }
  }
  FormattedParameter parameter(GetParam(), 200);
  parameter.set_gradient(150, std::numeric_limits<float>::quiet_NaN());
  OnDevice device(parameter, Rule::kLion);
  device.update({});
  EXPECT_FALSE(device.finish());
}

TEST_P(DeviceAdamW, SettingsWithoutMeaningAreRefused) {
  FormattedParameter parameter(GetParam(), 4);
  EXPECT_THROW(queue_adamw({.step = 0}, parameter.span(), nullptr, 0), CallerError);
}

}  // namespace
}  // namespace megatrain
