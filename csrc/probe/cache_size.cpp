#include "probe/cache_size.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <system_error>
#include <vector>

namespace megatrain {
namespace {

namespace fs = std::filesystem;

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "49152K"; 0 for anything else.
std::size_t size_of(const std::string& text) {
  std::size_t digits = 0, bytes = 0;
  for (; digits < text.size() && text[digits] >= '0' && text[digits] <= '9'; ++digits) {
    bytes = bytes * 10 + static_cast<std::size_t>(text[digits] - '0');
  }
  const std::string unit = text.substr(digits);
  if (unit.empty()) return bytes;
  if (unit == "K") return bytes << 10;
  if (unit == "M") return bytes << 20;
  if (unit == "G") return bytes << 30;
  return 0;
}

// Folders in `folder` whose names are `prefix` and a number.
std::vector<fs::path> numbered(const fs::path& folder, const std::string& prefix) {
  std::vector<fs::path> found;
  std::error_code missing;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, missing)) {
    const std::string name = entry.path().filename();
    if (name.rfind(prefix, 0) != 0 || name.size() == prefix.size()) continue;
    if (name.find_first_not_of("0123456789", prefix.size()) == std::string::npos) {
      found.push_back(entry.path());
    }
  }
  return found;
}

}  // namespace

std::optional<std::size_t> listed_cache_bytes(const std::string& folder) {
  std::size_t last = 0, bytes = 0;
  std::set<std::string> seen;  // CPUs that share a cache of the last level
  for (const fs::path& cpu : numbered(folder, "cpu")) {
    for (const fs::path& cache : numbered(cpu / "cache", "index")) {
      const std::size_t level = size_of(first_line(cache / "level"));
      const std::size_t size = size_of(first_line(cache / "size"));
      if (level < last || size == 0 || first_line(cache / "type") == "Instruction") continue;
      if (level > last) {
        last = level;
        bytes = 0;
        seen.clear();
      }
      if (seen.insert(first_line(cache / "shared_cpu_list")).second) bytes += size;
    }
  }
  return bytes > 0 ? std::optional(bytes) : std::nullopt;
}

std::size_t last_level_cache_bytes() {
  if (const auto listed = listed_cache_bytes("/sys/devices/system/cpu")) return *listed;
#ifdef _SC_LEVEL3_CACHE_SIZE
  if (const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE); bytes > 0) return static_cast<std::size_t>(bytes);
#endif
  return kDefaultCacheBytes;
}

}  // namespace megatrain
