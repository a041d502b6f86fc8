// A GPU with the buffers that copies go between, ways of copying, and the check that bytes arrive.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/thread_pool.h"
#include "copy_runner.h"
#include "cuda_tools.h"
#include "device/host_memory.h"

namespace megatrain::bench {

// Both sources hold the same pattern, of which no two words are equal: a piece that lands in the wrong
// place shows.
struct Station {
  // Throws OutsideError where the machine refuses to pin the buffers.
  Station(std::shared_ptr<Backend> gpu, ThreadPool& pool, std::size_t bytes);

  Lane up(std::vector<Piece> pieces) {
    return {CopyKind::kHostToDevice, source.data(), device_target.data(), std::move(pieces)};
  }
  Lane down(std::vector<Piece> pieces) {
    return {CopyKind::kDeviceToHost, target.data(), device_source.data(), std::move(pieces)};
  }

  CopyRunner runner;
  HostBuffer source, target;
  DeviceMemory device_target, device_source;
};

// `count` pieces of `bytes`, one behind the other.
std::vector<Piece> equal_pieces(std::size_t bytes, std::size_t count);

// A way of copying, in both directions.
struct Case {
  std::string label;
  Lane up, down;
  bool held = true;  // pageable memory cannot be: its copies block the caller
};

// Runs a case on cleared targets and holds what arrived against the pattern.
class Verifier {
 public:
  explicit Verifier(Station& station) : station_(station) {}
  void check(const Case& tried);                             // throws OutsideError
  std::size_t checked() const noexcept { return checked_; }  // copies so far

 private:
  void compare(const Case& tried, const std::byte* arrived, const std::vector<Piece>& pieces,
               const char* direction) const;
  Station& station_;
  std::size_t checked_ = 0;
};

}  // namespace megatrain::bench
