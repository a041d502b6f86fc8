// The kernel's account of the machine's memory.
#pragma once

#include <cstddef>
#include <string>

namespace megatrain {

struct MemInfo {
  std::size_t available_bytes;  // MemAvailable: free, plus what the kernel can reclaim
  std::size_t total_bytes;
};

// Reads <root>/proc/meminfo; throws OutsideError where it lacks a figure.
MemInfo read_meminfo(const std::string& root);

}  // namespace megatrain
