#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <optional>
#include <sstream>
#include <vector>

#include "base/error.h"
#include "device/host_memory.h"
#include "device/meminfo.h"

namespace megatrain {
namespace {

// cgroup v1 writes "no limit" as the largest page-aligned 63-bit number.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 62;

// The names of one cgroup version's files.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* reclaimable;  // the key in memory.stat, of the group with its descendants
  const char* source;
};
constexpr CgroupFiles kV2{"memory.max", "memory.current", "inactive_file", "cgroup v2 memory.max"};
constexpr CgroupFiles kV1{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                          "cgroup v1 memory.limit_in_bytes"};

// The number in a file that holds just one; nothing for "max" and for a missing file.
std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value;
  if (file >> value) return value;
  return std::nullopt;
}

// The number behind `key` in a file of "key number" lines.
std::optional<std::uint64_t> read_keyed(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string word;
    std::uint64_t value;
    if (words >> word >> value && word == key) return value;
  }
  return std::nullopt;
}

// What a group may still allocate. The file cache counts as used by the group, but the part of it
// that is not in use is given up before the limit bites.
std::optional<std::uint64_t> available_in(const std::string& folder, const CgroupFiles& files) {
  const auto limit = read_number(folder + "/" + files.limit);
  if (!limit || *limit >= kNoLimit) return std::nullopt;
  std::uint64_t used = read_number(folder + "/" + files.usage).value_or(0);
  const std::uint64_t reclaimable = read_keyed(folder + "/memory.stat", files.reclaimable).value_or(0);
  used -= std::min(used, reclaimable);
  return *limit - std::min(*limit, used);
}

// `mount` and every group below it on the way to `path`. A container often sees its own group at the
// mount root while /proc tells the host's path: groups that are not there have no files and do not
// count, and a path that climbs out of the mount leaves only the root.
std::vector<std::string> groups_on_path(const std::string& mount, const std::string& path) {
  std::vector<std::string> folders{mount};
  std::istringstream parts(path);
  for (std::string part; std::getline(parts, part, '/');) {
    if (part == "..") return {mount};
    if (!part.empty()) folders.push_back(folders.back() + "/" + part);
  }
  return folders;
}

// Whether the comma-separated list of a v1 line names the memory controller.
bool names_memory(const std::string& controllers) {
  std::istringstream names(controllers);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "memory") return true;
  }
  return false;
}

void tighten(MemoryLimit& limit, const std::vector<std::string>& folders, const CgroupFiles& files) {
  for (const std::string& folder : folders) {
    const auto available = available_in(folder, files);
    if (available && *available < limit.available_bytes) limit = {*available, files.source};
  }
}

std::string figure(std::size_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f GiB (%zu bytes)", static_cast<double>(bytes) / (1 << 30), bytes);
  return text;
}

std::string advice(const std::string& source) {
  if (source == "host_memory") return "Raise host_memory";
  if (source == "MemAvailable") {
    return "Free memory, or give the true figure as host_memory if this machine shows memory only as it "
           "is touched";
  }
  return "Raise the memory limit of the container or of its cgroup";
}

}  // namespace

MemInfo read_meminfo(const std::string& root) {
  const std::string path = root + "/proc/meminfo";
  const auto available_kib = read_keyed(path, "MemAvailable:");
  const auto total_kib = read_keyed(path, "MemTotal:");
  if (!available_kib || !total_kib) throw OutsideError(path + " has no MemAvailable or no MemTotal");
  return {*available_kib * 1024, *total_kib * 1024};
}

MemoryLimit host_memory_limit(std::size_t override_bytes, const std::string& root) {
  MemoryLimit limit = override_bytes > 0 ? MemoryLimit{override_bytes, "host_memory"}
                                         : MemoryLimit{read_meminfo(root).available_bytes, "MemAvailable"};
  const std::string mounts = root + "/sys/fs/cgroup";
  std::ifstream memberships(root + "/proc/self/cgroup");
  for (std::string line; std::getline(memberships, line);) {
    // "<hierarchy>:<controllers>:<path>"; the v2 hierarchy is 0 and names no controllers.
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      tighten(limit, groups_on_path(mounts, path), kV2);
      // Where v1 and v2 are mounted side by side, v2 is here.
      tighten(limit, groups_on_path(mounts + "/unified", path), kV2);
    } else if (names_memory(controllers)) {
      tighten(limit, groups_on_path(mounts + "/memory", path), kV1);
    }
  }
  return limit;
}

void require_host_memory(std::size_t bytes, std::size_t override_bytes, const std::string& root) {
  const MemoryLimit limit = host_memory_limit(override_bytes, root);
  if (bytes <= limit.available_bytes) return;
  throw MemoryLimitError(figure(bytes) + " of host memory are needed, but " + figure(limit.available_bytes) +
                         " are available according to " + limit.source + ". " + advice(limit.source) +
                         ", or train a smaller model or one with more of its weights frozen.");
}

}  // namespace megatrain
