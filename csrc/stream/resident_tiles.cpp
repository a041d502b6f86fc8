#include "stream/resident_tiles.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "stream/update_span.h"

namespace megatrain {

namespace {
constexpr std::size_t kPageBytes = 4096;  // what the smallest allocation takes
constexpr std::size_t kFlagsInPage = kPageBytes / sizeof(int);
constexpr std::int64_t kDeviceAlignment = 8;  // elements that a thread of the kernels takes at once
}  // namespace

ResidentTiles::ResidentTiles(const EngineParts& parts)
    : parts_(parts), backend_(parts.store.backend()), stream_(backend_.create_stream("mt-resident")) {}

void ResidentTiles::synchronize() {
  backend_.synchronize(stream_);
  for (const auto& [tile, entry] : tiles_) {
    if (entry.changed) backend_.synchronize(*entry.changed);  // its flag lands in memory of this object
  }
}

ResidentTiles::Tile& ResidentTiles::tile_at(int tile) {
  const auto found = tiles_.find(tile);
  if (found == tiles_.end()) throw CallerError("tile " + std::to_string(tile) + " is not resident");
  return found->second;
}

void ResidentTiles::add(int tile, std::byte* device, int* non_finite) {
  const TileLayout& layout = parts_.store.layout(tile);
  if (has(tile)) throw CallerError("tile " + std::to_string(tile) + " is resident already");
  if (layout.shard().ranks != 1) {
    throw CallerError("tile " + std::to_string(tile) + " is sharded; only whole tiles can be resident");
  }
  const std::size_t flag = tiles_.size();  // tiles leave all at once, so this one is free
  if (flag / kFlagsInPage == flags_.size()) flags_.push_back(parts_.store.allocate(kPageBytes));
  Tile entry;
  entry.device = device;
  entry.non_finite = non_finite;
  entry.seen_non_finite = flags_[flag / kFlagsInPage].data() + flag % kFlagsInPage * sizeof(int);
  tiles_.emplace(tile, entry);
}

void ResidentTiles::clear() {
  write_back();
  for (auto& [tile, entry] : tiles_) std::memset(entry.seen_non_finite, 0, sizeof(int));
  tiles_.clear();
}

// Bytes [begin, end) of the tile in one burst.
void ResidentTiles::copy(int tile, const Tile& entry, CopyKind kind, std::size_t begin, std::size_t end) {
  const TileStore::SectionView first = parts_.store.section(tile, Section::kWeights);
  if (begin >= end) return;
  std::byte* const host = first.data + begin;
  std::byte* const device = entry.device + begin;
  const std::size_t bytes = end - begin;
  const SharedEvent started = parts_.events.record(stream_);
  if (kind == CopyKind::kHostToDevice) {
    if (first.pinned) {
      backend_.copy(device, host, bytes, kind, stream_);
    } else {
      parts_.staging_up.copy_up(device, host, bytes, stream_);
    }
  } else if (first.pinned) {
    backend_.copy(host, device, bytes, kind, stream_);
  } else {
    parts_.staging_down.copy_down(host, device, bytes, stream_);
  }
  TraceSpan span;
  span.kind = kind == CopyKind::kHostToDevice ? SpanKind::kCopyUp : SpanKind::kCopyDown;
  span.tile = tile;
  span.step = parts_.step;
  span.bytes = static_cast<std::int64_t>(bytes);
  parts_.trace.add(span, started, parts_.events.record(stream_));
}

void ResidentTiles::use(int tile, StreamView stream) {
  Tile& entry = tile_at(tile);
  check_finite(tile, entry);
  const std::int64_t version = parts_.gate.version(tile);
  if (entry.changed) backend_.wait(stream, *entry.changed);
  if (entry.version == version) return;
  if (entry.ahead) {
    throw CallerError("the host's copy of tile " + std::to_string(tile) +
                      " was edited while the device was ahead of it; look at it first");
  }
  backend_.wait(stream_, *parts_.events.record(stream));  // readers of what is overwritten
  const TileLayout& layout = parts_.store.layout(tile);
  const TileLayout::Place gradients = layout.section(Section::kGradients);
  copy(tile, entry, CopyKind::kHostToDevice, 0, gradients.offset);
  copy(tile, entry, CopyKind::kHostToDevice, gradients.offset + gradients.bytes, layout.bytes());
  const SharedEvent loaded = parts_.events.record(stream_);
  // The host's bytes may be edited again as soon as this returns.
  backend_.synchronize(*loaded);
  entry.version = version;
}

void ResidentTiles::update(int tile, const std::vector<ParameterUpdate>& updates, StreamView stream) {
  const TileLayout& layout = parts_.store.layout(tile);
  check_updates(layout, tile, updates);
  use(tile, stream);
  Tile& entry = tile_at(tile);
  for (const ParameterUpdate& update : updates) {
    const ElementRange range = update.range(layout);
    if (range.empty()) continue;
    const std::int64_t first = range.begin - layout.element_offset(update.parameter);
    if (first % kDeviceAlignment != 0) {
      throw CallerError("an update on the device from element " + std::to_string(first) + " of parameter " +
                        std::to_string(update.parameter) + " of tile " + std::to_string(tile) +
                        "; it must begin at a multiple of " + std::to_string(kDeviceAlignment));
    }
    backend_.update(update.step, update_span(layout, entry.device, range, first), entry.non_finite, stream);
  }
  backend_.copy(entry.seen_non_finite, entry.non_finite, sizeof(int), CopyKind::kDeviceToHost, stream);
  entry.changed = parts_.events.record(stream);
  entry.step = parts_.step;
  entry.ahead = true;
  parts_.gate.mark_edited(tile);  // graphs that were made before must not be walked
  entry.version = parts_.gate.version(tile);
}

void ResidentTiles::check_finite(int tile, const Tile& entry) {
  if (!entry.changed || !backend_.reached(*entry.changed)) return;
  int non_finite = 0;
  std::memcpy(&non_finite, entry.seen_non_finite, sizeof non_finite);
  if (non_finite == 0) return;
  throw OutsideError("the update made a weight infinite or NaN: tile " + std::to_string(tile) +
                     " on the device, step " + std::to_string(entry.step));
}

void ResidentTiles::write_back() {
  for (auto& [tile, entry] : tiles_) {
    if (!entry.ahead) continue;
    if (parts_.keeps(Wait::kResidentUpdated)) backend_.wait(stream_, *entry.changed);
    copy(tile, entry, CopyKind::kDeviceToHost, 0, parts_.store.layout(tile).bytes());
  }
  synchronize();
  for (auto& [tile, entry] : tiles_) {
    entry.ahead = false;
    check_finite(tile, entry);
  }
}

}  // namespace megatrain
