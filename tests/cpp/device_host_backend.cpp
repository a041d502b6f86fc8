// What only the host backend has: threads with names, immediate work on handle 0, seeded delays.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <set>
#include <vector>

#include "device/backend.h"
#include "device/host_stream.h"
#include "device/random_delay.h"

namespace megatrain {
namespace {

std::set<std::string> thread_names() {
  std::set<std::string> names;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "comm");
    std::string name;
    if (std::getline(file, name)) names.insert(name);
  }
  return names;
}

TEST(HostStream, RunsTasksInOrder) {
  std::vector<int> order;
  {
    HostStream stream("order");
    for (int i = 0; i < 100; ++i) stream.push([&order, i] { order.push_back(i); });
  }
  std::vector<int> expected;
  for (int i = 0; i < 100; ++i) expected.push_back(i);
  EXPECT_EQ(order, expected);
}

TEST(HostStream, MarkIsReachedAfterWhatLiesBeforeIt) {
  std::promise<void> gate;
  HostStream stream("gated");
  stream.push([opened = gate.get_future().share()] { opened.wait(); });
  const std::shared_ptr<Mark> mark = stream.push_mark();
  EXPECT_FALSE(mark->reached());
  gate.set_value();
  mark->wait();
  EXPECT_TRUE(mark->reached());
}

TEST(HostStream, ThreadsCarryTheStreamsName) {
  const auto backend = make_host_backend({});
  const Stream plain = backend->create_stream("mt-h2d");
  const Stream longer = backend->create_stream("a-name-of-20-letters");
  const std::set<std::string> names = thread_names();
  EXPECT_TRUE(names.contains("mt-h2d"));
  EXPECT_TRUE(names.contains("a-name-of-20-le")) << "the kernel keeps 15 characters";
}

TEST(HostBackend, DefaultStreamIsTheCaller) {
  const auto backend = make_host_backend({.max_delay_us = 500, .seed = 3});
  const Stream stream = backend->create_stream("stream");
  const Event slow = backend->create_event("slow"), own = backend->create_event("own");
  std::vector<int> source{1, 2, 3}, device(3), target(3);
  constexpr std::size_t kSize = 3 * sizeof(int);
  backend->copy(device.data(), source.data(), kSize, CopyKind::kHostToDevice, StreamView{});
  EXPECT_EQ(device, source) << "a copy is over when the call returns";
  for (int i = 0; i < 10; ++i) {
    backend->copy(target.data(), device.data(), kSize, CopyKind::kDeviceToHost, stream);
  }
  backend->record(slow, stream);
  backend->record(own, StreamView{});
  EXPECT_TRUE(backend->reached(own)) << "recording is immediate";
  backend->wait(StreamView{}, slow);
  EXPECT_TRUE(backend->reached(slow)) << "waiting blocks";
  EXPECT_EQ(target, source);
}

TEST(HostBackend, PoisonIsOffUnlessAskedFor) {
  std::vector<int> memory{1, 2, 3};
  make_host_backend({})->poison(memory.data(), 3 * sizeof(int));
  EXPECT_EQ(memory, (std::vector<int>{1, 2, 3}));
  make_host_backend({.poison = true})->poison(memory.data(), 2 * sizeof(int));
  EXPECT_EQ(memory, (std::vector<int>{-1, -1, 3}));
}

TEST(RandomDelay, IsBoundedAndReachesBothEnds) {
  std::set<std::int64_t> seen;
  for (std::uint64_t i = 0; i < 200; ++i) seen.insert(delay_us(1, 2, i, 4));
  EXPECT_EQ(seen, (std::set<std::int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(delay_us(1, 2, 3, 0), 0);
}

TEST(RandomDelay, DependsOnSeedStreamAndSequenceOnly) {
  const auto draw = [](std::uint64_t seed, std::uint64_t stream) {
    std::vector<std::int64_t> delays;
    for (std::uint64_t i = 0; i < 32; ++i) delays.push_back(delay_us(seed, stream, i, 1000));
    return delays;
  };
  EXPECT_EQ(draw(1, 2), draw(1, 2));
  EXPECT_NE(draw(1, 2), draw(1, 3));
  EXPECT_NE(draw(1, 2), draw(2, 2));
  EXPECT_NE(draw(1, 2), draw(2, 1));
}

}  // namespace
}  // namespace megatrain
