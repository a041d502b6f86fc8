// Static split of a range of elements into equal parts: over ranks and over the threads of a pool.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/span.h"

namespace megatrain {

// Part `part` of `parts`. Every part begins at a multiple of `quantum`; together they cover
// [0, elements) exactly once. The last ones may be short or empty.
inline ElementRange share_of(std::int64_t elements, std::int64_t quantum, int part, int parts) noexcept {
  const std::int64_t quanta = elements / quantum + (elements % quantum != 0);
  const std::int64_t each = (quanta / parts + (quanta % parts != 0)) * quantum;
  const std::int64_t begin = std::min(each * part, elements);
  return {begin, std::min(begin + each, elements)};
}

inline ElementRange intersect(ElementRange a, ElementRange b) noexcept {
  const std::int64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

}  // namespace megatrain
