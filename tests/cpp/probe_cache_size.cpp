// The size of caches is read from files, so each test writes the files of one machine.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "probe/cache_size.h"

namespace megatrain {
namespace {

namespace fs = std::filesystem;

class CacheSize : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "megatrain-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  void write(const std::string& path, const std::string& text) const {
    fs::create_directories((folder_ / path).parent_path());
    std::ofstream(folder_ / path) << text << '\n';
  }
  void cache(int cpu, int index, int level, const std::string& type, const std::string& size,
             const std::string& shared) const {
    const std::string at = "cpu" + std::to_string(cpu) + "/cache/index" + std::to_string(index) + "/";
    write(at + "level", std::to_string(level));
    write(at + "type", type);
    write(at + "size", size);
    write(at + "shared_cpu_list", shared);
  }
  std::optional<std::size_t> listed() const { return listed_cache_bytes(folder_.string()); }

  fs::path folder_;
};

TEST_F(CacheSize, IsThatOfTheLastLevelOnceForAllCpusThatShareIt) {
  for (int cpu = 0; cpu < 12; ++cpu) {
    cache(cpu, 0, 1, "Data", "48K", std::to_string(cpu));
    cache(cpu, 1, 1, "Instruction", "32K", std::to_string(cpu));
    cache(cpu, 2, 2, "Unified", "2048K", std::to_string(cpu));
    cache(cpu, 3, 3, "Unified", "307200K", "0-11");
  }
  EXPECT_EQ(listed(), std::size_t{300} << 20);
}

TEST_F(CacheSize, AddsUpCachesOfSeveralSocketsAndDies) {
  for (int cpu = 0; cpu < 8; ++cpu) cache(cpu, 3, 3, "Unified", "32M", cpu < 4 ? "0-3" : "4-7");
  EXPECT_EQ(listed(), std::size_t{64} << 20);
}

TEST_F(CacheSize, IsOfTheLevelThatIsLastOnThisMachine) {
  cache(0, 0, 1, "Data", "64K", "0");
  cache(0, 2, 2, "Unified", "1024K", "0");
  cache(1, 2, 2, "Unified", "1024K", "1");
  EXPECT_EQ(listed(), std::size_t{2} << 20);
  cache(1, 3, 3, "Unified", "8192K", "1");  // CPU 0 has none of that level
  EXPECT_EQ(listed(), std::size_t{8} << 20);
}

TEST_F(CacheSize, LeavesOutWhatIsNoCpuAndWhatCannotBeRead) {
  EXPECT_EQ(listed(), std::nullopt) << "no CPUs";
  write("cpufreq/boost", "1");
  write("cpu0/cache/uevent", "");
  write("cpu0/cache/index3/level", "3");
  EXPECT_EQ(listed(), std::nullopt) << "no size";
  cache(1, 3, 3, "Unified", "many", "1");
  EXPECT_EQ(listed(), std::nullopt) << "no number";
  cache(2, 1, 1, "Instruction", "32K", "2");
  EXPECT_EQ(listed(), std::nullopt) << "holds no data";
  cache(3, 2, 2, "Unified", "4096", "3");
  EXPECT_EQ(listed(), 4096u);
  EXPECT_EQ(listed_cache_bytes((folder_ / "absent").string()), std::nullopt);
}

TEST(LastLevelCache, OfThisMachineIsSomething) { EXPECT_GE(last_level_cache_bytes(), 1u << 14); }

}  // namespace
}  // namespace megatrain
