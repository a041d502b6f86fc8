// Which elements of a tile's weights go up together where they do not all: the base, which every copy
// up has, and numbered parts, each of them apart (an expert's share of the experts' tensors). Pure
// arithmetic, immutable; any thread may read it.
#pragma once

#include <vector>

#include "tiles/tile_layout.h"

namespace megatrain {

class WeightParts {
 public:
  // `parts`: the elements of each, ranges of the weights section. CallerError for a range that is not
  // in it or that overlaps another.
  WeightParts(const TileLayout& layout, std::vector<std::vector<ElementRange>> parts);

  int size() const noexcept { return static_cast<int>(parts_.size()); }
  // The ranges of these parts, with those of the base if asked for: in order, adjoining ones as one.
  // CallerError for a part that there is not.
  std::vector<ElementRange> ranges(bool base, const std::vector<int>& parts) const;

 private:
  std::vector<std::vector<ElementRange>> parts_;
  std::vector<ElementRange> base_;
};

}  // namespace megatrain
