// What the probe measures must come from memory: nothing is touched again before all else was.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/thread_pool.h"
#include "probe/contest.h"
#include "probe/copy_flow.h"
#include "probe/update_load.h"
#include "stream_controlled.h"

namespace megatrain {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

using testing::ControlledBackend;
using Bytes = std::vector<std::byte>;

class Rounds : public ::testing::Test {
 protected:
  std::unique_ptr<Backend> backend_ = make_host_backend({});
  ThreadPool pool_{2};
};

TEST_F(Rounds, AnUpdateChangesTheNextWindowAndNoOther) {
  constexpr std::int64_t kParameters = 5001;
  constexpr std::size_t kWindows = 3;
  UpdateLoad load(*backend_, pool_, kParameters, kWindows);
  ASSERT_EQ(load.windows(), kWindows);
  const std::size_t bytes = UpdateLoad::bytes(kParameters);
  const auto contents = [&](std::size_t window) {
    return Bytes(load.window(window), load.window(window) + bytes);
  };
  for (std::size_t pass = 0; pass < 2 * kWindows + 1; ++pass) {
    std::vector<Bytes> before;
    for (std::size_t window = 0; window < kWindows; ++window) before.push_back(contents(window));
    load.update(pool_);
    for (std::size_t window = 0; window < kWindows; ++window) {
      EXPECT_EQ(contents(window) != before[window], window == pass % kWindows) << pass << ", " << window;
    }
  }
}

TEST_F(Rounds, WindowsAreAlikeAndApart) {
  constexpr std::int64_t kParameters = 3000;
  UpdateLoad load(*backend_, pool_, kParameters, 2);
  const std::size_t bytes = UpdateLoad::bytes(kParameters);
  EXPECT_GE(load.window(1), load.window(0) + bytes);
  EXPECT_EQ(std::memcmp(load.window(0), load.window(1), bytes), 0);
  load.update(pool_);
  load.update(pool_);
  EXPECT_EQ(std::memcmp(load.window(0), load.window(1), bytes), 0);
}

TEST_F(Rounds, WindowsAreTheFewestThatAreSixTimesTheCache) {
  const std::size_t each = UpdateLoad::bytes(1 << 20);
  for (const std::size_t cache : {std::size_t{1}, 2 * kMiB, 3 * kMiB, 32 * kMiB, 300 * kMiB}) {
    const std::size_t windows = UpdateLoad::windows_beyond(cache, 1 << 20);
    EXPECT_GE(windows * each, 6 * cache) << cache;
    EXPECT_LT((windows - 1) * each, 6 * cache) << cache;
  }
  EXPECT_EQ(UpdateLoad::windows_beyond(0, 1 << 20), 1u);
}

TEST_F(Rounds, ContestsTakeEightTimesTheCache) {
  const std::size_t bytes = Contest::host_bytes(2 * kMiB, 1 << 20, 40 * kMiB);
  EXPECT_GE(bytes, 8 * 40 * kMiB);
  EXPECT_LE(bytes, 8 * 40 * kMiB + UpdateLoad::bytes(1 << 20) + 2 * kMiB);
  EXPECT_EQ(Contest::host_bytes(2 * kMiB, 1 << 20, 0), UpdateLoad::bytes(1 << 20) + 2 * kMiB);
}

// Where copies of one kind went on the host and on the device, in two runs.
struct Places {
  std::vector<const std::byte*> host, device;
};

Places places_of(CopyKind kind, std::byte* host, std::size_t host_bytes, std::byte* device,
                 std::size_t bytes) {
  ControlledBackend backend;
  Places places;
  backend.on_copy = [&](const void* to, const void* from) {
    const bool up = kind == CopyKind::kHostToDevice;
    places.host.push_back(static_cast<const std::byte*>(up ? from : to));
    places.device.push_back(static_cast<const std::byte*>(up ? to : from));
  };
  CopyFlow flow(backend, kind, host, host_bytes, device, bytes);
  for (int run = 0; run < 2; ++run) {
    const double before = flow.copied();
    flow.start();
    while (flow.copied() < before + 4 * static_cast<double>(bytes)) std::this_thread::yield();
    flow.stop();
  }
  return places;
}

TEST_F(Rounds, CopiesGoThroughAllPiecesAndOnWhereTheyStopped) {
  constexpr std::size_t kPiece = 4096, kPieces = 3;
  Bytes host(kPiece * kPieces + 100), device(kPiece);
  for (const CopyKind kind : {CopyKind::kHostToDevice, CopyKind::kDeviceToHost}) {
    const Places places = places_of(kind, host.data(), host.size(), device.data(), kPiece);
    ASSERT_GE(places.host.size(), 8u);
    for (std::size_t i = 0; i < places.host.size(); ++i) {
      EXPECT_EQ(places.host[i], host.data() + i % kPieces * kPiece) << i;
      EXPECT_EQ(places.device[i], device.data()) << i;
    }
  }
}

TEST_F(Rounds, EveryPieceGetsWhatCameDown) {
  constexpr std::size_t kPiece = 4096, kPieces = 5;
  Bytes host(kPiece * kPieces), device(kPiece, std::byte{7});
  CopyFlow flow(*backend_, CopyKind::kDeviceToHost, host.data(), host.size(), device.data(), kPiece);
  flow.start();
  while (flow.copied() < static_cast<double>(host.size())) std::this_thread::yield();
  flow.stop();
  EXPECT_EQ(host, Bytes(host.size(), std::byte{7}));
}

}  // namespace
}  // namespace megatrain
