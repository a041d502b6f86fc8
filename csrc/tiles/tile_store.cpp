#include "tiles/tile_store.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "optim/adamw.h"
#include "tiles/share.h"

namespace megatrain {
namespace {

constexpr std::int64_t kScratchElements = 4096;
constexpr std::int64_t kWorthThePool = std::int64_t{1} << 16;  // below, waking threads costs more

// One core is left to the threads that queue work.
unsigned pool_size(unsigned threads) { return threads > 0 ? threads : std::max(1u, usable_cores() - 1); }

bool copy_finite(const float* values, float* weights, std::int64_t count) {
  bool finite = true;
  for (std::int64_t i = 0; i < count; ++i) {
    weights[i] = values[i];
    finite &= std::isfinite(values[i]);
  }
  return finite;
}

}  // namespace

TileStore::TileStore(std::shared_ptr<Backend> backend, const TileStoreOptions& options)
    : backend_(std::move(backend)),
      isa_(select_isa(options.isa)),
      staging_bytes_(options.staging_bytes),
      pool_(pool_size(options.threads)) {
  if (staging_bytes_ < 4096) {
    throw CallerError("staging of " + std::to_string(staging_bytes_) + " bytes; at least 4096 are needed");
  }
}

int TileStore::add(const TileLayout& layout) {
  auto tile = std::make_unique<Tile>(Tile{layout, allocate(layout.bytes()), HostBuffer{}, false});
  std::lock_guard lock(mutex_);
  tiles_.push_back(std::move(tile));
  return static_cast<int>(tiles_.size()) - 1;
}

void TileStore::add_accumulator(int index) {
  if (has_accumulator(index)) return;
  HostBuffer memory = allocate(layout(index).section(Section::kAccumulator).bytes);
  std::lock_guard lock(mutex_);
  Tile& tile = tile_at(index);
  tile.accumulator = std::move(memory);
  tile.has_accumulator = true;
}

bool TileStore::has_accumulator(int tile) const {
  std::lock_guard lock(mutex_);
  return tile_at(tile).has_accumulator;
}

int TileStore::tiles() const {
  std::lock_guard lock(mutex_);
  return static_cast<int>(tiles_.size());
}

TileStore::Tile& TileStore::tile_at(int tile) const {
  if (tile < 0 || tile >= static_cast<int>(tiles_.size())) {
    throw CallerError("tile " + std::to_string(tile) + " of a store with " + std::to_string(tiles_.size()) +
                      " tiles");
  }
  return *tiles_[static_cast<std::size_t>(tile)];
}

const TileLayout& TileStore::layout(int tile) const {
  std::lock_guard lock(mutex_);
  return tile_at(tile).layout;
}

TileStore::SectionView TileStore::section(int index, Section section) const {
  std::lock_guard lock(mutex_);
  const Tile& tile = tile_at(index);
  const TileLayout::Place place = tile.layout.section(section);
  if (section == Section::kAccumulator) {
    if (!tile.has_accumulator) {
      throw CallerError("tile " + std::to_string(index) + " has no accumulator; add one first");
    }
    return {tile.accumulator.data(), place.bytes, tile.accumulator.pinned()};
  }
  return {tile.memory.data() + place.offset, place.bytes, tile.memory.pinned()};
}

bool TileStore::set_master(int tile, int parameter, const float* values) {
  const TileLayout& layout = this->layout(tile);
  const ElementRange whole = layout.range(parameter);
  const bool trainable = layout.parameter(parameter).trainable;
  const ElementRange mine = trainable ? intersect(whole, layout.owned()) : whole;
  values += mine.begin - whole.begin;
  const bool has_low = trainable && layout.format().weights == WeightFormat::kBf16Split;
  std::byte* const weights = section(tile, Section::kWeights).data;
  std::byte* const lows = section(tile, Section::kMasterLow).data;
  std::atomic<bool> finite{true};
  for_parts(mine.size(), [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t at = mine.begin + begin;
    bool ok = true;
    if (layout.format().weights == WeightFormat::kFp32) {
      ok = copy_finite(values + begin, reinterpret_cast<float*>(weights) + at, end - begin);
    } else if (has_low) {
      ok = split_master(values + begin, reinterpret_cast<std::uint16_t*>(weights) + at,
                        reinterpret_cast<std::int16_t*>(lows) + at, end - begin);
    } else {
      std::int16_t dropped[kScratchElements];
      for (std::int64_t i = begin; i < end; i += kScratchElements) {
        const std::int64_t count = std::min(kScratchElements, end - i);
        ok &= split_master(values + i, reinterpret_cast<std::uint16_t*>(weights) + mine.begin + i, dropped,
                           count);
      }
    }
    if (!ok) finite = false;
  });
  return finite;
}

void TileStore::get_master(int tile, int parameter, float* values) {
  const TileLayout& layout = this->layout(tile);
  const ElementRange whole = layout.range(parameter);
  const bool trainable = layout.parameter(parameter).trainable;
  const ElementRange mine = trainable ? intersect(whole, layout.owned()) : whole;
  values += mine.begin - whole.begin;
  const bool has_low = trainable && layout.format().weights == WeightFormat::kBf16Split;
  const std::byte* const weights = section(tile, Section::kWeights).data;
  const std::byte* const lows = section(tile, Section::kMasterLow).data;
  for_parts(mine.size(), [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t at = mine.begin + begin;
    if (layout.format().weights == WeightFormat::kFp32) {
      std::memcpy(values + begin, reinterpret_cast<const float*>(weights) + at,
                  static_cast<std::size_t>(end - begin) * sizeof(float));
    } else if (has_low) {
      join_master(reinterpret_cast<const std::uint16_t*>(weights) + at,
                  reinterpret_cast<const std::int16_t*>(lows) + at, values + begin, end - begin);
    } else {
      const std::int16_t zeros[kScratchElements] = {};
      for (std::int64_t i = begin; i < end; i += kScratchElements) {
        const std::int64_t count = std::min(kScratchElements, end - i);
        join_master(reinterpret_cast<const std::uint16_t*>(weights) + mine.begin + i, zeros, values + i,
                    count);
      }
    }
  });
}

std::size_t TileStore::bytes() const {
  std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& tile : tiles_) sum += tile->memory.bytes() + tile->accumulator.bytes();
  return sum;
}

