// Half-open ranges of elements, and the part of one that a rank owns.
#pragma once

#include <cstdint>

namespace megatrain {

struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const noexcept { return end - begin; }
  bool empty() const noexcept { return end <= begin; }
};

// Which part of every section this process owns: rank r of `ranks` owns the r-th part.
struct Shard {
  int rank = 0;
  int ranks = 1;
};

}  // namespace megatrain
