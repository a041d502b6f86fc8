#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "base/error.h"
#include "device/backend.h"
#include "optim_data.h"
#include "tile_span.h"
#include "tiles/tile_moments.h"
#include "tiles/tile_store.h"

namespace megatrain {
namespace {

std::shared_ptr<TileStore> make_store(std::size_t pin_limit_bytes = SIZE_MAX, unsigned threads = 2) {
  return std::make_shared<TileStore>(make_host_backend({.pin_limit_bytes = pin_limit_bytes}),
                                     TileStoreOptions{.threads = threads, .isa = "", .staging_bytes = 4096});
}

std::vector<float> values(std::int64_t count, std::uint64_t seed) {
  testing::Values source(seed);
  std::vector<float> result(static_cast<std::size_t>(count));
  for (float& value : result) value = source.normal(1.0f);
  return result;
}

std::vector<std::uint32_t> bits(const std::vector<float>& floats) {
  std::vector<std::uint32_t> result(floats.size());
  std::transform(floats.begin(), floats.end(), result.begin(), testing::bits_of);
  return result;
}

TEST(TileStore, AllocatesZeroedPageAlignedTiles) {
  const auto store = make_store();
  const TileLayout layout(TileFormat::kBf16Split, {{5000, true}, {3, false}});
  EXPECT_EQ(store->add(layout), 0);
  EXPECT_EQ(store->add(layout), 1);
  EXPECT_EQ(store->tiles(), 2);
  EXPECT_EQ(store->bytes(), 2 * layout.bytes());
  EXPECT_EQ(store->pinned_bytes(), 2 * layout.bytes());
  EXPECT_EQ(store->unpinned_tiles(), 0);
  for (const Section section :
       {Section::kWeights, Section::kMasterLow, Section::kGradients, Section::kExpAvg}) {
    const TileStore::SectionView view = store->section(1, section);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(view.data) % 4096, 0u);
    EXPECT_EQ(view.bytes, layout.section(section).bytes);
    EXPECT_TRUE(view.pinned);
    EXPECT_TRUE(
        std::all_of(view.data, view.data + view.bytes, [](std::byte b) { return b == std::byte{0}; }));
  }
}

TEST(TileStore, TakesEmptyTiles) {
  const auto store = make_store();
  store->add(TileLayout(TileFormat::kFp32, {{0, true}}));
  EXPECT_EQ(store->section(0, Section::kWeights).bytes, 0u);
  EXPECT_TRUE(store->set_master(0, 0, nullptr));
  store->add_accumulator(0);
  EXPECT_TRUE(store->has_accumulator(0));
  EXPECT_EQ(store->bytes(), 0u);
  EXPECT_EQ(store->unpinned_tiles(), 0);
}

TEST(TileStore, CountsTilesThatCouldNotBePinned) {
  const TileLayout layout(TileFormat::kFp32, {{1024, true}});
  const auto store = make_store(layout.bytes());
  store->add(layout);
  store->add(layout);
  EXPECT_TRUE(store->section(0, Section::kWeights).pinned);
  EXPECT_FALSE(store->section(1, Section::kWeights).pinned);
  EXPECT_EQ(store->pinned_bytes(), layout.bytes());
  EXPECT_EQ(store->unpinned_tiles(), 1);
}

TEST(TileStore, AddsAnAccumulatorOnce) {
  const auto store = make_store();
  const TileLayout layout(TileFormat::kBf16Split, {{1500, true}, {10, false}});
  store->add(layout);
  EXPECT_FALSE(store->has_accumulator(0));
  EXPECT_THROW(store->section(0, Section::kAccumulator), CallerError);
  store->add_accumulator(0);
  const TileStore::SectionView view = store->section(0, Section::kAccumulator);
  EXPECT_EQ(view.bytes, 4u * 1536);
  store->add_accumulator(0);
  EXPECT_EQ(store->section(0, Section::kAccumulator).data, view.data);
  EXPECT_EQ(store->bytes(), layout.bytes() + 8192);
}

// Large enough for the pool (65,536 elements), small ones stay in the caller's thread.
TEST(TileStore, MastersComeBackToTheBit) {
  for (const TileFormat format : {TileFormat::kBf16Split, TileFormat::kFp32}) {
    for (const unsigned threads : {1u, 3u}) {
      const auto store = make_store(SIZE_MAX, threads);
      store->add(TileLayout(format, {{77, true}, {200001, true}, {1, true}}));
      std::vector<std::vector<float>> written;
      for (int p = 0; p < 3; ++p) {
        written.push_back(values(store->layout(0).parameter(p).elements, static_cast<std::uint64_t>(p)));
        EXPECT_TRUE(store->set_master(0, p, written.back().data()));
      }
      for (int p = 0; p < 3; ++p) {
        std::vector<float> read(written[static_cast<std::size_t>(p)].size());
        store->get_master(0, p, read.data());
        EXPECT_EQ(bits(read), bits(written[static_cast<std::size_t>(p)]));
      }
    }
  }
}

// Moments that a format can hold come back to the bit, in one thread and in the pool.
TEST(TileStore, MomentsComeBackToTheBit) {
  for (const TileFormat format : testing::all_tile_formats()) {
    const auto store = make_store(SIZE_MAX, 3);
    store->add(TileLayout(format, {{77, true}, {200001, true}, {1, true}, {5, false}}));
    for (const Moment moment : {Moment::kExpAvg, Moment::kExpAvgSq}) {
      for (int p = 0; p < 3; ++p) {
        std::vector<float> given = values(store->layout(0).parameter(p).elements, 4);
        if (moment == Moment::kExpAvgSq) {
          for (float& value : given) value *= value;
        }
        set_moments(*store, 0, p, moment, given.data());
        std::vector<float> held(given.size()), again(given.size());
        get_moments(*store, 0, p, moment, held.data());
        for (std::size_t i = 0; i < given.size(); ++i) {
          const double relative = format.moments == MomentFormat::kFp32   ? 0
                                  : format.moments == MomentFormat::kBf16 ? std::ldexp(1.0, -8)
                                  : moment == Moment::kExpAvg             ? std::ldexp(1.0, -4)
                                                                          : std::ldexp(1.0, -5);
          const double floor = format.moments == MomentFormat::kInt8 ? 6e-4 : 0;  // smallest code below 32
          ASSERT_NEAR(held[i], given[i], relative * std::abs(given[i]) + floor) << format_name(format) << i;
        }
        set_moments(*store, 0, p, moment, held.data());
        get_moments(*store, 0, p, moment, again.data());
        EXPECT_EQ(bits(again), bits(held)) << format_name(format);
      }
      std::vector<float> five(5);
      EXPECT_THROW(get_moments(*store, 0, 3, moment, five.data()), CallerError);
      EXPECT_THROW(set_moments(*store, 0, 3, moment, five.data()), CallerError);
    }
  }
}

TEST(TileStore, WithoutALowHalfMastersAreTheRoundedWeights) {
  for (const bool trainable : {true, false}) {
    const auto store = make_store();
    store->add(TileLayout({WeightFormat::kBf16, MomentFormat::kFp32}, {{9000, trainable}}));
    const std::vector<float> written = values(9000, 3);
    EXPECT_TRUE(store->set_master(0, 0, written.data()));
    std::vector<float> read(9000);
    store->get_master(0, 0, read.data());
    for (std::size_t i = 0; i < read.size(); ++i) {
      ASSERT_EQ(read[i], testing::from_bf16(testing::to_bf16(written[i]))) << i;
    }
  }
}

TEST(TileStore, KeepsOnlyTheHighHalfOfFrozenWeights) {
  const auto store = make_store();
  store->add(TileLayout(TileFormat::kBf16Split, {{10, true}, {9000, false}}));
  const std::vector<float> written = values(9000, 3);
  EXPECT_TRUE(store->set_master(0, 1, written.data()));
  std::vector<float> read(9000);
  store->get_master(0, 1, read.data());
  std::vector<float> expected(9000);
  std::transform(written.begin(), written.end(), expected.begin(),
                 [](float x) { return testing::from_bf16(testing::to_bf16(x)); });
  EXPECT_EQ(bits(read), bits(expected));
  std::vector<float> neighbour(10, 1.0f);
  store->get_master(0, 0, neighbour.data());
  EXPECT_EQ(neighbour, std::vector<float>(10, 0.0f));
}

TEST(TileStore, FindsValuesThatAreNotFinite) {
  for (const TileFormat format : {TileFormat::kBf16Split, TileFormat::kFp32}) {
    for (const bool trainable : {true, false}) {
      const auto store = make_store();
      store->add(TileLayout(format, {{70000, trainable}}));
      std::vector<float> written(70000, 1.0f);
      EXPECT_TRUE(store->set_master(0, 0, written.data()));
      written[69999] = std::numeric_limits<float>::infinity();
      EXPECT_FALSE(store->set_master(0, 0, written.data()));
    }
  }
}

// The two halves together are the whole; neither touches the other's part.
TEST(TileStore, AShardReadsAndWritesItsOwnPart) {
  const std::vector<float> written = values(10000, 9);
  std::vector<float> read(10000, 0.0f);
  for (int rank = 0; rank < 2; ++rank) {
    const auto store = make_store();
    const TileLayout layout(TileFormat::kBf16Split, {{10000, true}}, {rank, 2});
    store->add(layout);
    EXPECT_TRUE(store->set_master(0, 0, written.data()));
    std::vector<float> part(10000, -5.0f);
    store->get_master(0, 0, part.data());
    for (std::int64_t i = 0; i < 10000; ++i) {
      const auto at = static_cast<std::size_t>(i);
      const bool mine = i >= layout.owned().begin && i < layout.owned().end;
      EXPECT_EQ(part[at], mine ? written[at] : -5.0f) << i;
      if (mine) read[at] = part[at];
    }
  }
  EXPECT_EQ(bits(read), bits(written));
}

TEST(TileStore, RefusesWhatCannotBe) {
  const auto store = make_store();
  EXPECT_THROW(store->layout(0), CallerError);
  store->add(TileLayout(TileFormat::kFp32, {{4, true}}));
  EXPECT_THROW(store->section(1, Section::kWeights), CallerError);
  EXPECT_THROW(store->section(-1, Section::kWeights), CallerError);
  std::vector<float> four(4);
  EXPECT_THROW(store->get_master(0, 1, four.data()), CallerError);
  EXPECT_THROW(TileStore(make_host_backend({}), {.threads = 1, .isa = "avx1024"}), CallerError);
  EXPECT_THROW(TileStore(make_host_backend({}), {.threads = 1, .isa = "", .staging_bytes = 100}),
               CallerError);
}

TEST(TileStore, UsesTheInstructionSetAndThreadsThatWereAsked) {
  const TileStore store(make_host_backend({}), {.threads = 3, .isa = "scalar"});
  EXPECT_EQ(store.isa(), Isa::kScalar);
  EXPECT_EQ(store.threads(), 3u);
  EXPECT_EQ(TileStore(make_host_backend({}), {}).threads(), std::max(1u, usable_cores() - 1));
}

}  // namespace
}  // namespace megatrain
