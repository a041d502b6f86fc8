#include "stream/prefetcher.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "base/error.h"

namespace megatrain {
namespace {

std::vector<int> set_in(const std::vector<bool>& flags) {
  std::vector<int> indices;
  for (std::size_t i = 0; i < flags.size(); ++i) {
    if (flags[i]) indices.push_back(static_cast<int>(i));
  }
  return indices;
}

}  // namespace

Prefetcher::Prefetcher(const EngineParts& parts)
    : parts_(parts),
      backend_(parts.store.backend()),
      stream_(backend_.create_stream("mt-h2d")),
      parts_stream_(backend_.create_stream("mt-parts")) {
  thread_ = parts_.monitor.start("mt-prefetch", [this] { work(); });
}

Prefetcher::~Prefetcher() { join(); }

void Prefetcher::join() {
  if (thread_.joinable()) thread_.join();
}

void Prefetcher::synchronize() {
  backend_.synchronize(stream_);
  backend_.synchronize(parts_stream_);
}

std::size_t Prefetcher::weight_bytes(int tile) const {
  return parts_.store.layout(tile).section(Section::kWeights).bytes;
}

int Prefetcher::add_slot(std::byte* device, std::size_t bytes, StreamView stream, int only_tile) {
  if (only_tile != -1 && weight_bytes(only_tile) > bytes) {
    throw CallerError("a slot of " + std::to_string(bytes) + " bytes for tile " + std::to_string(only_tile) +
                      " alone, whose weights have " + std::to_string(weight_bytes(only_tile)) + " bytes");
  }
  // Allocators give memory out again in the order of a stream: its last user may still be at work.
  SharedEvent last_use = parts_.events.record(stream);
  const Monitor::Lock lock = parts_.monitor.lock();
  const int index = slots_.add(device, bytes, only_tile);
  slots_[index].released.push_back(std::move(last_use));
  parts_.monitor.notify_locked();
  return index;
}

void Prefetcher::remove_slots() {
  Monitor::Lock lock = parts_.monitor.lock();
  expected_.clear();
  const auto filling = [&] {
    for (int i = 0; i < slots_.size(); ++i) {
      if (slots_[i].filling) return true;
    }
    return false;
  };
  parts_.monitor.wait(lock, [&] { return !filling(); });
  for (int i = 0; i < slots_.size(); ++i) {
    if (slots_[i].uses > 0)
      throw CallerError("slot " + std::to_string(i) + " is in use; it cannot be removed");
  }
  synchronize();
  // Nor may readers be at work: whoever frees the memory need not do so in the order of their streams.
  for (int i = 0; i < slots_.size(); ++i) {
    for (const SharedEvent& reader : slots_[i].released) backend_.synchronize(*reader);
  }
  slots_.clear();
}

void Prefetcher::expect(const std::vector<int>& tiles) {
  for (const int tile : tiles) parts_.store.layout(tile);  // throws for one that does not exist
  const Monitor::Lock lock = parts_.monitor.lock();
  expected_.assign(tiles.begin(), tiles.end());
  held_since_ns_.clear();
  parts_.monitor.notify_locked();
}

void Prefetcher::check_that_it_fits(int tile) const {
  if (slots_.size() == 0) throw CallerError("there are no slots; add one before acquiring a tile");
  const std::size_t largest = slots_.largest_for(tile);
  if (weight_bytes(tile) <= largest) return;
  throw CallerError("the weights of tile " + std::to_string(tile) + " have " +
                    std::to_string(weight_bytes(tile)) + " bytes; the largest slot for them has " +
                    std::to_string(largest));
}

// When every slot that could take the tile is held by an acquisition, only the caller, who is waiting
// here, could release one.
void Prefetcher::check_that_one_is_free(int tile) {
  int fitting = 0;
  for (int i = 0; i < slots_.size(); ++i) {
    if (!slots_.fits(i, tile, weight_bytes(tile))) continue;
    if (slots_[i].uses == 0 || !parts_.keeps(Wait::kSlotFree)) return;
    ++fitting;
  }
  throw CallerError("all " + std::to_string(fitting) +
                    " slots are in use; release one before acquiring tile " + std::to_string(tile));
}

int Prefetcher::acquire(int tile, StreamView stream) {
  weight_bytes(tile);  // throws for a tile that does not exist
  const SharedEvent before = parts_.events.record(stream);
  Monitor::Lock lock = parts_.monitor.lock();
  check_that_it_fits(tile);
  const auto use = std::find(expected_.begin(), expected_.end(), tile);
  if (use != expected_.end()) expected_.erase(expected_.begin(), use + 1);

  int index = slots_.find(tile, version(tile));
  if (index == -1) check_that_one_is_free(tile);
  demanded_ = tile;
  parts_.monitor.notify_locked();  // the sequence moved on, or there is a demand
  parts_.monitor.wait(lock, [&] {
    index = slots_.find(tile, version(tile));
    return index != -1 && !slots_[index].filling;
  });
  demanded_.reset();
  Slot& slot = slots_[index];
  ++slot.uses;
  slot.touched = ++clock_;
  const SharedEvent arrived = slot.arrived;
  const std::int64_t gate_ns = slot.gate_ns;
  lock.unlock();

  if (parts_.keeps(Wait::kSlotArrived)) backend_.wait(stream, *arrived);
  TraceSpan span;
  span.kind = SpanKind::kWait;
  span.tile = tile;
  span.step = parts_.step;
  span.gate_ns = gate_ns;
  parts_.trace.add(span, before, parts_.events.record(stream));
  return index;
}

void Prefetcher::release(int index, StreamView stream) {
  SharedEvent last_read = parts_.events.record(stream);
  const Monitor::Lock lock = parts_.monitor.lock();
  if (index < 0 || index >= slots_.size() || slots_[index].uses == 0) {
    throw CallerError("slot " + std::to_string(index) + " is not in use; it cannot be released");
  }
  Slot& slot = slots_[index];
  slot.released.push_back(std::move(last_read));
  slot.touched = ++clock_;
  if (--slot.uses > 0) return;
  // What nobody will read again becomes NaN, so that a reader who does shows.
  const bool stale = slot.tile == -1 || slot.version != version(slot.tile);
  const bool not_needed = !expected_.empty() && slot.tile != demanded_ &&
                          std::find(expected_.begin(), expected_.end(), slot.tile) == expected_.end();
  if (!slot.filling && (stale || not_needed)) drop(slot);
  parts_.monitor.notify_locked();
}

void Prefetcher::release_all(StreamView stream) {
  const SharedEvent last_read = parts_.events.record(stream);
  const Monitor::Lock lock = parts_.monitor.lock();
  for (int i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.uses == 0) continue;
    slot.released.push_back(last_read);
    slot.touched = ++clock_;
    slot.uses = 0;
  }
  parts_.monitor.notify_locked();
}

