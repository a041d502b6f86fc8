// Slots through the engine: what goes first, what is replaced, what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <future>
#include <string>
#include <vector>

#include "base/error.h"
#include "stream_controlled.h"

namespace megatrain {
namespace {

using testing::ControlledBackend;
using testing::Latch;
using testing::message_of;
using testing::SmallEngine;

std::shared_ptr<Backend> plain() {
  return make_host_backend({.max_delay_us = 50, .seed = 2, .poison = true});
}

int copies_up(Engine& engine) {
  int count = 0;
  for (const TraceSpan& span : engine.trace()) count += span.kind == SpanKind::kCopyUp;
  return count;
}

TEST(Prefetcher, GivesTheWeightsOfTheTileThatWasAsked) {
  SmallEngine small(plain(), 4, 2);
  for (const int tile : {0, 3, 1, 1, 2, 0}) EXPECT_EQ(small.read(tile), static_cast<float>(tile + 1));
}

TEST(Prefetcher, CopiesATileOnceWhileASlotKeepsIt) {
  SmallEngine small(plain(), 4, 2);
  for (int i = 0; i < 5; ++i) small.read(1);
  EXPECT_EQ(copies_up(*small.engine), 1);
  small.engine->mark_edited(1);
  small.read(1);
  EXPECT_EQ(copies_up(*small.engine), 2);
}

// Up and down a stack of five with three slots: what is needed soonest stays. 5 copies on the way
// up, and on the way down only the two tiles that had to make room.
TEST(Prefetcher, KeepsWhatIsNeededSoonest) {
  SmallEngine small(plain(), 5, 3);
  const std::vector<int> order = {0, 1, 2, 3, 4, 4, 3, 2, 1, 0};
  small.engine->expect(order);
  for (const int tile : order) EXPECT_EQ(small.read(tile), static_cast<float>(tile + 1));
  EXPECT_EQ(copies_up(*small.engine), 7);
}

TEST(Prefetcher, LoadsWhatIsExpectedBeforeItIsAsked) {
  const auto backend = std::make_shared<ControlledBackend>();
  std::atomic<int> copies{0};
  std::promise<void> both;
  backend->before_copy = [&](CopyKind) {
    if (++copies == 2) both.set_value();
  };
  SmallEngine small(backend, 4, 2);
  small.engine->expect({2, 3, 0, 1});
  both.get_future().wait();  // for ever, if nothing is loaded ahead
  EXPECT_EQ(small.read(2), 3.0f);
}

// The gate of the first guess is closed for as long as the test likes; what is asked for does not
// wait for it, and neither do later guesses.
TEST(Prefetcher, DoesNotWaitForTheGateOfAGuess) {
  const auto backend = std::make_shared<ControlledBackend>();
  Latch latch;
  backend->before_update = [&] { latch.pass(); };
  SmallEngine small(backend, 4, 2);
  small.halve(0);
  small.engine->expect({0, 1, 2, 3});
  EXPECT_EQ(small.read(3), 4.0f);
  small.engine->expect({0, 1, 2, 3});
  EXPECT_EQ(small.read(1), 2.0f);
  latch.open();
  EXPECT_EQ(small.read(0), 0.5f);
}

TEST(Prefetcher, ADemandWaitsForItsOwnUpdate) {
  const auto backend = std::make_shared<ControlledBackend>();
  Latch latch;
  backend->before_update = [&] { latch.pass(); };
  SmallEngine small(backend, 2, 2);
  EXPECT_EQ(small.read(0), 1.0f);
  small.halve(0);
  EXPECT_EQ(small.engine->version(0), 1);
  std::future<float> read = std::async(std::launch::async, [&] { return small.read(0); });
  latch.wait_for_visitor();
  EXPECT_EQ(read.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  latch.open();
  EXPECT_EQ(read.get(), 0.5f);
  // The trace says that the copy was held.
  std::int64_t held_ns = 0;
  for (const TraceSpan& span : small.engine->trace()) {
    if (span.kind == SpanKind::kCopyUp) held_ns = std::max(held_ns, span.gate_ns);
  }
  EXPECT_GT(held_ns, 0);
  EXPECT_GT(small.engine->wait_totals().update_ns, 0);
}

TEST(Prefetcher, SharesASlotBetweenSeveralAcquisitions) {
  SmallEngine small(plain(), 3, 2);
  const int first = small.engine->acquire(0, {});
  const int second = small.engine->acquire(0, {});
  EXPECT_EQ(first, second);
  small.engine->release(first, {});
  const int other = small.engine->acquire(1, {});
  EXPECT_NE(other, first);
  EXPECT_THROW(small.engine->acquire(2, {}), CallerError);  // tile 0 is still held once
  EXPECT_EQ(small.memory[static_cast<std::size_t>(first)][0], 1.0f);
  small.engine->release(second, {});
  EXPECT_EQ(small.read(2), 3.0f);
}

TEST(Prefetcher, KeepsOldWeightsForTheirReaderWhileNewOnesComeUp) {
  SmallEngine small(plain(), 2, 2);
  const int old_slot = small.engine->acquire(0, {});
  small.halve(0);
  const int new_slot = small.engine->acquire(0, {});
  EXPECT_NE(old_slot, new_slot);
  EXPECT_EQ(small.memory[static_cast<std::size_t>(old_slot)][0], 1.0f);
  EXPECT_EQ(small.memory[static_cast<std::size_t>(new_slot)][0], 0.5f);
}

TEST(Prefetcher, PoisonsWhatNobodyMayReadAnyMore) {
  SmallEngine small(plain(), 4, 3);
  const int stale = small.engine->acquire(0, {});
  small.halve(0);
  small.engine->release(stale, {});
  EXPECT_TRUE(std::isnan(small.memory[static_cast<std::size_t>(stale)][0]));

  const int needed = small.engine->acquire(1, {});
  small.engine->release(needed, {});  // nothing is expected: it may well be needed again
  EXPECT_EQ(small.memory[static_cast<std::size_t>(needed)][0], 2.0f);

  const int done = small.engine->acquire(2, {});
  small.engine->expect({1});
  small.engine->release(done, {});
  EXPECT_TRUE(std::isnan(small.memory[static_cast<std::size_t>(done)][0]));
  EXPECT_EQ(small.read(2), 3.0f);  // wrong guess, right weights
}

TEST(Prefetcher, UsesATilesOwnSlot) {
  SmallEngine small(plain(), 3, 1);
  std::vector<float> own(SmallEngine::kElements);
  const int index = small.engine->add_slot(reinterpret_cast<std::byte*>(own.data()), own.size() * 4, {}, 2);
  const int slot = small.engine->acquire(2, {});
  EXPECT_EQ(slot, index);
  EXPECT_EQ(own[0], 3.0f);
  small.engine->release(slot, {});
  for (const int tile : {0, 1, 0, 1}) EXPECT_EQ(small.read(tile), static_cast<float>(tile + 1));
  small.engine->expect({2});
  const int again = small.engine->acquire(2, {});
  EXPECT_EQ(again, index);
  small.engine->release(again, {});
  EXPECT_EQ(copies_up(*small.engine), 5);
}

// Ten delayed copies of the memory's last user are under way where one delayed copy up could follow.
struct LateUser {
  explicit LateUser(const std::string& without = {}) : small(slow(), 1, 0, {.without_wait = without}) {
    read_all();
  }
  static std::shared_ptr<Backend> slow() {
    return make_host_backend({.max_delay_us = 3000, .seed = 4, .poison = true});
  }
  void read_all() {
    Backend& backend = small.store->backend();
    for (std::vector<float>& read : seen) {
      backend.copy(read.data(), memory.data(), memory.size() * 4, CopyKind::kDeviceToHost, stream);
    }
  }
  void add_slot() {
    small.engine->add_slot(reinterpret_cast<std::byte*>(memory.data()), memory.size() * 4, stream);
  }
  // What the slot's first acquisition gives; -1 where the last user has seen what came after it.
  float first_weight() {
    add_slot();
    small.engine->release(small.engine->acquire(0, stream), stream);
    small.store->backend().synchronize(stream);
    const bool undisturbed = std::all_of(seen.begin(), seen.end(), [](const std::vector<float>& read) {
      return read == std::vector<float>(read.size(), 7);
    });
    return undisturbed ? memory[0] : -1;
  }

  std::vector<float> memory = std::vector<float>(SmallEngine::kElements, 7);
  std::vector<std::vector<float>> seen{10, std::vector<float>(SmallEngine::kElements)};
  SmallEngine small;
  Stream stream = small.store->backend().create_stream("compute");
};

TEST(Prefetcher, ANewSlotWaitsForTheLastUserOfItsMemory) {
  EXPECT_EQ(LateUser().first_weight(), 1.0f);
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "removing a wait is a data race, which the thread sanitizer reports";
#endif
  EXPECT_EQ(LateUser("slot_free").first_weight(), -1.0f);
}

TEST(Prefetcher, SlotsAreGivenUpWhenTheirReadersAreDone) {
  LateUser user;
  user.add_slot();
  const int slot = user.small.engine->acquire(0, user.stream);
  user.read_all();
  user.small.engine->release(slot, user.stream);
  user.small.engine->clear_device();
  std::fill(user.memory.begin(), user.memory.end(), 9.0f);
  user.small.store->backend().synchronize(user.stream);
  EXPECT_EQ(user.seen.back(), std::vector<float>(SmallEngine::kElements, 1));
}

TEST(Prefetcher, ReadsAnEmptyTile) {
  const auto store = std::make_shared<TileStore>(plain(), TileStoreOptions{.threads = 1});
  store->add(TileLayout(TileFormat::kFp32, {}));
  Engine engine(store);
  std::byte memory[16];
  engine.add_slot(memory, sizeof memory, {});
  engine.release(engine.acquire(0, {}), {});
}

TEST(Prefetcher, RefusesWhatCannotBe) {
  SmallEngine small(plain(), 3, 2);
  Engine& engine = *small.engine;
  EXPECT_EQ(message_of<CallerError>([&] { engine.acquire(3, {}); }), "tile 3 of a store with 3 tiles");
  EXPECT_EQ(message_of<CallerError>([&] { engine.expect({0, 7}); }), "tile 7 of a store with 3 tiles");
  EXPECT_EQ(message_of<CallerError>([&] { engine.release(0, {}); }),
            "slot 0 is not in use; it cannot be released");
  EXPECT_THROW(engine.release(2, {}), CallerError);
  EXPECT_THROW(engine.release(-1, {}), CallerError);
  std::byte memory[8];
  EXPECT_EQ(message_of<CallerError>([&] { engine.add_slot(memory, 8, {}, 1); }),
            "a slot of 8 bytes for tile 1 alone, whose weights have 256 bytes");
  engine.acquire(0, {});
  engine.acquire(1, {});
  EXPECT_EQ(message_of<CallerError>([&] { engine.acquire(2, {}); }),
            "all 2 slots are in use; release one before acquiring tile 2");
  EXPECT_EQ(engine.acquire(1, {}), engine.acquire(1, {}));  // the engine goes on
}

TEST(Prefetcher, RefusesATileLargerThanEverySlot) {
  const auto store = std::make_shared<TileStore>(plain(), TileStoreOptions{.threads = 1});
  store->add(TileLayout(TileFormat::kFp32, {{1000, true}}));
  store->add(TileLayout(TileFormat::kFp32, {{64, true}}));
  Engine engine(store);
  EXPECT_EQ(message_of<CallerError>([&] { engine.acquire(0, {}); }),
            "there are no slots; add one before acquiring a tile");
  std::vector<float> memory(64);
  engine.add_slot(reinterpret_cast<std::byte*>(memory.data()), 256, {});
  engine.expect({0, 1});  // a guess that cannot be is passed over
  EXPECT_EQ(message_of<CallerError>([&] { engine.acquire(0, {}); }),
            "the weights of tile 0 have 4096 bytes; the largest slot for them has 256");
  engine.release(engine.acquire(1, {}), {});
}

TEST(Prefetcher, AFailedCopySurfacesInTheCallThatWaitsForIt) {
  const auto backend = std::make_shared<ControlledBackend>();
  backend->before_copy = [](CopyKind) { throw OutsideError("the device has fallen off the bus"); };
  SmallEngine small(backend, 2, 2);
  const auto failed = [&](const std::function<void()>& call) { return message_of<OutsideError>(call); };
  EXPECT_EQ(failed([&] { small.engine->acquire(0, {}); }), "the device has fallen off the bus");
  EXPECT_EQ(failed([&] { small.engine->acquire(1, {}); }), "the device has fallen off the bus");
  EXPECT_EQ(failed([&] { small.engine->synchronize(); }), "the device has fallen off the bus");
  small.engine->close();  // it has been thrown already
}

}  // namespace
}  // namespace megatrain
