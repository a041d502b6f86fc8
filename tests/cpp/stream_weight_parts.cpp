// Weights that go up in parts: which bytes, when, and that each wait is needed.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "stream/weight_parts.h"
#include "stream_controlled.h"

namespace megatrain {
namespace {

using testing::message_of;

bool operator==(const ElementRange& a, const ElementRange& b) { return a.begin == b.begin && a.end == b.end; }

void expect_ranges(const std::vector<ElementRange>& found, const std::vector<ElementRange>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(found[i] == expected[i]) << i;
}

TEST(WeightParts, TheBaseIsWhatIsInNoPart) {
  const TileLayout layout(TileFormat::kFp32, {{64, true}, {128, true}, {64, true}});
  const WeightParts parts(layout, {{{64, 96}, {192, 200}}, {{96, 128}}, {}, {{128, 160}}});
  EXPECT_EQ(parts.size(), 4);
  expect_ranges(parts.ranges(true, {}), {{0, 64}, {160, 192}, {200, 256}});
  expect_ranges(parts.ranges(false, {}), {});
  expect_ranges(parts.ranges(false, {3, 1}), {{96, 160}});  // adjoining ones are one copy
  expect_ranges(parts.ranges(true, {0, 1}), {{0, 128}, {160, 256}});
  expect_ranges(parts.ranges(true, {0, 1, 2, 3}), {{0, 256}});
  expect_ranges(parts.ranges(false, {2, 0, 0}), {{64, 96}, {192, 200}});
}

TEST(WeightParts, RefusesWhatCannotBe) {
  const TileLayout layout(TileFormat::kFp32, {{64, true}});
  const auto refused = [&](std::vector<std::vector<ElementRange>> parts) {
    return message_of<CallerError>([&] { WeightParts(layout, parts); });
  };
  EXPECT_EQ(
      refused({{{0, 32}}, {{31, 40}}}),
      "elements 31 to 40 as a part of a tile's weights; it must lie in their 64 elements and overlap no "
      "other");
  EXPECT_NE(refused({{{60, 65}}}).find("elements 60 to 65"), std::string::npos);
  EXPECT_NE(refused({{{-1, 4}}}).find("elements -1 to 4"), std::string::npos);
  const WeightParts parts(layout, {{{0, 8}}});
  EXPECT_EQ(message_of<CallerError>([&] { parts.ranges(true, {1}); }), "part 1 of a tile with 1 parts");
}

// Tiles of fp32 weights 1, 2, ... (plus 1000 a tile) in four parts of eight elements behind a base of 32.
struct PartedEngine {
  static constexpr int kElements = 64, kBase = 32, kParts = 4, kPart = 8;

  PartedEngine(std::shared_ptr<Backend> backend, int tiles, int slots, const std::string& without = "",
               std::size_t staging_bytes = 65536)
      : store(std::make_shared<TileStore>(std::move(backend),
                                          TileStoreOptions{.threads = 1, .staging_bytes = staging_bytes})),
        memory(static_cast<std::size_t>(slots), std::vector<float>(kElements)) {
    for (int tile = 0; tile < tiles; ++tile) {
      store->add(TileLayout(TileFormat::kFp32, {{kElements, true}}));
      std::vector<float> master(kElements);
      std::iota(master.begin(), master.end(), static_cast<float>(1000 * tile + 1));
      static_cast<void>(store->set_master(tile, 0, master.data()));
    }
    engine = std::make_unique<Engine>(store, EngineOptions{.without_wait = without});
    for (auto& slot : memory)
      engine->add_slot(reinterpret_cast<std::byte*>(slot.data()), slot.size() * sizeof(float), {});
    for (int tile = 0; tile < tiles; ++tile) engine->split(tile, parts());
  }
  static std::vector<std::vector<ElementRange>> parts() {
    std::vector<std::vector<ElementRange>> found;
    for (int part = 0; part < kParts; ++part) {
      found.push_back({{kBase + part * kPart, kBase + (part + 1) * kPart}});
    }
    return found;
  }
  float at(int slot, int element) const {
    return memory[static_cast<std::size_t>(slot)][static_cast<std::size_t>(element)];
  }
  bool has(int slot, int tile, int part) const {
    for (int i = kBase + part * kPart; i < kBase + (part + 1) * kPart; ++i) {
      if (at(slot, i) != static_cast<float>(1000 * tile + 1 + i)) return false;
    }
    return true;
  }
  std::int64_t bytes_up() const {
    std::int64_t bytes = 0;
    for (const TraceSpan& span : engine->trace()) {
      if (span.kind == SpanKind::kCopyUp) bytes += span.bytes;
    }
    engine->clear_trace();
    return bytes;
  }

