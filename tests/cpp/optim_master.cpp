#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "optim_data.h"

namespace megatrain {
namespace {

using testing::bits_of;

bool is_nan(std::uint32_t bits) { return (bits & 0x7fffffff) > 0x7f800000; }
// Its upper half is, and so is it.
bool is_finite(std::uint32_t bits) { return (bits & 0x7fffffff) < 0x7f7f8000; }

// Splits, joins and compares; the high half must be the bf16 nearest to the value.
void expect_exact(const std::vector<std::uint32_t>& patterns) {
  const auto count = static_cast<std::int64_t>(patterns.size());
  std::vector<float> master(patterns.size()), joined(patterns.size());
  for (std::size_t i = 0; i < patterns.size(); ++i) master[i] = std::bit_cast<float>(patterns[i]);
  std::vector<std::uint16_t> high(patterns.size());
  std::vector<std::int16_t> low(patterns.size());
  bool all_finite = true;
  for (const std::uint32_t bits : patterns) all_finite = all_finite && is_finite(bits);
  ASSERT_EQ(split_master(master.data(), high.data(), low.data(), count), all_finite);
  join_master(high.data(), low.data(), joined.data(), count);
  for (std::size_t i = 0; i < patterns.size(); ++i) {
    if (is_nan(patterns[i])) continue;
    ASSERT_EQ(bits_of(joined[i]), patterns[i]) << std::hex << patterns[i];
    ASSERT_EQ(high[i], (patterns[i] + 0x8000) >> 16) << std::hex << patterns[i];
  }
}

TEST(Master, EveryHighPatternWithLowPatternsAroundTheEdges) {
  constexpr std::uint32_t kLows[] = {0, 1, 2, 0x1234, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0xabcd, 0xfffe, 0xffff};
  for (std::uint32_t high = 0; high <= 0xffff; ++high) {
    std::vector<std::uint32_t> patterns;
    for (const std::uint32_t low : kLows) patterns.push_back((high << 16) | low);
    ASSERT_NO_FATAL_FAILURE(expect_exact(patterns));
  }
}

TEST(Master, RandomPatternsAtEveryLength) {
  testing::Values values(17);
  for (const std::size_t count : {0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 33, 1000, 1 << 20}) {
    std::vector<std::uint32_t> patterns(count);
    for (std::uint32_t& bits : patterns) bits = static_cast<std::uint32_t>(values.random()());
    ASSERT_NO_FATAL_FAILURE(expect_exact(patterns));
  }
}

TEST(Master, TheHighHalfIsTheNearestBf16WithTiesAwayFromZero) {
  const auto high_of = [](float value) {
    std::uint16_t high = 0;
    std::int16_t low = 0;
    EXPECT_TRUE(split_master(&value, &high, &low, 1));
    return testing::from_bf16(high);
  };
  const float ulp = std::ldexp(1.0f, -7);  // of bf16 at 1.0
  EXPECT_EQ(high_of(1.0f), 1.0f);
  EXPECT_EQ(high_of(1.0f + 0.49f * ulp), 1.0f);
  EXPECT_EQ(high_of(1.0f + 0.5f * ulp), 1.0f + ulp);
  EXPECT_EQ(high_of(-1.0f - 0.5f * ulp), -1.0f - ulp);
  EXPECT_EQ(high_of(1.0f + 0.75f * ulp), 1.0f + ulp);
}

TEST(Master, SplitReportsANonFiniteValueWhereverItStands) {
  for (std::size_t at = 0; at < 37; ++at) {
    for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::max()}) {
      std::vector<float> master(37, 1.0f);
      std::vector<std::uint16_t> high(37);
      std::vector<std::int16_t> low(37);
      ASSERT_TRUE(split_master(master.data(), high.data(), low.data(), 37));
      master[at] = bad;
      EXPECT_FALSE(split_master(master.data(), high.data(), low.data(), 37)) << at;
    }
  }
}

}  // namespace
}  // namespace megatrain