void Prefetcher::split(int tile, std::vector<std::vector<ElementRange>> parts) {
  WeightParts made(parts_.store.layout(tile), std::move(parts));
  std::vector<bool> none(static_cast<std::size_t>(made.size()));
  const Monitor::Lock lock = parts_.monitor.lock();
  for (int i = 0; i < slots_.size(); ++i) {
    if (slots_[i].tile != tile) continue;
    throw CallerError("tile " + std::to_string(tile) + " is in slot " + std::to_string(i) +
                      "; it is split before it goes up");
  }
  if (!splits_.try_emplace(tile, Split{std::move(made), std::move(none)}).second) {
    throw CallerError("tile " + std::to_string(tile) + " is split already");
  }
}

const Prefetcher::Split& Prefetcher::split_at(int tile) const {
  const auto found = splits_.find(tile);
  if (found == splits_.end()) throw CallerError("tile " + std::to_string(tile) + " is not split");
  return found->second;
}

void Prefetcher::want(int tile, const std::vector<int>& parts) {
  const Monitor::Lock lock = parts_.monitor.lock();
  split_at(tile).parts.ranges(false, parts);  // throws for one that does not exist
  std::vector<bool>& wanted = splits_.at(tile).wanted;
  wanted.assign(wanted.size(), false);
  for (const int part : parts) wanted[static_cast<std::size_t>(part)] = true;
}

