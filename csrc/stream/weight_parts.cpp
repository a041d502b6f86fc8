#include "stream/weight_parts.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace megatrain {
namespace {

void sort(std::vector<ElementRange>& ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const ElementRange& a, const ElementRange& b) { return a.begin < b.begin; });
}

}  // namespace

WeightParts::WeightParts(const TileLayout& layout, std::vector<std::vector<ElementRange>> parts)
    : parts_(std::move(parts)) {
  std::vector<ElementRange> all;
  for (const auto& part : parts_) {
    for (const ElementRange& range : part) {
      if (!range.empty()) all.push_back(range);
    }
  }
  sort(all);
  std::int64_t next = 0;
  for (const ElementRange& range : all) {
    if (range.begin < next || range.end > layout.weight_elements()) {
      throw CallerError("elements " + std::to_string(range.begin) + " to " + std::to_string(range.end) +
                        " as a part of a tile's weights; it must lie in their " +
                        std::to_string(layout.weight_elements()) + " elements and overlap no other");
    }
    if (range.begin > next) base_.push_back({next, range.begin});
    next = range.end;
  }
  if (next < layout.weight_elements()) base_.push_back({next, layout.weight_elements()});
}

std::vector<ElementRange> WeightParts::ranges(bool base, const std::vector<int>& parts) const {
  std::vector<ElementRange> found;
  if (base) found = base_;
  for (const int part : parts) {
    if (part < 0 || part >= size()) {
      throw CallerError("part " + std::to_string(part) + " of a tile with " + std::to_string(size()) +
                        " parts");
    }
    for (const ElementRange& range : parts_[static_cast<std::size_t>(part)]) {
      if (!range.empty()) found.push_back(range);
    }
  }
  sort(found);
  std::vector<ElementRange> joined;
  for (const ElementRange& range : found) {
    if (!joined.empty() && range.begin <= joined.back().end) {
      joined.back().end = std::max(joined.back().end, range.end);
    } else {
      joined.push_back(range);
    }
  }
  return joined;
}

}  // namespace megatrain
