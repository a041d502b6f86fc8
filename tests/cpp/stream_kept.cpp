// Tensors that wait on the host: what comes back is what went, and each wait is needed.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "stream/engine.h"

namespace megatrain {
namespace {

constexpr std::size_t kBytes = 256;

std::shared_ptr<TileStore> store_with_delays(std::uint64_t seed) {
  auto store = std::make_shared<TileStore>(
      make_host_backend({.max_delay_us = 400, .seed = seed, .poison = true}), TileStoreOptions{.threads = 1});
  store->add(TileLayout(TileFormat::kFp32, {{64, true}}));
  return store;
}

// One tensor: made on a stream, put away, its memory overwritten, brought back, read on the stream. True
// if what was read is what was made.
bool comes_back(Engine& engine, StreamView compute, std::byte value) {
  Backend& backend = engine.store().backend();
  KeptStore& kept = engine.kept();
  std::vector<std::byte> made(kBytes, value), other(kBytes, std::byte{0xee}), device(kBytes), back(kBytes),
      read(kBytes);
  backend.copy(device.data(), made.data(), kBytes, CopyKind::kHostToDevice, compute);
  const std::int64_t number = kept.put(0, device.data(), kBytes, compute);
  kept.get(number, back.data(), compute);
  kept.wait_got(number, compute);
  backend.copy(read.data(), back.data(), kBytes, CopyKind::kDeviceToHost, compute);
  kept.wait_landed(number, compute);
  backend.synchronize(compute);
  kept.drop(number);
  kept.synchronize();
  return read == made;
}

int wrong_of(const std::string& without, int rounds) {
  Engine engine(store_with_delays(11), {.without_wait = without});
  const Stream compute = engine.store().backend().create_stream("compute");
  int wrong = 0;
  for (int i = 0; i < rounds; ++i) wrong += !comes_back(engine, compute, static_cast<std::byte>(i + 1));
  return wrong;
}

TEST(KeptStore, WhatComesBackIsWhatWent) { EXPECT_EQ(wrong_of("", 60), 0); }

TEST(KeptStore, EachWaitIsNeeded) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "removing a wait is a data race, which the thread sanitizer reports";
#endif
  EXPECT_GT(wrong_of("kept_ready", 60), 0);
  EXPECT_GT(wrong_of("kept_landed", 60), 0);
  EXPECT_GT(wrong_of("kept_arrived", 60), 0);
}

TEST(KeptStore, MemoryIsUsedAgain) {
  Engine engine(store_with_delays(3));
  const Stream compute = engine.store().backend().create_stream("compute");
  comes_back(engine, compute, std::byte{1});
  const std::size_t once = engine.kept().bytes();
  EXPECT_GE(once, kBytes);
  for (int i = 0; i < 5; ++i) comes_back(engine, compute, std::byte{2});
  EXPECT_EQ(engine.kept().bytes(), once);
}

TEST(KeptStore, RefusesWhatItDoesNotHave) {
  Engine engine(store_with_delays(3));
  EXPECT_THROW(engine.kept().wait_landed(0, {}), CallerError);
  std::vector<std::byte> device(kBytes);
  EXPECT_THROW(engine.kept().put(1, device.data(), kBytes, {}), CallerError);
  const std::int64_t number = engine.kept().put(0, device.data(), 0, {});
  EXPECT_THROW(engine.kept().wait_got(number, {}), CallerError);
  engine.kept().drop(number);
  EXPECT_THROW(engine.kept().drop(number), CallerError);
}

TEST(KeptStore, TakesNoMoreMemoryThanItMay) {
  Engine engine(store_with_delays(3));
  engine.kept().limit(8192);
  std::vector<std::byte> device(8192);
  const std::int64_t first = engine.kept().put(0, device.data(), 4096, {});
  engine.kept().put(0, device.data(), 4096, {});
  EXPECT_THROW(engine.kept().put(0, device.data(), 1, {}), MemoryLimitError);
  engine.kept().drop(first);
  engine.kept().put(0, device.data(), 4096, {});
  EXPECT_EQ(engine.kept().bytes(), 8192u);
  engine.kept().synchronize();
}

std::vector<TraceSpan> waits_down(Engine& engine) {
  std::vector<TraceSpan> found;
  for (const TraceSpan& span : engine.trace()) {
    if (span.kind == SpanKind::kWaitDown) found.push_back(span);
  }
  return found;
}

TEST(KeptStore, AWaitOfTheCallerCountsWhereTheDeviceHasNoWork) {
  Engine engine(store_with_delays(3));
  Backend& backend = engine.store().backend();
  KeptStore& kept = engine.kept();
  const Stream compute = backend.create_stream("compute");
  std::vector<std::byte> device(kBytes);
  std::vector<std::int64_t> numbers;
  for (int i = 0; i < 50; ++i) numbers.push_back(kept.put(0, device.data(), kBytes, compute));
  engine.begin_step(7);
  kept.wait_landed(numbers.back(), compute);
  const std::vector<TraceSpan> spans = waits_down(engine);
  ASSERT_EQ(spans.size(), 1u);
  EXPECT_EQ(spans[0].tile, 0);
  EXPECT_EQ(spans[0].step, 7);
  EXPECT_EQ(spans[0].bytes, 0);
  EXPECT_GT(spans[0].end_ns, spans[0].begin_ns);
  EXPECT_EQ(engine.wait_totals().down_ns, spans[0].end_ns - spans[0].begin_ns);
  for (const std::int64_t number : numbers) kept.wait_landed(number, compute);  // they have landed
  EXPECT_EQ(waits_down(engine).size(), 1u);
}

TEST(KeptStore, AWaitOfTheCallerDoesNotCountWhileTheDeviceWorks) {
  Engine engine(store_with_delays(3));
  Backend& backend = engine.store().backend();
  const Stream compute = backend.create_stream("compute");
  std::vector<std::byte> device(kBytes), other(kBytes), more(kBytes);
  const std::int64_t number = engine.kept().put(0, device.data(), kBytes, compute);
  for (int i = 0; i < 100; ++i) {
    backend.copy(more.data(), other.data(), kBytes, CopyKind::kHostToDevice, compute);
  }
  const Event worked = backend.create_event("worked");
  backend.record(worked, compute);
  engine.kept().wait_landed(number, compute);
  backend.synchronize(compute);
  for (const TraceSpan& span : waits_down(engine)) EXPECT_GE(span.begin_ns, backend.time_ns(worked));
}

TEST(KeptStore, GivesUnusedMemoryBackBeforeItIsRefused) {
  Engine engine(store_with_delays(3));
  KeptStore& kept = engine.kept();
  std::vector<std::byte> device(8192);
  kept.drop(kept.put(0, device.data(), 4096, {}));
  EXPECT_EQ(kept.bytes(), 4096u);
  EXPECT_THROW(kept.put(0, device.data(), SIZE_MAX / 2, {}), MemoryLimitError);
  EXPECT_EQ(kept.bytes(), 0u);

  kept.limit(8192);
  kept.drop(kept.put(0, device.data(), 4096, {}));
  kept.put(0, device.data(), 8192, {});
  EXPECT_EQ(kept.bytes(), 8192u);
  kept.synchronize();
}

// Holds the process to so many bytes of address space more than it has.
class AddressSpaceLimit {
 public:
  explicit AddressSpaceLimit(std::size_t more_bytes) {
    EXPECT_EQ(getrlimit(RLIMIT_AS, &before_), 0);
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    rlimit limit = before_;
    limit.rlim_cur = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + more_bytes;
    EXPECT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  }
  ~AddressSpaceLimit() { setrlimit(RLIMIT_AS, &before_); }
  AddressSpaceLimit(const AddressSpaceLimit&) = delete;
  AddressSpaceLimit& operator=(const AddressSpaceLimit&) = delete;

 private:
  rlimit before_{};
};

TEST(KeptStore, TriesAgainWithoutUnusedMemoryWhenTheSystemRefuses) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "sanitizers take address space as they like";
#endif
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  Engine engine(store_with_delays(3));
  KeptStore& kept = engine.kept();
  std::vector<std::byte> device(128 * kMiB);
  kept.drop(kept.put(0, device.data(), 64 * kMiB, {}));
  kept.synchronize();
  const AddressSpaceLimit limit(96 * kMiB);
  kept.put(0, device.data(), 128 * kMiB, {});
  EXPECT_EQ(kept.bytes(), 128 * kMiB);
  EXPECT_THROW(kept.put(0, device.data(), 128 * kMiB, {}), OutsideError);
  kept.synchronize();
}

}  // namespace
}  // namespace megatrain