void Prefetcher::bring(int index, const std::vector<int>& parts, StreamView stream) {
  Monitor::Lock lock = parts_.monitor.lock();
  if (index < 0 || index >= slots_.size() || slots_[index].uses == 0) {
    throw CallerError("slot " + std::to_string(index) + " is not in use; nothing can be brought to it");
  }
  Slot& slot = slots_[index];
  const WeightParts& split = split_at(slot.tile).parts;
  split.ranges(false, parts);  // throws for one that does not exist
  std::vector<bool> there = slot.parts;
  std::vector<int> missing;
  for (const int part : parts) {
    if (there[static_cast<std::size_t>(part)]) continue;
    there[static_cast<std::size_t>(part)] = true;
    missing.push_back(part);
  }
  if (missing.empty()) return;
  const int tile = slot.tile;
  const bool current = slot.version == version(tile) && gate_open(tile);
  if (!current || !parts_.gate.begin_read(tile, !parts_.keeps(Wait::kGateUpdate))) {
    throw CallerError("tile " + std::to_string(tile) + " was updated or edited while slot " +
                      std::to_string(index) + " was in use; its parts would be of two versions");
  }
  slot.parts = std::move(there);
  lock.unlock();
  // An acquired slot is not filled again, and only the caller, who is here, changes its parts.
  try {
    const SharedEvent before = parts_.events.record(stream);
    const SharedEvent end = queue_parts(tile, split.ranges(false, missing), slot);
    parts_.gate.read_queued(tile, ReadLane::kParts, end);
    if (parts_.keeps(Wait::kPartArrived)) backend_.wait(stream, *end);
    TraceSpan span;
    span.kind = SpanKind::kWait;
    span.tile = tile;
    span.step = parts_.step;
    parts_.trace.add(span, before, parts_.events.record(stream));
  } catch (...) {
    // The gate still counts a read that will never be queued, and an update would wait for it.
    parts_.monitor.fail(std::current_exception());
    parts_.monitor.rethrow_failure();
  }
}

SharedEvent Prefetcher::queue_parts(int tile, const std::vector<ElementRange>& ranges, const Slot& slot) {
  // The base came when the slot's last readers were done.
  if (parts_.keeps(Wait::kSlotFree)) backend_.wait(parts_stream_, *slot.arrived);
  const SharedEvent begin = parts_.events.record(parts_stream_);
  TraceSpan span;
  span.kind = SpanKind::kCopyUp;
  span.tile = tile;
  span.step = parts_.step;
  span.bytes = static_cast<std::int64_t>(copy_ranges(tile, ranges, slot.device, parts_stream_));
  SharedEvent end = parts_.events.record(parts_stream_);
  parts_.trace.add(span, begin, end);
  return end;
}

void Prefetcher::drop(Slot& slot) {
  if (idle(slot)) backend_.poison(slot.device, slot.bytes);
  slot.tile = -1;
}

// No copy into it and no reader of it is under way.
bool Prefetcher::idle(const Slot& slot) const {
  if (slot.arrived && !backend_.reached(*slot.arrived)) return false;
  return std::all_of(slot.released.begin(), slot.released.end(),
                     [&](const SharedEvent& event) { return backend_.reached(*event); });
}

bool Prefetcher::gate_open(int tile) { return parts_.gate.open(tile) || !parts_.keeps(Wait::kGateUpdate); }

std::optional<Prefetcher::Request> Prefetcher::begin(int tile, int slot) {
  const auto version = parts_.gate.begin_read(tile, !parts_.keeps(Wait::kGateUpdate));
  if (!version) return std::nullopt;
  Request request;
  request.tile = tile;
  request.slot = slot;
  request.version = *version;
  const TileLayout& layout = parts_.store.layout(tile);
  if (const auto split = splits_.find(tile); split != splits_.end()) {
    request.parts = split->second.wanted;
    request.ranges = split->second.parts.ranges(true, set_in(request.parts));
  } else if (parts_.copy_by_parameter) {
    for (int i = 0; i < layout.parameters(); ++i) request.ranges.push_back(layout.range(i));
  } else {
    request.ranges.push_back({0, layout.weight_elements()});
  }
  if (const auto held = held_since_ns_.find(tile); held != held_since_ns_.end()) {
    request.gate_ns = steady_now_ns() - held->second;
    held_since_ns_.erase(held);
  }
  return request;
}