std::size_t TileStore::pinned_bytes() const {
  std::lock_guard lock(mutex_);
  std::size_t sum = 0;
  for (const auto& tile : tiles_) {
    for (const HostBuffer* buffer : {&tile->memory, &tile->accumulator}) {
      if (buffer->pinned()) sum += buffer->bytes();
    }
  }
  return sum;
}

int TileStore::unpinned_tiles() const {
  std::lock_guard lock(mutex_);
  return static_cast<int>(std::count_if(tiles_.begin(), tiles_.end(), [](const auto& tile) {
    return tile->memory.bytes() > 0 && !tile->memory.pinned();
  }));
}

void TileStore::run(const std::function<void(unsigned, unsigned)>& body) {
  std::lock_guard lock(pool_mutex_);
  pool_.run(body);
}

HostBuffer TileStore::allocate(std::size_t bytes) {
  std::lock_guard lock(pool_mutex_);
  return HostBuffer(*backend_, pool_, bytes, true);
}

void TileStore::for_parts(std::int64_t elements,
                          const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (elements <= 0) return;
  if (elements < kWorthThePool) {
    body(0, elements);
    return;
  }
  run([&](unsigned worker, unsigned workers) {
    const ElementRange part =
        share_of(elements, kScratchElements, static_cast<int>(worker), static_cast<int>(workers));
    if (!part.empty()) body(part.begin, part.end);
  });
}

}  // namespace megatrain
