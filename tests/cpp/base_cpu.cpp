#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <string>

#include "base/cpu.h"
#include "base/error.h"

namespace megatrain {
namespace {

TEST(Cpu, NamesAreTheKnownOnes) {
  EXPECT_STREQ(isa_name(Isa::kScalar), "scalar");
  EXPECT_STREQ(isa_name(Isa::kAvx2), "avx2");
  EXPECT_STREQ(isa_name(Isa::kAvx512), "avx512");
  EXPECT_STREQ(isa_name(Isa::kNeon), "neon");
}

TEST(Cpu, SupportedBeginsWithScalarAndIsOrdered) {
  const auto isas = supported_isas();
  ASSERT_FALSE(isas.empty());
  EXPECT_EQ(isas.front(), Isa::kScalar);
  EXPECT_TRUE(std::is_sorted(isas.begin(), isas.end()));
  EXPECT_EQ(std::adjacent_find(isas.begin(), isas.end()), isas.end());
}

#if defined(__x86_64__)
TEST(Cpu, SupportedAgreesWithTheCompilersOwnDetection) {
  const auto isas = supported_isas();
  const auto has = [&](Isa isa) { return std::find(isas.begin(), isas.end(), isa) != isas.end(); };
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  EXPECT_EQ(has(Isa::kAvx2), avx2);
  EXPECT_EQ(has(Isa::kAvx512), avx2 && avx512);
  EXPECT_FALSE(has(Isa::kNeon));
}
#elif defined(__aarch64__)
TEST(Cpu, NeonIsPartOfEvery64BitArm) {
  EXPECT_EQ(supported_isas(), (std::vector<Isa>{Isa::kScalar, Isa::kNeon}));
  EXPECT_EQ(select_isa(""), Isa::kNeon);
}
#endif

TEST(Cpu, SelectByNameGivesThatVariantAndEmptyGivesTheFastest) {
  for (const Isa isa : supported_isas()) EXPECT_EQ(select_isa(isa_name(isa)), isa);
  EXPECT_EQ(select_isa(""), supported_isas().back());
}

TEST(Cpu, SelectRefusesAnUnknownNameAndListsTheKnownOnes) {
  for (const char* name : {"sse9", "AVX2", " avx2", "avx"}) {
    try {
      select_isa(name);
      FAIL() << name << " was accepted";
    } catch (const CallerError& error) {
      const std::string message = error.what();
      for (const char* part : {name, "scalar", "avx2", "avx512", "neon"}) {
        EXPECT_NE(message.find(part), std::string::npos) << message;
      }
    }
  }
}

TEST(Cpu, SelectRefusesWhatThisCpuLacks) {
  const auto isas = supported_isas();
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512, Isa::kNeon}) {
    if (std::find(isas.begin(), isas.end(), isa) != isas.end()) continue;
    EXPECT_THROW(select_isa(isa_name(isa)), CallerError);
  }
}

TEST(Cpu, ModelIsNamed) { EXPECT_FALSE(cpu_model().empty()); }

TEST(Cpu, UsableCoresFollowTheAffinityOfTheThread) {
  cpu_set_t saved;
  ASSERT_EQ(sched_getaffinity(0, sizeof saved, &saved), 0);
  EXPECT_GE(usable_cores(), 1u);
  EXPECT_LE(usable_cores(), static_cast<unsigned>(CPU_COUNT(&saved)));

  int first = 0;
  while (!CPU_ISSET(first, &saved)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(usable_cores(), 1u);
  ASSERT_EQ(sched_setaffinity(0, sizeof saved, &saved), 0);
}

}  // namespace
}  // namespace megatrain
