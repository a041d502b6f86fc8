// Resident tiles: the same bits as on the host, whoever looks, and each wait is needed.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "stream/engine.h"
#include "stream_controlled.h"

namespace megatrain {
namespace {

using testing::message_of;

constexpr std::int64_t kElements = 100;  // not a multiple of any vector

ParameterUpdate step_number(std::int64_t step) {
  ParameterUpdate update;
  update.parameter = 0;
  update.step.step = step;
  update.step.lr = 0.1;
  return update;
}

// A store of one tile, and memory that stands for the device's.
struct Resident {
  explicit Resident(TileFormat format, const std::string& without = "", std::uint64_t seed = 5)
      : store(std::make_shared<TileStore>(
            make_host_backend({.max_delay_us = 500, .seed = seed, .poison = true}),
            TileStoreOptions{.threads = 1})) {
    store->add(TileLayout(format, {{kElements, true}}));
    std::vector<float> master(kElements);
    for (std::size_t i = 0; i < master.size(); ++i) master[i] = 0.01f * static_cast<float>(i) - 0.3f;
    EXPECT_TRUE(store->set_master(0, 0, master.data()));
    engine = std::make_unique<Engine>(store, EngineOptions{.without_wait = without});
    device.assign(store->layout(0).bytes() / sizeof(float) + 16, std::numeric_limits<float>::quiet_NaN());
    stream = store->backend().create_stream("compute");
  }
  ~Resident() { engine->close(); }
  Resident(const Resident&) = delete;
  Resident& operator=(const Resident&) = delete;

  std::byte* memory() { return reinterpret_cast<std::byte*>(device.data()); }
  void make_resident() { engine->add_resident(0, memory(), &non_finite); }
  std::byte* on_device(Section section) { return memory() + store->layout(0).section(section).offset; }
  void set_gradients(std::byte* section, std::uint8_t pattern) {
    const std::size_t bytes = store->layout(0).section(Section::kGradients).bytes;
    for (std::size_t i = 0; i < bytes; ++i) section[i] = static_cast<std::byte>((i * pattern) % 61);
  }
  std::vector<std::byte> host() {
    const std::byte* const tile = store->section(0, Section::kWeights).data;
    return {tile, tile + store->layout(0).section(Section::kExpAvgSqExponents).offset};
  }