  std::shared_ptr<TileStore> store;
  std::vector<std::vector<float>> memory;
  std::unique_ptr<Engine> engine;
};

std::shared_ptr<Backend> plain() {
  return make_host_backend({.max_delay_us = 50, .seed = 2, .poison = true});
}

constexpr std::int64_t kBaseBytes = 4 * PartedEngine::kBase, kPartBytes = 4 * PartedEngine::kPart;

TEST(Parts, ComeWhenTheyAreBroughtAndOnce) {
  PartedEngine parted(plain(), 2, 2);
  const int slot = parted.engine->acquire(1, {});
  EXPECT_EQ(parted.at(slot, 0), 1001.0f);
  for (int part = 0; part < 4; ++part) EXPECT_TRUE(std::isnan(parted.at(slot, 32 + 8 * part)));
  EXPECT_EQ(parted.bytes_up(), kBaseBytes);
  parted.engine->bring(slot, {2, 0}, {});
  EXPECT_TRUE(parted.has(slot, 1, 0) && parted.has(slot, 1, 2));
  EXPECT_TRUE(std::isnan(parted.at(slot, 40)) && std::isnan(parted.at(slot, 56)));
  EXPECT_EQ(parted.bytes_up(), 2 * kPartBytes);
  parted.engine->bring(slot, {0, 1}, {});
  EXPECT_TRUE(parted.has(slot, 1, 1));
  EXPECT_EQ(parted.bytes_up(), kPartBytes);
  parted.engine->release(slot, {});
  EXPECT_EQ(parted.engine->acquire(1, {}), slot);  // what is there stays
  parted.engine->bring(slot, {0, 1, 2}, {});
  parted.engine->release(slot, {});
  EXPECT_EQ(parted.bytes_up(), 0);
}

TEST(Parts, GoUpWithTheBaseWhereTheyAreWanted) {
  PartedEngine parted(plain(), 2, 1);
  parted.engine->want(0, {1, 2});
  const int slot = parted.engine->acquire(0, {});
  EXPECT_TRUE(parted.has(slot, 0, 1) && parted.has(slot, 0, 2));
  EXPECT_TRUE(std::isnan(parted.at(slot, 32)));
  EXPECT_EQ(parted.bytes_up(), kBaseBytes + 2 * kPartBytes);
  parted.engine->bring(slot, {1, 2}, {});
  EXPECT_EQ(parted.bytes_up(), 0);
  parted.engine->release(slot, {});
  parted.engine->want(0, {});
  parted.engine->mark_edited(0);
  parted.engine->release(parted.engine->acquire(0, {}), {});
  EXPECT_EQ(parted.bytes_up(), kBaseBytes);
}

// Tiles that were not pinned go through a ring that is smaller than a part.
TEST(Parts, GoThroughTheStagingRing) {
  PartedEngine parted(
      make_host_backend({.max_delay_us = 50, .seed = 2, .poison = true, .pin_limit_bytes = 0}), 2, 1, "",
      4096);
  const int slot = parted.engine->acquire(1, {});
  parted.engine->bring(slot, {3}, {});
  EXPECT_TRUE(parted.has(slot, 1, 3));
  EXPECT_TRUE(std::isnan(parted.at(slot, 32)));
  parted.engine->release(slot, {});
}

TEST(Parts, RefuseWhatCannotBe) {
  PartedEngine parted(plain(), 2, 2);
  Engine& engine = *parted.engine;
  const auto refused = [](const std::function<void()>& call) { return message_of<CallerError>(call); };
  EXPECT_EQ(refused([&] { engine.bring(0, {0}, {}); }), "slot 0 is not in use; nothing can be brought to it");
  EXPECT_EQ(refused([&] { engine.split(1, PartedEngine::parts()); }), "tile 1 is split already");
  EXPECT_EQ(refused([&] { engine.want(1, {4}); }), "part 4 of a tile with 4 parts");
  const int slot = engine.acquire(1, {});
  EXPECT_EQ(refused([&] { engine.bring(slot, {-1}, {}); }), "part -1 of a tile with 4 parts");
  engine.mark_edited(1);
  for (int attempt = 0; attempt < 2; ++attempt) {  // what was refused is still not there
    EXPECT_EQ(refused([&] { engine.bring(slot, {0}, {}); }),
              "tile 1 was updated or edited while slot " + std::to_string(slot) +
                  " was in use; its parts would be of two versions");
  }
  engine.release(slot, {});
  testing::SmallEngine small(plain(), 2, 1);
  EXPECT_EQ(refused([&] { small.engine->want(0, {}); }), "tile 0 is not split");
  small.read(0);
  EXPECT_EQ(refused([&] { small.engine->split(0, {}); }),
            "tile 0 is in slot 0; it is split before it goes up");
}

// Rounds of acquire, bring, read on a stream, release, in tiles that take one another's slot. How often what
// was read is not the tile's.
int wrong_of(const std::string& without, int rounds) {
  PartedEngine parted(make_host_backend({.max_delay_us = 300, .seed = 11, .poison = true}), 3, 1, without);
  Backend& backend = parted.store->backend();
  const Stream compute = backend.create_stream("compute");
  constexpr std::size_t kBytes = PartedEngine::kElements * sizeof(float);
  std::vector<std::vector<float>> read(static_cast<std::size_t>(rounds), std::vector<float>(kBytes / 4));
  for (int i = 0; i < rounds; ++i) {
    const int slot = parted.engine->acquire(i % 3, compute);
    parted.engine->bring(slot, {i % 4}, compute);
    backend.copy(read[static_cast<std::size_t>(i)].data(), parted.memory[0].data(), kBytes,
                 CopyKind::kDeviceToHost, compute);
    parted.engine->release(slot, compute);
  }
  backend.synchronize(compute);
  int wrong = 0;
  for (int i = 0; i < rounds; ++i) {
    const int element = PartedEngine::kBase + i % 4 * PartedEngine::kPart;
    const float expected = static_cast<float>(1000 * (i % 3) + 1 + element);
    wrong += read[static_cast<std::size_t>(i)][static_cast<std::size_t>(element)] != expected;
  }
  return wrong;
}

TEST(Parts, AreThereForWorkThatComesAfter) { EXPECT_EQ(wrong_of("", 60), 0); }

TEST(Parts, TheWaitIsNeeded) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "removing a wait is a data race, which the thread sanitizer reports";
#endif
  EXPECT_GT(wrong_of("part_arrived", 60), 0);
}

TEST(Parts, AnUpdateWaitsForACopyThatStillReads) {
  for (const std::string without : {"", "gate_fetch"}) {
#if defined(__SANITIZE_THREAD__)
    if (!without.empty()) continue;  // races on purpose
#endif
    PartedEngine parted(make_host_backend({.max_delay_us = 1000, .seed = 5}), 1, 1, without);
    Backend& backend = parted.store->backend();
    const Stream compute = backend.create_stream("compute");
    std::vector<float> out(1);
    UpdateStep halving;
    halving.lr = 1;
    halving.weight_decay = 0.5;
    int changed = 0;
    for (int i = 0; i < 20; ++i) {
      const float before =
          reinterpret_cast<const float*>(parted.store->section(0, Section::kWeights).data)[63];
      const int slot = parted.engine->acquire(0, compute);
      parted.engine->bring(slot, {0, 3}, compute);
      parted.engine->update(0, {{0, halving}}, 1.0f, 0);
      backend.copy(out.data(), &parted.memory[0][63], sizeof(float), CopyKind::kDeviceToHost, compute);
      parted.engine->release(slot, compute);
      backend.synchronize(compute);
      changed += out[0] != before;
      parted.engine->wait_updates();
    }
    EXPECT_EQ(changed > 0, !without.empty()) << without;
    parted.engine->close();
  }
}

}  // namespace
}  // namespace megatrain
