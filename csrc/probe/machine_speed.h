// What this machine's memory and its link to the device can do, measured in about a second, and the
// number of update threads that follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "device/backend.h"
#include "probe/contest.h"

namespace megatrain {

struct ThreadSpeed {
  unsigned threads = 0;
  double updates_alone = 0;  // parameters a second, in the default format
  Rates beside_copies;
};

struct MachineSpeed {
  double up = 0, down = 0;  // bytes a second, one direction at a time
  double up_together = 0, down_together = 0;
  std::vector<ThreadSpeed> by_threads;
  unsigned recommended_threads = 0;
};

// 1, 2, 3, 4, 6, 8, 12, ... from `least` on, and the last two up to `most`.
std::vector<unsigned> thread_steps(unsigned least, unsigned most);

// The fewest threads whose ring, beside copies, comes within 2 % of the best; 0 of none. Cores that are
// left queue work and prepare data. `rings` are theirs, in the order of `threads`, which ascend.
unsigned recommended_threads(const std::vector<unsigned>& threads, const std::vector<double>& rings);

// Of a size that a few passes fit into the time: 2 Mi a core, 8 to 32 Mi.
std::int64_t probe_parameters();

// What is taken for the cache: what there is, but at most 512 MiB, since the probe has to touch eight times
// as much, and no more than leaves half of the host's available memory alone.
std::size_t probe_cache_bytes(std::size_t cache_bytes, std::size_t available_bytes);

struct ProbeSettings {
  std::int64_t parameters = probe_parameters();  // of a pass
  std::optional<std::size_t> cache_bytes = {};   // of the last level; none: last_level_cache_bytes()
  double seconds = 0.02;                         // of each of its measurements
  int rounds = 2;                                // of which the medians count
};

// Device memory that measure_machine is best given: long copies reach the link's speed, short ones
// divide the time finely.
inline constexpr std::size_t kProbeDeviceBytes = std::size_t{32} << 20;

// `device` is memory of the backend's device, overwritten. Of the host it takes Contest::host_bytes, about
// eight times the cache and at least a pass of updates and device_bytes; MemoryLimitError where that is not
// there.
MachineSpeed measure_machine(Backend& backend, std::byte* device, std::size_t device_bytes,
                             const ProbeSettings& settings);

}  // namespace megatrain