  std::shared_ptr<TileStore> store;
  std::vector<float> device;
  int non_finite = 0;
  Stream stream;
  std::unique_ptr<Engine> engine;
};

class ResidentTilesIn : public ::testing::TestWithParam<TileFormat> {};

TEST_P(ResidentTilesIn, WriteTheBitsOfTheHost) {
  Resident host(GetParam()), there(GetParam());
  there.make_resident();
  for (std::int64_t step = 1; step <= 4; ++step) {
    const auto pattern = static_cast<std::uint8_t>(7 * step);
    host.set_gradients(host.store->section(0, Section::kGradients).data, pattern);
    host.engine->update(0, {step_number(step)}, 0.5f, 0);
    host.engine->wait_updates();

    there.engine->use_resident(0, there.stream);
    there.store->backend().synchronize(there.stream);
    there.set_gradients(there.on_device(Section::kGradients), pattern);
    there.engine->update(0, {step_number(step)}, 0.5f, 0, there.stream);
    if (step % 2 == 0) {
      there.engine->wait_updates();
      EXPECT_EQ(there.host(), host.host()) << "step " << step;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, ResidentTilesIn,
                         ::testing::Values(TileFormat::kBf16Split, TileFormat::kFp32,
                                           TileFormat{WeightFormat::kBf16, MomentFormat::kInt8}),
                         [](const auto& info) { return std::string(format_name(info.param)); });

TEST(ResidentTiles, EditsOnTheHostReachTheDevice) {
  Resident tile(TileFormat::kFp32);
  tile.make_resident();
  tile.engine->use_resident(0, tile.stream);
  tile.engine->wait_updates();
  float* const weights = reinterpret_cast<float*>(tile.store->section(0, Section::kWeights).data);
  weights[3] = 42;
  tile.engine->mark_edited(0);
  tile.engine->use_resident(0, tile.stream);
  tile.store->backend().synchronize(tile.stream);
  EXPECT_EQ(tile.device[3], 42);
  tile.engine->update(0, {step_number(1)}, 1.0f, 0, tile.stream);
  tile.engine->mark_edited(0);  // without a look at what the device made
  EXPECT_THROW(tile.engine->use_resident(0, tile.stream), CallerError);
}

TEST(ResidentTiles, AnInfiniteWeightShowsInALaterCall) {
  Resident tile(TileFormat::kFp32);
  tile.make_resident();
  tile.engine->use_resident(0, tile.stream);
  tile.store->backend().synchronize(tile.stream);
  reinterpret_cast<float*>(tile.on_device(Section::kGradients))[1] = std::numeric_limits<float>::infinity();
  tile.engine->update(0, {step_number(1)}, 1.0f, 0, tile.stream);
  EXPECT_THROW(tile.engine->wait_updates(), OutsideError);
}

TEST(ResidentTiles, ClearingWritesBackAndForgets) {
  Resident tile(TileFormat::kFp32);
  tile.make_resident();
  EXPECT_THROW(tile.make_resident(), CallerError);
  tile.engine->use_resident(0, tile.stream);
  tile.store->backend().synchronize(tile.stream);
  const std::vector<std::byte> before = tile.host();
  tile.set_gradients(tile.on_device(Section::kGradients), 9);
  tile.engine->update(0, {step_number(1)}, 1.0f, 0, tile.stream);
  tile.engine->clear_device();
  EXPECT_NE(tile.host(), before);
  EXPECT_THROW(tile.engine->use_resident(0, tile.stream), CallerError);
  tile.make_resident();
  tile.engine->use_resident(0, tile.stream);
}

// The flags of non-finite weights lie in pages of 1,024: one past the edge has a flag of its own.
TEST(ResidentTiles, AreAsManyAsTheStoreHas) {
  constexpr int kTiles = 1025, kBad = 1024;
  constexpr std::size_t kFloats = 8;
  const auto store = std::make_shared<TileStore>(make_host_backend({}), TileStoreOptions{.threads = 1});
  for (int tile = 0; tile < kTiles; ++tile) store->add(TileLayout(TileFormat::kFp32, {{kFloats, true}}));
  const std::size_t bytes = store->layout(0).bytes();
  std::vector<std::vector<std::byte>> memory(kTiles, std::vector<std::byte>(bytes));
  std::vector<int> non_finite(kTiles);
  Engine engine(store);
  for (const bool again : {false, true}) {  // clearing frees the flags
    if (again) engine.clear_device();
    for (int tile = 0; tile < kTiles; ++tile) {
      const auto index = static_cast<std::size_t>(tile);
      engine.add_resident(tile, memory[index].data(), &non_finite[index]);
    }
  }
  non_finite[kBad] = 1;
  for (const int tile : {0, kBad}) engine.update(tile, {step_number(1)}, 1.0f, 0);
  engine.use_resident(0, {});
  EXPECT_EQ(message_of<OutsideError>([&] { engine.use_resident(kBad, {}); }),
            "the update made a weight infinite or NaN: tile 1024 on the device, step 0");
}

// Whether the device's weights were there when work on the stream looked, and the host's when the caller did.
bool seen_right(const std::string& without, std::uint64_t seed) {
  Resident tile(TileFormat::kFp32, without, seed);
  tile.make_resident();
  Backend& backend = tile.store->backend();
  const std::size_t bytes = tile.store->layout(0).section(Section::kWeights).bytes;
  const std::vector<std::byte> before = tile.host();
  const std::vector<std::byte> weights(before.begin(), before.begin() + static_cast<std::ptrdiff_t>(bytes));
  tile.engine->use_resident(0, tile.stream);
  std::vector<std::byte> seen(bytes);
  backend.copy(seen.data(), tile.memory(), bytes, CopyKind::kDeviceToHost, tile.stream);
  backend.synchronize(tile.stream);
  if (seen != weights) return false;
  tile.set_gradients(tile.on_device(Section::kGradients), 9);
  tile.engine->update(0, {step_number(1)}, 1.0f, 0, tile.stream);
  tile.engine->wait_updates();
  const std::vector<std::byte> looked = tile.host();
  backend.synchronize(tile.stream);
  return std::memcmp(looked.data(), tile.memory(), bytes) == 0 &&
         !std::equal(weights.begin(), weights.end(), looked.begin());
}

TEST(ResidentTiles, ALookWaitsForTheUpdate) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) EXPECT_TRUE(seen_right("", seed));
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "removing a wait is a data race, which the thread sanitizer reports";
#endif
  int wrong = 0;
  for (std::uint64_t seed = 0; seed < 20; ++seed) wrong += !seen_right("resident_updated", seed);
  EXPECT_GT(wrong, 0);
}

}  // namespace
}  // namespace megatrain
