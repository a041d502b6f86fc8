// How much of the host's memory its processors' caches can hold: what a measurement of memory must
// exceed. Any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace megatrain {

// Bytes of all caches of the last level together, by a folder like /sys/devices/system/cpu; nothing where
// it names no cache.
std::optional<std::size_t> listed_cache_bytes(const std::string& folder);

// Taken where nobody says: as much as processors of servers have.
inline constexpr std::size_t kDefaultCacheBytes = std::size_t{128} << 20;

// Of this machine, by /sys/devices/system/cpu, else by sysconf, which knows one cache only, else
// kDefaultCacheBytes.
std::size_t last_level_cache_bytes();

}  // namespace megatrain
