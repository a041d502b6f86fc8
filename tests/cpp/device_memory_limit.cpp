// Limits are read from files, so each test writes the files of one machine below a root of its own.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "device/host_memory.h"

namespace megatrain {
namespace {

constexpr std::size_t kGiB = std::size_t{1} << 30;

class MemoryLimitTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "megatrain-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    write("proc/meminfo", "MemTotal:       33554432 kB\nMemFree:  1024 kB\nMemAvailable:   16777216 kB\n");
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = std::filesystem::path(root_) / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  void write_v2(const std::string& group, const std::string& max, std::size_t current,
                std::size_t inactive_file = 0) const {
    const std::string folder = "sys/fs/cgroup/" + group;
    write(folder + "/memory.max", max + "\n");
    write(folder + "/memory.current", std::to_string(current) + "\n");
    write(folder + "/memory.stat", "anon 1\ninactive_file " + std::to_string(inactive_file) + "\nfile 2\n");
  }
  void write_v1(const std::string& group, std::size_t limit, std::size_t usage, std::size_t inactive) const {
    const std::string folder = "sys/fs/cgroup/memory/" + group;
    write(folder + "/memory.limit_in_bytes", std::to_string(limit) + "\n");
    write(folder + "/memory.usage_in_bytes", std::to_string(usage) + "\n");
    write(folder + "/memory.stat", "inactive_file 1\ntotal_inactive_file " + std::to_string(inactive) + "\n");
  }
  void expect(std::size_t bytes, const std::string& source, std::size_t override_bytes = 0) const {
    const MemoryLimit limit = host_memory_limit(override_bytes, root_);
    EXPECT_EQ(limit.available_bytes, bytes);
    EXPECT_EQ(limit.source, source);
  }

  std::string root_;
};

TEST_F(MemoryLimitTest, IsMemAvailableWithoutCgroups) { expect(16 * kGiB, "MemAvailable"); }

TEST_F(MemoryLimitTest, OverrideReplacesMemAvailable) {
  expect(24 * kGiB, "host_memory", 24 * kGiB);
  expect(kGiB, "host_memory", kGiB);
  write("proc/meminfo", "");
  expect(24 * kGiB, "host_memory", 24 * kGiB);
  EXPECT_THROW(host_memory_limit(0, root_), OutsideError);
}

TEST_F(MemoryLimitTest, V2SubtractsUseButNotReclaimableCache) {
  write("proc/self/cgroup", "0::/job\n");
  write_v2("job", std::to_string(8 * kGiB), 5 * kGiB, 2 * kGiB);
  expect(5 * kGiB, "cgroup v2 memory.max");
  expect(5 * kGiB, "cgroup v2 memory.max", 64 * kGiB);
  expect(4 * kGiB, "host_memory", 4 * kGiB);
}

TEST_F(MemoryLimitTest, V2LooksAtEveryAncestor) {
  write("proc/self/cgroup", "0::/slice/pod/job\n");
  write_v2("slice", std::to_string(10 * kGiB), kGiB);
  write_v2("slice/pod", std::to_string(4 * kGiB), kGiB);
  write_v2("slice/pod/job", "max", 0);
  expect(3 * kGiB, "cgroup v2 memory.max");
  write_v2("slice", std::to_string(10 * kGiB), 8 * kGiB);
  expect(2 * kGiB, "cgroup v2 memory.max");
}

TEST_F(MemoryLimitTest, V2WithoutLimitsIsMemAvailable) {
  write("proc/self/cgroup", "0::/job\n");
  write_v2("job", "max", kGiB);
  expect(16 * kGiB, "MemAvailable");
  write_v2("job", "18446744073709551615", kGiB);
  expect(16 * kGiB, "MemAvailable");
}

TEST_F(MemoryLimitTest, ContainerSeesItsGroupAtTheMountRoot) {
  write_v2("", std::to_string(4 * kGiB), kGiB);
  write("sys/elsewhere/memory.max", "1\n");  // not a cgroup: outside the mount
  for (const char* path : {"/", "/kubepods/pod1/not-here", "/../../elsewhere"}) {
    write("proc/self/cgroup", "0::" + std::string(path) + "\n");
    expect(3 * kGiB, "cgroup v2 memory.max");
  }
}

TEST_F(MemoryLimitTest, V1LooksAtTheMemoryController) {
  write("proc/self/cgroup", "5:cpu,cpuacct:/other\n4:hugetlb,memory:/docker/job\n0::/\n");
  write_v1("docker/job", 6 * kGiB, 5 * kGiB, kGiB);
  write_v1("docker", 0x7FFFFFFFFFFFF000, 7 * kGiB, 0);
  write_v1("other", kGiB, 0, 0);
  expect(2 * kGiB, "cgroup v1 memory.limit_in_bytes");
  write_v1("docker", 6 * kGiB, 5 * kGiB, 0);
  expect(kGiB, "cgroup v1 memory.limit_in_bytes");
}

TEST_F(MemoryLimitTest, V1ContainerSeesItsGroupAtTheMountRoot) {
  write("proc/self/cgroup", "4:memory:/docker/0123\n");
  write_v1("", 4 * kGiB, kGiB, 0);
  expect(3 * kGiB, "cgroup v1 memory.limit_in_bytes");
}

TEST_F(MemoryLimitTest, V2BesideV1) {
  write("proc/self/cgroup", "4:cpu:/\n0::/job\n");
  write_v2("unified/job", std::to_string(2 * kGiB), kGiB);
  expect(kGiB, "cgroup v2 memory.max");
}

TEST_F(MemoryLimitTest, UseAboveTheLimitLeavesNothing) {
  write("proc/self/cgroup", "0::/job\n");
  write_v2("job", std::to_string(2 * kGiB), 3 * kGiB);
  expect(0, "cgroup v2 memory.max");
}

TEST_F(MemoryLimitTest, RefusalSaysBothFiguresAndTheSource) {
  write("proc/self/cgroup", "0::/job\n");
  write_v2("job", std::to_string(4 * kGiB), 0);
  require_host_memory(4 * kGiB, 0, root_);
  try {
    require_host_memory(8 * kGiB, 64 * kGiB, root_);
    FAIL() << "8 GiB into 4";
  } catch (const MemoryLimitError& error) {
    const std::string text = error.what();
    for (const char* part : {"8.00 GiB (8589934592 bytes)", "4.00 GiB (4294967296 bytes)",
                             "cgroup v2 memory.max", "limit of the container"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
    }
  }
}

TEST_F(MemoryLimitTest, RefusalSaysWhatToDo) {
  const auto refusal = [&](std::size_t override_bytes) -> std::string {
    try {
      require_host_memory(32 * kGiB, override_bytes, root_);
    } catch (const MemoryLimitError& error) {
      return error.what();
    }
    return "not refused";
  };
  EXPECT_NE(refusal(0).find("give the true figure as host_memory"), std::string::npos) << refusal(0);
  EXPECT_NE(refusal(kGiB).find("Raise host_memory"), std::string::npos) << refusal(kGiB);
  EXPECT_EQ(refusal(33 * kGiB), "not refused");
}

TEST(MemoryLimit, OfThisMachine) {
  const MemoryLimit limit = host_memory_limit();
  EXPECT_GT(limit.available_bytes, 0u);
  EXPECT_THROW(require_host_memory(SIZE_MAX), MemoryLimitError);
}

}  // namespace
}  // namespace megatrain
