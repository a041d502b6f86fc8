// The whole ring against the synchronous run, bit for bit; and with each wait removed, not equal.
#include <gtest/gtest.h>

#include "device/backend.h"
#include "stream/waits.h"
#include "stream_training.h"

namespace megatrain {
namespace {

using testing::Guess;
using testing::train;
using testing::train_synchronously;
using testing::TrainingOptions;
using testing::TrainingResult;

// Elementwise, so that a failure says where.
void expect_equal(const TrainingResult& result, const TrainingResult& reference) {
  EXPECT_EQ(result.error, "");
  ASSERT_EQ(result.seen.size(), reference.seen.size());
  for (std::size_t i = 0; i < result.seen.size(); ++i) {
    ASSERT_EQ(result.seen[i], reference.seen[i]) << "acquisition " << i;
  }
  ASSERT_EQ(result.tiles.size(), reference.tiles.size());
  for (std::size_t i = 0; i < result.tiles.size(); ++i) {
    ASSERT_EQ(result.tiles[i], reference.tiles[i]) << "tile " << i / 4 << ", section " << i % 4;
  }
}

class Ring : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (is_cuda() && cuda_device_count() == 0) GTEST_SKIP() << cuda_unavailable_reason();
  }
  static bool is_cuda() { return std::string(GetParam()) == "cuda"; }
  static std::shared_ptr<Backend> backend(std::size_t pin_limit_bytes = SIZE_MAX) {
    if (is_cuda()) return make_cuda_backend(0, {.pin_limit_bytes = pin_limit_bytes});
    return make_host_backend(
        {.max_delay_us = 100, .seed = 11, .poison = true, .pin_limit_bytes = pin_limit_bytes});
  }
  static void check(const TrainingOptions& options, std::size_t pin_limit_bytes = SIZE_MAX) {
    expect_equal(train(backend(pin_limit_bytes), options), train_synchronously(options));
  }
};

TEST_P(Ring, EqualsTheSynchronousRunWithTwoSlots) { check({}); }

TEST_P(Ring, EqualsItWithThreeSlotsInFp32) { check({.format = TileFormat::kFp32, .slots = 3}); }

TEST_P(Ring, EqualsItInTheOtherPrecisions) {
  for (const TileFormat format : {TileFormat{WeightFormat::kBf16, MomentFormat::kFp32},
                                  TileFormat{WeightFormat::kBf16Split, MomentFormat::kBf16},
                                  TileFormat{WeightFormat::kBf16, MomentFormat::kInt8}}) {
    check({.format = format, .steps = 8});
  }
}

TEST_P(Ring, EqualsItWithAsManySlotsAsTiles) { check({.slots = 5}); }

TEST_P(Ring, EqualsItWithUpdatesInBackwardAndForward) {
  check({.slots = 3, .update_in_backward = true, .update_in_forward = true});
  check({.format = TileFormat::kFp32, .update_in_backward = true});
}

TEST_P(Ring, EqualsItWithWrongGuesses) {
  check({.guess = Guess::kWrong});
  check({.slots = 3, .guess = Guess::kWrong, .update_in_forward = true});
}

TEST_P(Ring, EqualsItWithoutGuesses) { check({.guess = Guess::kNone, .update_in_backward = true}); }

// A ring of 2 KiB each way and tiles of 2.8 KiB (fp32: 5.6 KiB) of weights: in pieces.
TEST_P(Ring, EqualsItThroughAStagingRingSmallerThanATile) {
  check({.steps = 8, .staging_bytes = 4096}, 0);
  check(
      {.format = TileFormat::kFp32, .slots = 3, .steps = 8, .staging_bytes = 4096, .update_in_forward = true},
      0);
}

TEST_P(Ring, EqualsItWhereSomeTilesArePinned) { check({.steps = 8, .staging_bytes = 8192}, 70000); }

INSTANTIATE_TEST_SUITE_P(Backends, Ring, ::testing::Values("host", "cuda"),
                         [](const auto& info) { return std::string(info.param); });

// Every wait is needed: without it, the delays of the host backend make the run go wrong.
class RingWithout : public ::testing::TestWithParam<const char*> {};

TEST_P(RingWithout, TheWaitGoesWrong) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "races on purpose";
#endif
  const TrainingOptions options{.slots = 3, .update_in_backward = true, .update_in_forward = true};
  TrainingOptions without = options;
  without.without_wait = GetParam();
  const TrainingResult reference = train_synchronously(options);
  // One run is enough nearly always. Where a timer is coarser than the delays, all of them are the
  // same and may hide what the wait would have delayed: then longer ones.
  bool wrong = false;
  for (std::uint64_t seed = 0; seed < 20 && !wrong; ++seed) {
    const int max_delay_us = 200 << (seed / 4);
    wrong = train(make_host_backend({.max_delay_us = max_delay_us, .seed = seed, .poison = true}), without) !=
            reference;
  }
  EXPECT_TRUE(wrong);
  expect_equal(train(make_host_backend({.max_delay_us = 200, .seed = 0, .poison = true}), options),
               reference);
}

INSTANTIATE_TEST_SUITE_P(Waits, RingWithout,
                         ::testing::Values("slot_free", "slot_arrived", "gate_update", "gate_fetch",
                                           "gradient_ready", "gradient_landed", "staging_free"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace megatrain