std::optional<Prefetcher::Request> Prefetcher::next_request() {
  NextUse next_use;
  for (std::size_t i = 0; i < expected_.size(); ++i) next_use.try_emplace(expected_[i], i);
  const auto version_of = [this](int tile) { return version(tile); };
  const bool ignore_uses = !parts_.keeps(Wait::kSlotFree);

  std::vector<int> claimed;
  if (demanded_) {
    const int tile = *demanded_;
    const int filled = slots_.find(tile, version(tile));
    // The caller has not woken yet to take it; no guess may replace it in between.
    if (filled != -1) claimed.push_back(filled);
    if (filled == -1) {
      // No guess goes while the caller waits: it could take the slot that the demand needs.
      if (!gate_open(tile)) {
        held_since_ns_.try_emplace(tile, steady_now_ns());
        return std::nullopt;
      }
      const SlotRing::Want want{tile, weight_bytes(tile), true, 0};
      const int slot = slots_.victim(want, next_use, {}, version_of, ignore_uses);
      return slot == -1 ? std::nullopt : begin(tile, slot);
    }
  }

  // A tile whose gate is closed keeps a slot for itself, and later tiles go ahead of it into others.
  for (std::size_t position = 0; position < expected_.size(); ++position) {
    const int tile = expected_[position];
    if (next_use.at(tile) != position || slots_.find(tile, version(tile)) != -1) continue;
    const SlotRing::Want want{tile, weight_bytes(tile), false, position};
    const int slot = slots_.victim(want, next_use, claimed, version_of, ignore_uses);
    if (slot == -1) {
      if (slots_.largest_for(tile) < want.bytes) continue;  // its acquisition will say so
      return std::nullopt;
    }
    if (gate_open(tile)) return begin(tile, slot);
    held_since_ns_.try_emplace(tile, steady_now_ns());
    claimed.push_back(slot);
  }
  return std::nullopt;
}

void Prefetcher::work() {
  Monitor::Lock lock = parts_.monitor.lock();
  std::optional<Request> request;
  while (parts_.monitor.wait_for_work(lock, [&] { return (request = next_request()).has_value(); })) {
    Slot& slot = slots_[request->slot];
    const bool may_poison = idle(slot) || !parts_.keeps(Wait::kSlotFree);
    const std::vector<SharedEvent> readers = std::exchange(slot.released, {});
    slot.tile = request->tile;
    slot.version = request->version;
    slot.parts = request->parts;
    slot.filling = true;
    lock.unlock();
    // Nobody else touches a slot that is being filled, and its buffer never changes.
    if (may_poison) backend_.poison(slot.device, slot.bytes);
    if (parts_.keeps(Wait::kSlotFree)) {
      for (const SharedEvent& reader : readers) backend_.wait(stream_, *reader);
    }
    const SharedEvent end = queue_copy(*request, slot.device);
    parts_.gate.read_queued(request->tile, ReadLane::kWeights, end);
    lock.lock();
    slot.arrived = end;
    slot.gate_ns = request->gate_ns;
    slot.filling = false;
    parts_.monitor.notify_locked();
  }
}

std::size_t Prefetcher::copy_ranges(int tile, const std::vector<ElementRange>& ranges, std::byte* device,
                                    StreamView stream) {
  const TileStore::SectionView weights = parts_.store.section(tile, Section::kWeights);
  const std::size_t width = element_bytes(parts_.store.layout(tile).format(), Section::kWeights);
  std::size_t sum = 0;
  for (const ElementRange& range : ranges) {
    const std::size_t offset = static_cast<std::size_t>(range.begin) * width;
    const std::size_t bytes = static_cast<std::size_t>(range.size()) * width;
    if (bytes == 0) continue;
    if (weights.pinned) {
      backend_.copy(device + offset, weights.data + offset, bytes, CopyKind::kHostToDevice, stream);
    } else {
      parts_.staging_up.copy_up(device + offset, weights.data + offset, bytes, stream);
    }
    sum += bytes;
  }
  return sum;
}

SharedEvent Prefetcher::queue_copy(const Request& request, std::byte* device) {
  const SharedEvent begin = parts_.events.record(stream_);
  const std::size_t bytes = copy_ranges(request.tile, request.ranges, device, stream_);
  SharedEvent end = parts_.events.record(stream_);
  TraceSpan span;
  span.kind = SpanKind::kCopyUp;
  span.tile = request.tile;
  span.step = parts_.step;
  span.bytes = static_cast<std::int64_t>(bytes);
  span.gate_ns = request.gate_ns;
  parts_.trace.add(span, begin, end);
  return end;
}

}  // namespace megatrain
