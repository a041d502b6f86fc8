// What the scheduler takes its number of update threads from.
#include <gtest/gtest.h>

#include "base/cpu.h"
#include "base/error.h"
#include "probe/machine_speed.h"

namespace megatrain {
namespace {

using Threads = std::vector<unsigned>;

TEST(ThreadSteps, GrowByHalvesAndEndWithAllCoresAndOneLess) {
  EXPECT_EQ(thread_steps(1, 1), (Threads{1}));
  EXPECT_EQ(thread_steps(1, 2), (Threads{1, 2}));
  EXPECT_EQ(thread_steps(1, 16), (Threads{1, 2, 3, 4, 6, 8, 12, 15, 16}));
  EXPECT_EQ(thread_steps(4, 16), (Threads{4, 6, 8, 12, 15, 16}));
  EXPECT_EQ(thread_steps(7, 7), (Threads{7}));
}

TEST(RecommendedThreads, AreTheFewestThatComeWithinTwoPercentOfTheBest) {
  EXPECT_EQ(recommended_threads({1, 2, 4, 8}, {1, 2, 2.97, 3}), 4u);
  EXPECT_EQ(recommended_threads({1, 2, 4, 8}, {1, 2, 2.9, 3}), 8u);
  EXPECT_EQ(recommended_threads({1, 2, 4, 8}, {1, 2.5, 2, 1.5}), 2u) << "more may be worse";
  EXPECT_EQ(recommended_threads({1, 2}, {0, 0}), 1u) << "copies did not move";
  EXPECT_EQ(recommended_threads({}, {}), 0u);
}

TEST(RingOfRates, IsThatOfTheSlowestPart) {
  EXPECT_EQ((Rates{.up = 40, .down = 50, .updates = 12}).ring(), 10);
  EXPECT_EQ((Rates{.up = 40, .down = 8, .updates = 12}).ring(), 4);
  EXPECT_EQ((Rates{.up = 40, .down = 50, .updates = 3}).ring(), 3);
}

class Probe : public ::testing::Test {
 protected:
  static constexpr std::size_t kDeviceBytes = 1 << 20;
  static constexpr std::int64_t kParameters = 100003;
  static constexpr std::size_t kCacheBytes = 3 << 20;  // several windows of updates, pieces of copies
  std::unique_ptr<Backend> backend_ = make_host_backend({});
  std::vector<std::byte> device_ = std::vector<std::byte>(kDeviceBytes);
};

TEST_F(Probe, MeasuresEveryDirectionAndEveryNumberOfThreads) {
  const MachineSpeed speed =
      measure_machine(*backend_, device_.data(), kDeviceBytes,
                      {.parameters = kParameters, .cache_bytes = kCacheBytes, .seconds = 0.01, .rounds = 3});
  for (const double rate : {speed.up, speed.down, speed.up_together, speed.down_together}) {
    EXPECT_GT(rate, 1e6);
  }
  const unsigned cores = usable_cores();
  const Threads expected = thread_steps((cores + 3) / 4, cores);
  ASSERT_EQ(speed.by_threads.size(), expected.size());
  std::vector<double> rings;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(speed.by_threads[i].threads, expected[i]);
    EXPECT_GT(speed.by_threads[i].updates_alone, 1e4);
    EXPECT_GT(speed.by_threads[i].beside_copies.updates, 1e4);
    rings.push_back(speed.by_threads[i].beside_copies.ring());
  }
  EXPECT_EQ(speed.recommended_threads, recommended_threads(expected, rings));
}

TEST_F(Probe, RunsWhatIsAskedForAndNothingElse) {
  ThreadPool pool(1);
  Contest contest(*backend_, pool, device_.data(), kDeviceBytes, kParameters, kCacheBytes);
  const Rates up = contest.copies(true, false, 0.1), down = contest.copies(false, true, 0.1);
  EXPECT_GT(up.up, 0);
  EXPECT_EQ(up.down, 0);
  EXPECT_EQ(down.up, 0);
  EXPECT_GT(down.down, 0);
  const Rates updates = contest.updates(pool, 0.01);
  EXPECT_GT(updates.updates, 0);
  EXPECT_EQ(updates.up + updates.down, 0);
}

// The recommendation is only as good as the update that is measured: it must be the real one.
TEST_F(Probe, ALoadOfMoreParametersTakesLongerAPass) {
  ThreadPool pool(1);
  UpdateLoad small(*backend_, pool, 1000, 1), large(*backend_, pool, 4 << 20, 1);
  const auto seconds = [&](UpdateLoad& load) {
    const auto begin = std::chrono::steady_clock::now();
    load.update(pool);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  seconds(large);
  EXPECT_GT(seconds(large), 5 * seconds(small));
}

TEST(ProbeCache, IsBoundedByWhatTouchingTakesAndByFreeMemory) {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  EXPECT_EQ(probe_cache_bytes(300 * kMiB, 100'000 * kMiB), 300 * kMiB);
  EXPECT_EQ(probe_cache_bytes(2304 * kMiB, 100'000 * kMiB), 512 * kMiB);
  EXPECT_EQ(probe_cache_bytes(300 * kMiB, 1600 * kMiB), 100 * kMiB);
  EXPECT_EQ(probe_cache_bytes(0, 1600 * kMiB), 0u);
}

TEST_F(Probe, NothingToMeasureIsRefused) {
  const auto measure = [&](std::size_t device_bytes, ProbeSettings settings) {
    return measure_machine(*backend_, device_.data(), device_bytes, settings);
  };
  EXPECT_THROW(measure(1, {.parameters = 1}), CallerError);
  EXPECT_THROW(measure(kDeviceBytes, {.parameters = 0}), CallerError);
  EXPECT_THROW(measure(kDeviceBytes, {.parameters = 1, .rounds = 0}), CallerError);
  EXPECT_THROW(measure(kDeviceBytes, {.parameters = std::int64_t{1} << 45}), MemoryLimitError);
}

}  // namespace
}  // namespace megatrain
