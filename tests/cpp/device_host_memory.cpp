#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "device/host_memory.h"

namespace megatrain {
namespace {

constexpr std::size_t kBytes = (std::size_t{64} << 20) + 4096;  // not whole huge pages

struct Mapping {
  std::size_t size_bytes = 0;
  std::size_t resident_bytes = 0;
  std::string flags;
};

// The kernel's account of the mapping that `address` lies in.
Mapping mapping_of(const void* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  Mapping mapping;
  bool inside = false;
  std::ifstream file("/proc/self/smaps");
  for (std::string line; std::getline(file, line);) {
    std::uintptr_t begin, end;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2) {
      inside = begin <= wanted && wanted < end;
      continue;
    }
    if (!inside) continue;
    std::istringstream words(line);
    std::string key;
    std::size_t kib = 0;
    words >> key >> kib;
    if (key == "Size:") mapping.size_bytes = kib * 1024;
    if (key == "Rss:") mapping.resident_bytes = kib * 1024;
    if (key == "VmFlags:") mapping.flags = line;
  }
  return mapping;
}

bool mapped(void* address) { return msync(address, 4096, MS_ASYNC) == 0; }

// Runs `child` in a forked process and gives its exit status.
template <class Child>
int in_child(const Child& child) {
  const pid_t process = fork();
  if (process == 0) _exit(child());
  int status = 0;
  if (process < 0 || waitpid(process, &status, 0) != process) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

class HostBufferTest : public ::testing::Test {
 protected:
  ThreadPool pool_{2};
  std::unique_ptr<Backend> backend_ = make_host_backend({.pin_limit_bytes = kBytes});
};

TEST_F(HostBufferTest, IsZeroed) {
  const HostBuffer buffer(*backend_, pool_, kBytes, false);
  EXPECT_EQ(std::count(buffer.data(), buffer.data() + kBytes, std::byte{0}),
            static_cast<std::ptrdiff_t>(kBytes));
}

TEST_F(HostBufferTest, IsResidentAndOfTheExactSize) {
  const HostBuffer buffer(*backend_, pool_, kBytes, false);
  EXPECT_FALSE(mapped(buffer.data() + kBytes)) << "what was mapped to align it is still there";
  EXPECT_EQ(buffer.bytes(), kBytes);
  const Mapping mapping = mapping_of(buffer.data());
  EXPECT_EQ(mapping.size_bytes, kBytes);
  EXPECT_EQ(mapping.resident_bytes, kBytes);
  EXPECT_NE(mapping.flags.find(" dc"), std::string::npos) << "not copied on fork: " << mapping.flags;
}

TEST_F(HostBufferTest, RoundsUpToPages) {
  for (const std::size_t bytes : {1, 4095, 4096, 4097, 2 * 1024 * 1024 - 1, 2 * 1024 * 1024 + 1}) {
    const HostBuffer buffer(*backend_, pool_, bytes, false);
    EXPECT_EQ(buffer.bytes(), (bytes + 4095) / 4096 * 4096);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 4096, 0u);
    std::fill(buffer.data(), buffer.data() + buffer.bytes(), std::byte{1});
  }
}

TEST_F(HostBufferTest, EmptyOneMapsNothing) {
  const HostBuffer buffer(*backend_, pool_, 0, true);
  EXPECT_EQ(buffer.data(), nullptr);
  EXPECT_EQ(buffer.bytes(), 0u);
  EXPECT_FALSE(buffer.pinned());
}

TEST_F(HostBufferTest, PinsWithinTheLimitAndGivesBack) {
  {
    const HostBuffer first(*backend_, pool_, kBytes, true);
    EXPECT_TRUE(first.pinned());
    const HostBuffer second(*backend_, pool_, 4096, true);
    EXPECT_FALSE(second.pinned()) << "refused, and usable all the same";
    second.data()[4095] = std::byte{1};
    const HostBuffer third(*backend_, pool_, 4096, false);
    EXPECT_FALSE(third.pinned());
  }
  EXPECT_TRUE(HostBuffer(*backend_, pool_, kBytes, true).pinned());
}

TEST_F(HostBufferTest, Moves) {
  HostBuffer first(*backend_, pool_, 8192, true);
  std::byte* const data = first.data();
  data[0] = std::byte{7};
  HostBuffer second(std::move(first));
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(first.bytes(), 0u);
  EXPECT_FALSE(first.pinned());
  EXPECT_EQ(second.data(), data);
  EXPECT_EQ(second.bytes(), 8192u);
  EXPECT_TRUE(second.pinned());

  HostBuffer third(*backend_, pool_, 4096, true);
  std::byte* const replaced = third.data();
  third = std::move(second);
  EXPECT_FALSE(mapped(replaced));
  EXPECT_EQ(third.data(), data);
  EXPECT_EQ(third.data()[0], std::byte{7});
  third = HostBuffer();
  EXPECT_FALSE(mapped(data));
  EXPECT_TRUE(HostBuffer(*backend_, pool_, kBytes, true).pinned()) << "all of the pin limit came back";
}

TEST_F(HostBufferTest, IsNotInheritedByFork) {
  const HostBuffer buffer(*backend_, pool_, kBytes, false);
  std::vector<unsigned char> resident(kBytes / 4096);
  ASSERT_EQ(mincore(buffer.data(), kBytes, resident.data()), 0);
  EXPECT_EQ(in_child([&] {
              for (std::size_t i = 0; i < kBytes; i += 4096) {
                if (mapped(buffer.data() + i) || errno != ENOMEM) return 1;
              }
              return 0;
            }),
            0);
}

// A child may have mapped something of its own where the buffer was.
TEST_F(HostBufferTest, ChildDoesNotUnmapWhatIsNotItsOwn) {
  HostBuffer buffer(*backend_, pool_, 4096, true);
  EXPECT_EQ(in_child([&] {
              void* const own = mmap(buffer.data(), 4096, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
              if (own != buffer.data()) return 1;
              buffer = HostBuffer();
              return mapped(own) ? 0 : 2;
            }),
            0);
  EXPECT_TRUE(mapped(buffer.data()));
}

TEST_F(HostBufferTest, RefusalSaysTheBytes) {
  constexpr std::size_t kTooMuch = std::size_t{1} << 50;
  try {
    const HostBuffer buffer(*backend_, pool_, kTooMuch, false);
    FAIL() << "mapped a pebibyte";
  } catch (const OutsideError& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(kTooMuch)), std::string::npos) << error.what();
  }
  EXPECT_THROW(HostBuffer(*backend_, pool_, SIZE_MAX, false), OutsideError);
}

}  // namespace
}  // namespace megatrain
