// Which host ranges are registered as one piece: a single copy must not span two registrations. Any
// thread may call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <shared_mutex>

namespace megatrain {

class PinnedPieces {
 public:
  void add(const void* piece, std::size_t bytes) {
    const std::unique_lock lock(mutex_);
    ends_[address(piece)] = address(piece) + bytes;
  }
  void remove(const void* piece) {
    const std::unique_lock lock(mutex_);
    ends_.erase(address(piece));
  }
  // How many of the `bytes` from `host` on one copy may take: up to the end of the piece that holds
  // `host`, all of them outside of every piece.
  std::size_t in_one_piece(const void* host, std::size_t bytes) const {
    const std::shared_lock lock(mutex_);
    auto after = ends_.upper_bound(address(host));
    if (after == ends_.begin()) return bytes;
    const std::uintptr_t end = std::prev(after)->second;
    return end > address(host) ? std::min<std::size_t>(bytes, end - address(host)) : bytes;
  }

 private:
  static std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
  mutable std::shared_mutex mutex_;
  std::map<std::uintptr_t, std::uintptr_t> ends_;  // by begin
};

}  // namespace megatrain
