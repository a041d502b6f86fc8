// Counts pinned bytes against a limit, for machines that cap pinning and for tests of the fallback.
// Any thread may call.
#pragma once

#include <atomic>
#include <cstddef>

namespace megatrain {

class PinBudget {
 public:
  explicit PinBudget(std::size_t limit_bytes) noexcept : left_bytes_(limit_bytes) {}

  // False, and nothing taken, when fewer than `bytes` are left.
  bool take(std::size_t bytes) noexcept {
    std::size_t left = left_bytes_.load();
    while (bytes <= left) {
      if (left_bytes_.compare_exchange_weak(left, left - bytes)) return true;
    }
    return false;
  }
  void give_back(std::size_t bytes) noexcept { left_bytes_ += bytes; }

 private:
  std::atomic<std::size_t> left_bytes_;
};

}  // namespace megatrain
