// What every backend promises. The host one runs with random delays and poison; a test that passes
// only because a copy happens to be fast fails there.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "device/backend.h"
#include "device/host_memory.h"
#include "device_memory.h"

namespace megatrain {
namespace {

using testing::DeviceBuffer;
using Bytes = std::vector<unsigned char>;

constexpr std::size_t kBytes = (std::size_t{1} << 20) + 3;

// Differs in every byte from the patterns of neighbouring salts.
Bytes pattern(std::size_t bytes, unsigned salt) {
  Bytes result(bytes);
  for (std::size_t i = 0; i < bytes; ++i) result[i] = static_cast<unsigned char>(i * 7 + i / 256 + salt);
  return result;
}

std::int64_t steady_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class BackendTest : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (is_cuda() && cuda_device_count() == 0) GTEST_SKIP() << cuda_unavailable_reason();
    backend_ = make(SIZE_MAX);
  }

  static bool is_cuda() { return std::string(GetParam()) == "cuda"; }

  static std::unique_ptr<Backend> make(std::size_t pin_limit_bytes) {
    if (is_cuda()) return make_cuda_backend(0, {.pin_limit_bytes = pin_limit_bytes});
    return make_host_backend(
        {.max_delay_us = 2000, .seed = 7, .poison = true, .pin_limit_bytes = pin_limit_bytes});
  }

  HostBuffer host(std::size_t bytes = kBytes) { return HostBuffer(*backend_, pool_, bytes, true); }
  HostBuffer host(const Bytes& content) {
    HostBuffer buffer = host(content.size());
    if (!content.empty()) std::memcpy(buffer.data(), content.data(), content.size());
    return buffer;
  }
  static Bytes content(const HostBuffer& buffer, std::size_t bytes = kBytes) {
    const auto* data = reinterpret_cast<const unsigned char*>(buffer.data());
    return Bytes(data, data + bytes);
  }

  void up(const DeviceBuffer& to, const HostBuffer& from, StreamView stream, std::size_t bytes = kBytes) {
    backend_->copy(to.get(), from.data(), bytes, CopyKind::kHostToDevice, stream);
  }
  void down(const HostBuffer& to, const DeviceBuffer& from, StreamView stream, std::size_t bytes = kBytes) {
    backend_->copy(to.data(), from.get(), bytes, CopyKind::kDeviceToHost, stream);
  }

  ThreadPool pool_{2};
  std::unique_ptr<Backend> backend_;
};

INSTANTIATE_TEST_SUITE_P(Backends, BackendTest, ::testing::Values("host", "cuda"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(BackendTest, SaysWhatItIs) {
  EXPECT_STREQ(backend_->name(), GetParam());
  EXPECT_EQ(backend_->device_index(), 0);
  EXPECT_GE(backend_->numa_node(), -1);
  const Backend::DeviceMemory memory = backend_->device_memory();
  EXPECT_GT(memory.free_bytes, 0u);
  EXPECT_LE(memory.free_bytes, memory.total_bytes);
}

TEST_P(BackendTest, CopiesUpAndDown) {
  const Stream stream = backend_->create_stream("copies");
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{4097}, kBytes}) {
    const HostBuffer source = host(pattern(bytes, 1));
    const HostBuffer target = host(pattern(bytes + 1, 2));
    const DeviceBuffer device(*backend_, bytes);
    up(device, source, stream, bytes);
    down(target, device, stream, bytes);
    backend_->synchronize(stream.view());
    EXPECT_EQ(content(target, bytes), pattern(bytes, 1));
    EXPECT_EQ(content(target, bytes + 1).back(), pattern(bytes + 1, 2).back()) << "one past the end";
  }
}

TEST_P(BackendTest, CopiesNothing) {
  const Stream stream = backend_->create_stream("copies");
  for (const StreamView view : {stream.view(), StreamView{}}) {
    backend_->copy(nullptr, nullptr, 0, CopyKind::kHostToDevice, view);
    backend_->copy(nullptr, nullptr, 0, CopyKind::kDeviceToHost, view);
    backend_->synchronize(view);
  }
}

TEST_P(BackendTest, EventOrdersTwoStreams) {
  const Stream h2d = backend_->create_stream("h2d"), d2h = backend_->create_stream("d2h");
  const Event filled = backend_->create_event("filled"), read = backend_->create_event("read");
  const DeviceBuffer device(*backend_, kBytes);
  std::vector<HostBuffer> sources, targets;
  for (unsigned round = 0; round < 20; ++round) {
    sources.push_back(host(pattern(kBytes, round)));
    targets.push_back(host());
    backend_->wait(h2d, read);
    up(device, sources.back(), h2d);
    backend_->record(filled, h2d);
    backend_->wait(d2h, filled);
    down(targets.back(), device, d2h);
    backend_->record(read, d2h);
  }
  backend_->synchronize(read.view());
  for (unsigned round = 0; round < 20; ++round) {
    EXPECT_EQ(content(targets[round]), pattern(kBytes, round)) << "round " << round;
  }
}

