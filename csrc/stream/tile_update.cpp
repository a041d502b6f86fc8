#include "stream/tile_update.h"

#include <atomic>
#include <cmath>
#include <string>
#include <unordered_set>

#include "base/error.h"
#include "tiles/share.h"

namespace megatrain {
namespace {

constexpr std::int64_t kSplitBytes = 26;  // high, low, m and v read and written; gradient read
constexpr std::int64_t kFloatBytes = 28;  // weight, m and v read and written; gradient read

struct Sections {
  explicit Sections(const TileStore& store, int tile)
      : weights(store.section(tile, Section::kWeights).data),
        lows(store.section(tile, Section::kMasterLow).data),
        gradients(store.section(tile, Section::kGradients).data),
        exp_avg(reinterpret_cast<float*>(store.section(tile, Section::kExpAvg).data)),
        exp_avg_sq(reinterpret_cast<float*>(store.section(tile, Section::kExpAvgSq).data)) {}
  std::byte* weights;
  std::byte* lows;
  std::byte* gradients;
  float* exp_avg;
  float* exp_avg_sq;
};

bool update_range(Isa isa, TileFormat format, const AdamWStep& step, const Sections& s, ElementRange range) {
  const std::int64_t at = range.begin;
  if (format == TileFormat::kFp32) {
    const AdamWFloatSpan span{reinterpret_cast<float*>(s.weights) + at,
                              reinterpret_cast<const float*>(s.gradients) + at, s.exp_avg + at,
                              s.exp_avg_sq + at, range.size()};
    return adamw(isa, step, span);
  }
  const AdamWSplitSpan span{reinterpret_cast<std::uint16_t*>(s.weights) + at,
                            reinterpret_cast<std::int16_t*>(s.lows) + at,
                            reinterpret_cast<const std::uint16_t*>(s.gradients) + at,
                            s.exp_avg + at,
                            s.exp_avg_sq + at,
                            range.size()};
  return adamw(isa, step, span);
}

bool all_finite(TileFormat format, const std::byte* weights, ElementRange range) {
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    if (format == TileFormat::kFp32) {
      if (!std::isfinite(reinterpret_cast<const float*>(weights)[i])) return false;
    } else if ((reinterpret_cast<const std::uint16_t*>(weights)[i] & 0x7f80) == 0x7f80) {
      return false;
    }
  }
  return true;
}

void check_fraction(const char* name, double value, double below, const std::string& where) {
  if (value >= 0 && value < below) return;
  throw CallerError(std::string(name) + " is " + std::to_string(value) + " for " + where +
                    "; it must be at least 0 and less than " + std::to_string(below));
}

}  // namespace

void check_updates(const TileLayout& layout, int tile, const std::vector<ParameterUpdate>& updates) {
  std::unordered_set<int> seen;
  for (const ParameterUpdate& update : updates) {
    const std::string where =
        "parameter " + std::to_string(update.parameter) + " of tile " + std::to_string(tile);
    if (!layout.parameter(update.parameter).trainable) throw CallerError(where + " is frozen");
    if (!seen.insert(update.parameter).second) throw CallerError(where + " is listed twice in one update");
    if (update.step.step < 1) {
      throw CallerError("step is " + std::to_string(update.step.step) + " for " + where +
                        "; steps count from 1");
    }
    check_fraction("beta1", update.step.beta1, 1, where);
    check_fraction("beta2", update.step.beta2, 1, where);
  }
}

std::int64_t update_tile(TileStore& store, int tile, const std::vector<ParameterUpdate>& updates) {
  const TileLayout& layout = store.layout(tile);
  const TileFormat format = layout.format();
  const Sections sections(store, tile);

  // All parameters end to end, each rounded up to the alignment, so that no cut between two workers
  // falls inside a cache line.
  struct Piece {
    std::int64_t at;  // in the flattened order
    ElementRange range;
    const ParameterUpdate* update;
  };
  std::vector<Piece> pieces;
  std::int64_t flat = 0, elements = 0;
  for (const ParameterUpdate& update : updates) {
    const ElementRange range = intersect(layout.range(update.parameter), layout.owned());
    if (range.empty()) continue;
    pieces.push_back({flat, range, &update});
    const std::int64_t unit = alignment_elements(format);
    flat += (range.size() + unit - 1) / unit * unit;
    elements += range.size();
  }
  if (pieces.empty()) return 0;

  std::atomic<bool> finite{true};
  store.run([&](unsigned worker, unsigned workers) {
    const ElementRange mine =
        share_of(flat, page_elements(format), static_cast<int>(worker), static_cast<int>(workers));
    for (const Piece& piece : pieces) {
      const ElementRange part = intersect({piece.at, piece.at + piece.range.size()}, mine);
      if (part.empty()) continue;
      const std::int64_t shift = piece.range.begin - piece.at;
      if (!update_range(store.isa(), format, piece.update->step, sections,
                        {part.begin + shift, part.end + shift})) {
        finite = false;
      }
    }
  });
  if (!finite) {
    for (const Piece& piece : pieces) {
      if (all_finite(format, sections.weights, piece.range)) continue;
      throw OutsideError("the update made a weight infinite or NaN: parameter " +
                         std::to_string(piece.update->parameter) + " of tile " + std::to_string(tile) +
                         ", step " + std::to_string(piece.update->step.step));
    }
    throw OutsideError("the update made a weight of tile " + std::to_string(tile) + " infinite or NaN");
  }
  return elements * (format == TileFormat::kFp32 ? kFloatBytes : kSplitBytes);
}

}  // namespace megatrain
