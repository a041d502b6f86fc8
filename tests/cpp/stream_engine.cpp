// Drains, fetches, updates and the end of an engine.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>

#include "base/error.h"
#include "stream_controlled.h"

namespace megatrain {
namespace {

using testing::ControlledBackend;
using testing::Latch;
using testing::message_of;
using testing::SmallEngine;

constexpr int kElements = SmallEngine::kElements;

std::shared_ptr<Backend> plain() {
  return make_host_backend({.max_delay_us = 50, .seed = 4, .poison = true});
}

SectionCopy part(int tile, Section section, std::int64_t offset, std::vector<float>& values) {
  return {tile, section, offset, static_cast<std::int64_t>(values.size()),
          reinterpret_cast<std::byte*>(values.data())};
}

std::vector<float> host(const SmallEngine& small, int tile, Section section) {
  const auto* data = reinterpret_cast<const float*>(small.store->section(tile, section).data);
  return std::vector<float>(data, data + kElements);
}

std::vector<int> updated_tiles(Engine& engine) {
  std::vector<int> tiles;
  for (const TraceSpan& span : engine.trace()) {
    if (span.kind == SpanKind::kUpdate) tiles.push_back(span.tile);
  }
  return tiles;
}

TEST(Drain, CopiesElementsToTheirPlace) {
  SmallEngine small(plain(), 2, 1);
  std::vector<float> values = {1, 2, 3};
  small.engine->wait_drain(small.engine->drain(part(1, Section::kGradients, 10, values), {}), {});
  std::vector<float> expected(kElements, 0.0f);
  expected[10] = 1;
  expected[11] = 2;
  expected[12] = 3;
  EXPECT_EQ(host(small, 1, Section::kGradients), expected);
  EXPECT_EQ(host(small, 0, Section::kGradients), std::vector<float>(kElements, 0.0f));
}

TEST(Hold, KeepsATileAsItIsUntilItsRelease) {
  SmallEngine small(plain(), 2, 1);
  const std::vector<float> before = host(small, 0, Section::kWeights);
  small.engine->hold({0});
  small.halve(0);
  small.halve(1);
  EXPECT_EQ(small.read(1), 1.0f);  // the other tile's update has ended
  EXPECT_TRUE(small.engine->updates_pending());
  EXPECT_EQ(host(small, 0, Section::kWeights), before);
  std::thread releaser([&] { small.engine->release_hold(0); });
  EXPECT_EQ(small.read(0), 0.5f);
  releaser.join();
  EXPECT_GT(small.engine->held_up_ns(), 0);
}

TEST(Hold, WhoWaitsForUpdatesWaitsForTheRelease) {
  SmallEngine small(plain(), 2, 1);
  small.engine->hold({0, 1});
  std::atomic<int> released = 0;
  std::thread releaser([&] {
    for (int tile : {0, 1}) {
      ++released;
      small.engine->release_hold(tile);
    }
  });
  small.engine->wait_updates();
  EXPECT_EQ(released, 2);
  releaser.join();
  EXPECT_THROW(small.engine->hold({2}), CallerError);
}

TEST(Drain, FetchBringsBackWhatWasDrained) {
  for (const std::size_t pin_limit : {SIZE_MAX, std::size_t{0}}) {
    SmallEngine small(make_host_backend({.max_delay_us = 100, .seed = 8, .pin_limit_bytes = pin_limit}), 1,
                      1);
    small.store->add_accumulator(0);
    std::vector<float> sum(kElements, 0.0f);
    for (int i = 1; i <= 20; ++i) {
      std::vector<float> fetched(kElements, -1.0f);
      small.engine->fetch(part(0, Section::kAccumulator, 0, fetched), {});
      ASSERT_EQ(fetched, sum) << i;
      for (float& value : sum) value += static_cast<float>(i);
      small.engine->drain(part(0, Section::kAccumulator, 0, sum), {});
      small.engine->wait_drain(i - 1, {});
    }
  }
}

TEST(Drain, AFetchMayReadWeights) {
  SmallEngine small(plain(), 2, 1);
  small.halve(1);
  std::vector<float> fetched(3);
  small.engine->fetch(part(1, Section::kWeights, 61, fetched), {});
  EXPECT_EQ(fetched, std::vector<float>(3, 1.0f));
}

TEST(Drain, AShardCopiesOnlyWhatItOwns) {
  const auto store = std::make_shared<TileStore>(plain(), TileStoreOptions{.threads = 1});
  store->add(TileLayout(TileFormat::kFp32, {{3000, true}}, {1, 2}));
  const ElementRange owned = store->layout(0).owned();
  Engine engine(store);
  std::vector<float> values(3000);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + 1);
  engine.wait_drain(engine.drain(part(0, Section::kGradients, 0, values), {}), {});
  const auto* gradients = reinterpret_cast<const float*>(store->section(0, Section::kGradients).data);
  for (std::int64_t i = 0; i < 3000; ++i) {
    ASSERT_EQ(gradients[i], i >= owned.begin && i < owned.end ? static_cast<float>(i + 1) : 0.0f) << i;
  }
  std::vector<float> nothing(10, 5.0f);  // of the other rank
  engine.wait_drain(engine.drain(part(0, Section::kGradients, 0, nothing), {}), {});
  EXPECT_EQ(gradients[0], 0.0f);
}

TEST(Drain, RefusesWhatCannotBe) {
  SmallEngine small(plain(), 1, 1);
  std::vector<float> values(8);
  const auto refused = [&](const SectionCopy& copy) {
    return message_of<CallerError>([&] { small.engine->drain(copy, {}); });
  };
  EXPECT_EQ(refused(part(0, Section::kGradients, 57, values)),
            "8 elements at offset 57 of the gradients of tile 0, which has 64 elements");
  EXPECT_NE(refused(part(0, Section::kGradients, -1, values)).find("offset -1"), std::string::npos);
  EXPECT_NE(refused(part(0, Section::kMasterLow, 0, values)).find("which has 0 elements"), std::string::npos);
  EXPECT_NE(refused(part(0, Section::kAccumulator, 0, values)).find("no accumulator"), std::string::npos);
  EXPECT_NE(refused(part(0, Section::kWeights, 0, values)).find("into the weights"), std::string::npos);
  EXPECT_NE(refused(part(2, Section::kGradients, 0, values)).find("tile 2"), std::string::npos);
  EXPECT_THROW(small.engine->wait_drain(0, {}), CallerError);
  EXPECT_THROW(small.engine->wait_drain(-1, {}), CallerError);
}

TEST(Drain, RemembersTicketsThatWereNeverWaitedFor) {
  SmallEngine small(plain(), 1, 1);
  for (int i = 0; i < 50; ++i) small.drain(0);
  for (int i = 0; i < 50; ++i) small.engine->wait_drain(i, {});
  EXPECT_EQ(host(small, 0, Section::kGradients), small.gradient);
}

// The thread is held inside the first update; the rest is chosen when it comes back.
TEST(UpdateQueue, TakesTheLowestPriorityFirstAndEqualOnesInOrder) {
  const auto backend = std::make_shared<ControlledBackend>();
  Latch latch;
  backend->before_update = [&] { latch.pass(); };
  SmallEngine small(backend, 6, 1);
  small.halve(5, 100);
  latch.wait_for_visitor();
  small.halve(3, 3);
  small.halve(0, 7);
  small.halve(1, 3);
  small.halve(2, -2);
  EXPECT_TRUE(small.engine->updates_pending());
  latch.open();
  small.engine->wait_updates();
  EXPECT_FALSE(small.engine->updates_pending());
  EXPECT_EQ(updated_tiles(*small.engine), (std::vector<int>{5, 2, 3, 1, 0}));
}

// The caller runs ahead: the drain of the most urgent tile is on its stream and has not landed.
TEST(UpdateQueue, DoesWhatHasLandedBeforeWhatIsUrgent) {
  const auto backend = std::make_shared<ControlledBackend>();
  Latch latch;
  backend->before_update = [&] { latch.pass(); };
  std::atomic<int> drains = 0;
  std::mutex mutex;
  std::optional<std::uintptr_t> late;  // the mark behind the second drain
  backend->before_copy = [&](CopyKind kind) { drains += kind == CopyKind::kDeviceToHost; };
  backend->on_record = [&](EventView event) {
    const std::lock_guard lock(mutex);
    if (drains == 2 && !late) late = event.handle;
  };
  backend->seems_ahead = [&](EventView event) {
    const std::lock_guard lock(mutex);
    return late == event.handle;
  };
  SmallEngine small(backend, 4, 1);
  small.halve(3, 0);
  latch.wait_for_visitor();
  for (const int tile : {1, 0}) small.engine->wait_drain(small.drain(tile), {});
  small.halve(1, 5);
  small.halve(2, 7);
  small.halve(0, 0);
  latch.open();
  small.engine->wait_updates();
  EXPECT_EQ(updated_tiles(*small.engine), (std::vector<int>{3, 1, 2, 0}));
}

TEST(UpdateQueue, KeepsTheUpdatesOfOneTileInOrder) {
  const auto backend = std::make_shared<ControlledBackend>();
  Latch latch;
  backend->before_update = [&] { latch.pass(); };
  SmallEngine small(backend, 3, 1);
  small.halve(2, 0);
  latch.wait_for_visitor();
  UpdateStep first;
  first.lr = 0.125;
  first.weight_decay = 0;
  first.step = 1;
  small.engine->wait_drain(small.drain(0), {});
  small.engine->update(0, {{0, first}}, 1.0f, 50);  // 1 - 0.125, by the gradient of 1
  small.halve(1, 10);
  small.halve(0, 1);  // of the same tile, urgent: the one before it becomes urgent too
  latch.open();
  EXPECT_EQ(updated_tiles(*small.engine), (std::vector<int>{2, 0, 0, 1}));
  EXPECT_LT(small.host_weight(0), 0.875f * 0.5f);  // what Adam's moments add came second
}

// Update 1 of tile 1 holds the second drain of tile 1; behind that drain is one of tile 2, which the
// most urgent update waits for. Taken strictly in turn, the two threads would wait for each other.
TEST(UpdateQueue, DoesNotDeadlockWithDrainsBehindAnUpdate) {
  const auto backend = std::make_shared<ControlledBackend>();
  Latch latch;
  backend->before_update = [&] { latch.pass(); };
  SmallEngine small(backend, 3, 1);
  small.halve(0, 0);
  latch.wait_for_visitor();
  small.drain(1);
  small.halve(1, 10);
  small.drain(1);
  const std::int64_t ticket = small.drain(2);
  small.halve(2, 0);
  small.engine->wait_drain(ticket, {});  // it has passed the one that is held
  latch.open();
  small.engine->synchronize();
  EXPECT_EQ(updated_tiles(*small.engine), (std::vector<int>{0, 2, 1}));
}

// In training a tile's gradient comes from its weights, so that a copy up has ended long before the
// tile's update. Here the copy is held back, behind the last reader of the only slot, and the update
// needs no gradient.
TEST(UpdateQueue, WaitsForACopyThatStillReadsTheWeights) {
  for (const std::string without : {"", "gate_fetch"}) {
#if defined(__SANITIZE_THREAD__)
    if (!without.empty()) continue;  // races on purpose
#endif
    const std::shared_ptr<Backend> backend = make_host_backend({.max_delay_us = 1000, .seed = 5});
    SmallEngine small(backend, 2, 1, {.without_wait = without});
    std::vector<float> out(kElements);
    const Stream compute = backend->create_stream("compute");
    const auto read_slot = [&] {
      backend->copy(out.data(), small.memory[0].data(), kElements * sizeof(float), CopyKind::kDeviceToHost,
                    compute);
    };
    const int held = small.engine->acquire(0, compute);
    for (int i = 0; i < 100; ++i) read_slot();  // 50 ms
    small.engine->release(held, compute);
    small.engine->acquire(1, compute);
    small.halve(1);
    read_slot();
    backend->synchronize(compute);
    EXPECT_EQ(out, std::vector<float>(kElements, without.empty() ? 2.0f : 1.0f)) << without;
    small.engine->close();
  }
}

TEST(UpdateQueue, IgnoresAnEmptyList) {
  SmallEngine small(plain(), 1, 1);
  small.engine->update(0, {}, 1.0f, 0);
  EXPECT_EQ(small.engine->version(0), 0);
  EXPECT_THROW(small.engine->update(1, {}, 1.0f, 0), CallerError);
  EXPECT_THROW(small.engine->update(0, {{1, {}}}, 1.0f, 0), CallerError);
  EXPECT_EQ(small.engine->version(0), 0);
}

TEST(UpdateQueue, AnInfiniteWeightSurfacesInTheNextCallAndStopsTheEngine) {
  SmallEngine small(plain(), 2, 1);
  small.gradient[3] = std::numeric_limits<float>::infinity();
  small.drain(1);
  small.halve(1);
  const std::string expected = "the update made a weight infinite or NaN: parameter 0 of tile 1, step 1";
  const auto failed = [&](const std::function<void()>& call) { return message_of<OutsideError>(call); };
  EXPECT_EQ(failed([&] { small.engine->wait_updates(); }), expected);
  EXPECT_EQ(failed([&] { small.engine->acquire(0, {}); }), expected);
  EXPECT_EQ(failed([&] { small.engine->expect({}); }), expected);
  small.engine->close();
  EXPECT_EQ(failed([&] { small.engine->version(0); }), expected);
}

TEST(Engine, FinishesWhatIsQueuedWhenItIsClosed) {
  SmallEngine small(make_host_backend({.max_delay_us = 2000, .seed = 6}), 8, 2);
  for (int tile = 0; tile < 8; ++tile) small.drain(tile);
  for (int tile = 0; tile < 8; ++tile) small.halve(tile);
  small.engine->expect({0, 1, 2, 3});
  small.engine->close();
  for (int tile = 0; tile < 8; ++tile) {
    EXPECT_EQ(host(small, tile, Section::kGradients), small.gradient);
    EXPECT_LT(small.host_weight(tile), 0.5f * static_cast<float>(tile + 1));
  }
  small.engine->close();
  EXPECT_EQ(message_of<CallerError>([&] { small.read(0); }), "the engine is closed");
  EXPECT_THROW(small.engine->synchronize(), CallerError);
  EXPECT_THROW(small.engine->trace(), CallerError);
}

TEST(Engine, ClosingThrowsAFailureThatNoCallHasThrown) {
  SmallEngine small(make_host_backend({.max_delay_us = 2000, .seed = 6}), 1, 1);
  small.gradient[0] = std::numeric_limits<float>::infinity();
  small.drain(0);
  small.halve(0);
  EXPECT_THROW(small.engine->close(), OutsideError);
  small.engine->close();
}

TEST(Engine, IsDestroyedWithWorkQueuedAndWithAFailure) {
  {
    SmallEngine small(make_host_backend({.max_delay_us = 500, .seed = 6}), 4, 2);
    for (int tile = 0; tile < 4; ++tile) small.drain(tile);
    small.engine->expect({0, 1, 2, 3});
    for (int tile = 0; tile < 4; ++tile) small.halve(tile);
  }
  SmallEngine failing(plain(), 1, 1);
  failing.gradient[0] = std::numeric_limits<float>::quiet_NaN();
  failing.drain(0);
  failing.halve(0);
}

TEST(Engine, RefusesToRemoveAnUnknownWait) {
  EXPECT_THROW(SmallEngine(plain(), 1, 1, {.without_wait = "all"}), CallerError);
}

// An update of step 1 inside a compute span of step 2: the test holds the update until the compute
// span has begun, and ends that span when the update has ended.
TEST(Engine, TracesAnUpdateInsideTheComputeOfTheNextStep) {
  const auto backend = std::make_shared<ControlledBackend>();
  Latch latch;
  backend->before_update = [&] { latch.pass(); };
  SmallEngine small(backend, 2, 2);
  Engine& engine = *small.engine;
  engine.begin_step(1);
  small.drain(1);
  small.halve(1);
  engine.begin_step(2);
  const int slot = engine.acquire(0, {});
  engine.begin_compute(0, {});
  latch.open();
  engine.wait_updates();
  engine.end_compute({});
  engine.release(slot, {});
  EXPECT_THROW(engine.end_compute({}), CallerError);

  const std::vector<TraceSpan> spans = engine.trace();
  const auto find = [&](SpanKind kind) {
    for (const TraceSpan& span : spans) {
      if (span.kind == kind) return span;
    }
    ADD_FAILURE() << "no span of kind " << span_kind_name(kind);
    return TraceSpan{};
  };
  const TraceSpan update = find(SpanKind::kUpdate), compute = find(SpanKind::kCompute);
  EXPECT_EQ(update.step, 1);
  EXPECT_EQ(update.tile, 1);
  EXPECT_EQ(update.bytes, 28 * kElements);
  EXPECT_EQ(compute.step, 2);
  EXPECT_EQ(compute.tile, 0);
  EXPECT_LE(compute.begin_ns, update.begin_ns);
  EXPECT_LE(update.end_ns, compute.end_ns);
  EXPECT_EQ(find(SpanKind::kCopyDown).step, 1);
  EXPECT_EQ(find(SpanKind::kCopyDown).bytes, 4 * kElements);
  EXPECT_EQ(find(SpanKind::kCopyUp).bytes, 4 * kElements);
  EXPECT_EQ(find(SpanKind::kWait).tile, 0);
  for (std::size_t i = 1; i < spans.size(); ++i) EXPECT_LE(spans[i - 1].begin_ns, spans[i].begin_ns);
  engine.clear_trace();
  EXPECT_TRUE(engine.trace().empty());
}

}  // namespace
}  // namespace megatrain