TEST_P(BackendTest, RecordingAgainMovesTheMark) {
  const Stream first = backend_->create_stream("first"), second = backend_->create_stream("second");
  const Event event = backend_->create_event("moved");
  const DeviceBuffer device(*backend_, kBytes);
  const HostBuffer target = host();
  std::vector<HostBuffer> sources;
  for (unsigned i = 0; i < 8; ++i) {
    sources.push_back(host(pattern(kBytes, i)));
    up(device, sources.back(), first);
    backend_->record(event, first);
  }
  backend_->wait(second, event);
  down(target, device, second);
  backend_->synchronize(second.view());
  EXPECT_EQ(content(target), pattern(kBytes, 7));
}

// The second mark of `event` lies behind a wait for the second stream: had that stream's wait been
// for this mark instead of the one at its call, both would wait for ever.
TEST_P(BackendTest, WaitKeepsTheMarkOfItsCall) {
  const Stream first = backend_->create_stream("first"), second = backend_->create_stream("second");
  const Event event = backend_->create_event("event"), answer = backend_->create_event("answer");
  const DeviceBuffer device(*backend_, kBytes), other(*backend_, kBytes);
  const HostBuffer source = host(pattern(kBytes, 1)), target = host();
  alarm(60);  // ends the process: a failure rather than a hang
  up(device, source, first);
  backend_->record(event, first);
  // Keep the second stream busy, so that it comes to its wait after the mark was moved.
  for (int i = 0; i < 8; ++i) down(target, other, second);
  backend_->wait(second, event);
  backend_->record(answer, second);
  backend_->wait(first, answer);
  backend_->record(event, first);
  backend_->synchronize(event.view());
  alarm(0);
  EXPECT_TRUE(backend_->reached(event));
  EXPECT_TRUE(backend_->reached(answer));
}

TEST_P(BackendTest, UnrecordedEventCountsAsComplete) {
  const Stream stream = backend_->create_stream("stream");
  const Event event = backend_->create_event("never");
  EXPECT_TRUE(backend_->reached(event));
  backend_->synchronize(event.view());
  backend_->wait(stream, event);
  backend_->wait(StreamView{}, event);
  backend_->synchronize(stream.view());
  EXPECT_EQ(backend_->time_ns(event), 0);
}

TEST_P(BackendTest, DefaultStreamTakesPartInTheOrder) {
  const Stream stream = backend_->create_stream("stream");
  const Event uploaded = backend_->create_event("uploaded"), copied = backend_->create_event("copied");
  const DeviceBuffer device(*backend_, kBytes);
  const HostBuffer source = host(pattern(kBytes, 1)), next = host(pattern(kBytes, 2));
  const HostBuffer target = host(), last = host();
  up(device, source, StreamView{});
  backend_->record(uploaded, StreamView{});
  backend_->wait(stream, uploaded);
  down(target, device, stream);
  backend_->record(copied, stream);
  backend_->wait(StreamView{}, copied);
  up(device, next, StreamView{});
  down(last, device, StreamView{});
  backend_->synchronize(StreamView{});
  EXPECT_EQ(content(target), pattern(kBytes, 1));
  EXPECT_EQ(content(last), pattern(kBytes, 2));
}

TEST_P(BackendTest, TimeStampsLieInOrderOnTheSteadyClock) {
  // On CUDA the two clocks are held against each other with an error of microseconds.
  const std::int64_t slack_ns = is_cuda() ? 1'000'000 : 0;
  const Stream stream = backend_->create_stream("stream");
  const DeviceBuffer device(*backend_, kBytes);
  const HostBuffer source = host();
  const std::int64_t before = steady_ns();
  std::vector<Event> events;
  for (int i = 0; i < 4; ++i) {
    up(device, source, stream);
    events.push_back(backend_->create_event("stamp"));
    backend_->record(events.back(), stream);
  }
  std::int64_t previous = before - slack_ns;
  for (const Event& event : events) {
    const std::int64_t time = backend_->time_ns(event);
    EXPECT_TRUE(backend_->reached(event));
    EXPECT_GE(time, previous);
    previous = time;
  }
  EXPECT_LE(previous, steady_ns() + slack_ns);
  up(device, source, stream);
  backend_->record(events.front(), stream);
  EXPECT_GE(backend_->time_ns(events.front()), previous) << "recording again moves the time";
}

TEST_P(BackendTest, DestroyingAStreamFinishesItsWork) {
  const DeviceBuffer device(*backend_, kBytes);
  const HostBuffer source = host(pattern(kBytes, 3)), target = host();
  {
    const Stream stream = backend_->create_stream("short-lived");
    for (int i = 0; i < 4; ++i) up(device, source, stream);
    down(target, device, stream);
  }
  EXPECT_EQ(content(target), pattern(kBytes, 3));
}

