#include "stream/tile_update.h"

#include <atomic>
#include <cmath>
#include <iterator>
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
#include "stream/update_span.h"
#include "tiles/share.h"

namespace megatrain {
namespace {

bool all_finite(TileFormat format, const std::byte* weights, ElementRange range) {
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    if (format.weights == WeightFormat::kFp32) {
      if (!std::isfinite(reinterpret_cast<const float*>(weights)[i])) return false;
    } else if ((reinterpret_cast<const std::uint16_t*>(weights)[i] & 0x7f80) == 0x7f80) {
      return false;
    }
  }
  return true;
}

void check_elements(const TileLayout& layout, const ParameterUpdate& update, const std::string& where) {
  const std::int64_t limit = layout.parameter(update.parameter).elements;
  const std::int64_t begin = update.elements.begin;
  const std::int64_t end = update.elements.end == -1 ? limit : update.elements.end;
  const std::string asked =
      "elements " + std::to_string(begin) + " to " + std::to_string(end) + " of " + where;
  if (begin < 0 || begin > end || end > limit) {
    throw CallerError(asked + ", which has " + std::to_string(limit));
  }
  const auto whole = [&](std::int64_t at) { return at % kMomentBlock == 0 || at == limit; };
  if (layout.format().moments == MomentFormat::kInt8 && !(whole(begin) && whole(end))) {
    throw CallerError(asked + ", whose 8-bit moments are in blocks of " + std::to_string(kMomentBlock));
  }
}

void check_fraction(const char* name, double value, double below, const std::string& where) {
  if (value >= 0 && value < below) return;
  throw CallerError(std::string(name) + " is " + std::to_string(value) + " for " + where +
                    "; it must be at least 0 and less than " + std::to_string(below));
}

}  // namespace

ElementRange ParameterUpdate::range(const TileLayout& layout) const {
  const ElementRange whole = layout.range(parameter);
  return {whole.begin + elements.begin, elements.end == -1 ? whole.end : whole.begin + elements.end};
}

void check_updates(const TileLayout& layout, int tile, const std::vector<ParameterUpdate>& updates) {
  std::map<std::pair<int, std::int64_t>, std::int64_t> seen;  // the ends by parameter and begin
  for (const ParameterUpdate& update : updates) {
    const std::string where =
        "parameter " + std::to_string(update.parameter) + " of tile " + std::to_string(tile);
    if (!layout.parameter(update.parameter).trainable) throw CallerError(where + " is frozen");
    check_elements(layout, update, where);
    const ElementRange range = update.range(layout);
    const auto [entry, added] = seen.try_emplace({update.parameter, range.begin}, range.end);
    const auto next = std::next(entry);
    bool twice = !added || (next != seen.end() && next->first.first == update.parameter &&
                            next->first.second < range.end);
    if (entry != seen.begin()) {
      const auto& [before, end] = *std::prev(entry);
      twice |= before.first == update.parameter && end > range.begin;
    }
    if (twice) throw CallerError(where + " is listed twice in one update");
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
  std::byte* const memory = store.section(tile, Section::kWeights).data;  // the first section

  // All parameters end to end, each rounded up to the alignment, so that no cut between two workers
  // falls inside a cache line or a block of 8-bit moments.
  struct Piece {
    std::int64_t at;  // in the flattened order
    ElementRange range;
    std::int64_t first;  // index of the range's first element in the parameter
    const ParameterUpdate* update;
  };
  std::vector<Piece> pieces;
  std::int64_t flat = 0, bytes = 0;
  for (const ParameterUpdate& update : updates) {
    const ElementRange range = intersect(update.range(layout), layout.owned());
    if (range.empty()) continue;
    pieces.push_back({flat, range, range.begin - layout.element_offset(update.parameter), &update});
    const std::int64_t unit = alignment_elements(format);
    flat += (range.size() + unit - 1) / unit * unit;
    bytes += update_bytes(format.weights, format.moments, range.size(), format.rule);
  }
  if (pieces.empty()) return 0;

  std::atomic<bool> finite{true};
  store.run([&](unsigned worker, unsigned workers) {
    const ElementRange mine =
        share_of(flat, page_elements(format), static_cast<int>(worker), static_cast<int>(workers));
    for (const Piece& piece : pieces) {
      const ElementRange part = intersect({piece.at, piece.at + piece.range.size()}, mine);
      if (part.empty()) continue;
      const std::int64_t skipped = part.begin - piece.at;
      const std::int64_t begin = piece.range.begin + skipped;
      const UpdateSpan span =
          update_span(layout, memory, {begin, begin + part.size()}, piece.first + skipped);
      if (!apply_update(store.isa(), piece.update->step, span)) {
        finite = false;
      }
    }
  });
  if (!finite) {
    for (const Piece& piece : pieces) {
      if (all_finite(format, memory, piece.range)) continue;
      throw OutsideError("the update made a weight infinite or NaN: parameter " +
                         std::to_string(piece.update->parameter) + " of tile " + std::to_string(tile) +
                         ", step " + std::to_string(piece.update->step.step));
    }
    throw OutsideError("the update made a weight of tile " + std::to_string(tile) + " infinite or NaN");
  }
  return bytes;
}

}  // namespace megatrain