TEST_P(BackendTest, DestroyedEventStillHoldsBackWhoWaitsForIt) {
  const Stream first = backend_->create_stream("first"), second = backend_->create_stream("second");
  const DeviceBuffer device(*backend_, kBytes);
  for (unsigned round = 0; round < 8; ++round) {
    const HostBuffer source = host(pattern(kBytes, round)), target = host();
    {
      const Event event = backend_->create_event("short-lived");
      up(device, source, first);
      backend_->record(event, first);
      backend_->wait(second, event);
    }
    down(target, device, second);
    backend_->synchronize(second.view());
    EXPECT_EQ(content(target), pattern(kBytes, round));
  }
}

TEST_P(BackendTest, OwnersMove) {
  Stream stream = backend_->create_stream("stream");
  const StreamView view = stream.view();
  Stream taken = std::move(stream);
  EXPECT_EQ(taken.view().handle, view.handle);
  EXPECT_EQ(stream.view().handle, 0u);
  std::optional<Event> event(backend_->create_event("event"));
  Event kept = std::move(*event);
  event.reset();
  backend_->record(kept, taken);
  backend_->synchronize(kept.view());
  EXPECT_TRUE(backend_->reached(kept));
}

TEST_P(BackendTest, PinLimitCountsWhatIsPinned) {
  const std::unique_ptr<Backend> limited = make(3 * 4096);
  const HostBuffer first(*backend_, pool_, 2 * 4096, false), second(*backend_, pool_, 2 * 4096, false);
  EXPECT_TRUE(limited->pin(first.data(), first.bytes()));
  EXPECT_FALSE(limited->pin(second.data(), second.bytes()));
  EXPECT_TRUE(limited->pin(second.data(), 4096)) << "a refusal takes nothing";
  limited->unpin(second.data(), 4096);
  limited->unpin(first.data(), first.bytes());
  EXPECT_TRUE(limited->pin(second.data(), second.bytes()));
  limited->unpin(second.data(), second.bytes());
}

TEST_P(BackendTest, PoisonIsOfTheHostBackend) {
  const DeviceBuffer device(*backend_, kBytes);
  const HostBuffer source = host(pattern(kBytes, 5)), target = host();
  up(device, source, StreamView{});
  backend_->synchronize(StreamView{});
  backend_->poison(device.get(), kBytes - 1);
  down(target, device, StreamView{});
  backend_->synchronize(StreamView{});
  Bytes expected = pattern(kBytes, 5);
  if (!is_cuda()) std::fill(expected.begin(), expected.end() - 1, 0xFF);
  EXPECT_EQ(content(target), expected);
}

TEST_P(BackendTest, ThreadsShareABackend) {
  std::vector<HostBuffer> sources, targets;
  for (unsigned i = 0; i < 4; ++i) {
    sources.push_back(host(pattern(kBytes, i)));
    targets.push_back(host());
  }
  const Stream shared = backend_->create_stream("shared");
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const Stream own = backend_->create_stream("own");
      const Event event = backend_->create_event("own");
      const DeviceBuffer device(*backend_, kBytes);
      up(device, sources[i], shared);
      backend_->record(event, shared);
      backend_->wait(own, event);
      down(targets[i], device, own);
      backend_->random_delay();
      backend_->record(event, own);
      EXPECT_GT(backend_->time_ns(event), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (unsigned i = 0; i < 4; ++i) EXPECT_EQ(content(targets[i]), pattern(kBytes, i));
}

// Half a gibibyte is registered at once; a copy does not care where one piece ends.
TEST(CudaBackend, CopiesAcrossPinnedPieces) {
  if (cuda_device_count() == 0) GTEST_SKIP() << cuda_unavailable_reason();
  const auto backend = make_cuda_backend(0, {});
  ThreadPool pool(2);
  constexpr std::size_t kPiece = std::size_t{512} << 20;
  const HostBuffer buffer(*backend, pool, kPiece + kBytes, true);
  ASSERT_TRUE(buffer.pinned());
  const Bytes source = pattern(kBytes, 1);
  std::byte* const source_data = buffer.data() + kPiece - kBytes / 2;
  std::memcpy(source_data, source.data(), kBytes);
  const HostBuffer target(*backend, pool, kBytes, true);
  const DeviceBuffer device(*backend, kBytes);
  const Stream stream = backend->create_stream("stream");
  backend->copy(device.get(), source_data, kBytes, CopyKind::kHostToDevice, stream);
  backend->copy(target.data(), device.get(), kBytes, CopyKind::kDeviceToHost, stream);
  backend->synchronize(stream.view());
  EXPECT_EQ(std::memcmp(target.data(), source.data(), kBytes), 0);
}

TEST(CudaBackend, CountAndReasonAgree) {
  EXPECT_EQ(cuda_device_count() == 0, !cuda_unavailable_reason().empty());
  if (cuda_device_count() > 0) {
    EXPECT_THROW(make_cuda_backend(-1, {}), CallerError);
    EXPECT_THROW(make_cuda_backend(cuda_device_count(), {}), CallerError);
    return;
  }
  try {
    make_cuda_backend(0, {});
    FAIL() << "no device, but a backend";
  } catch (const OutsideError& error) {
    EXPECT_NE(std::string(error.what()).find(cuda_unavailable_reason()), std::string::npos);
  }
}

}  // namespace
}  // namespace megatrain
