#include "tiles/tile_gate.h"

#include <cassert>
#include <utility>

namespace megatrain {

TileGate::State& TileGate::state(int tile) {
  assert(tile >= 0);
  const auto index = static_cast<std::size_t>(tile);
  if (index >= states_.size()) states_.resize(index + 1);
  return states_[index];
}

std::int64_t TileGate::version(int tile) {
  std::lock_guard lock(mutex_);
  return state(tile).version;
}

void TileGate::mark_edited(int tile) {
  std::lock_guard lock(mutex_);
  ++state(tile).version;
}

bool TileGate::open(int tile) {
  std::lock_guard lock(mutex_);
  const State& s = state(tile);
  return s.updates_ended == s.updates_queued;
}

std::optional<std::int64_t> TileGate::begin_read(int tile, bool ignore_updates) {
  std::lock_guard lock(mutex_);
  State& s = state(tile);
  if (s.updates_ended != s.updates_queued && !ignore_updates) return std::nullopt;
  ++s.reads_starting;
  return s.version;
}

void TileGate::read_queued(int tile, ReadLane lane, SharedEvent end) {
  {
    std::lock_guard lock(mutex_);
    State& s = state(tile);
    assert(s.reads_starting > 0);
    --s.reads_starting;
    s.last_read[static_cast<std::size_t>(lane)] = std::move(end);
  }
  on_change_();
}

std::int64_t TileGate::queue_drain(int tile) {
  std::lock_guard lock(mutex_);
  State& s = state(tile);
  ++s.drains_asked;
  return s.updates_queued;
}

bool TileGate::may_drain(int tile, std::int64_t updates_before) {
  std::lock_guard lock(mutex_);
  return state(tile).updates_ended >= updates_before;
}

void TileGate::drain_queued(int tile, SharedEvent landed) {
  {
    std::lock_guard lock(mutex_);
    State& s = state(tile);
    ++s.drains_on_stream;
    s.last_drain = std::move(landed);
  }
  on_change_();
}

bool TileGate::drains_queued(int tile) {
  std::lock_guard lock(mutex_);
  const State& s = state(tile);
  return s.drains_on_stream == s.drains_asked;
}

SharedEvent TileGate::last_drain(int tile) {
  std::lock_guard lock(mutex_);
  return state(tile).last_drain;
}

std::int64_t TileGate::queue_update(int tile) {
  std::lock_guard lock(mutex_);
  State& s = state(tile);
  ++s.updates_queued;
  ++s.version;
  return s.drains_asked;
}

bool TileGate::reads_queued(int tile) {
  std::lock_guard lock(mutex_);
  return state(tile).reads_starting == 0;
}

bool TileGate::may_update(int tile, std::int64_t drains_before) {
  std::lock_guard lock(mutex_);
  return state(tile).drains_on_stream >= drains_before;
}

std::vector<SharedEvent> TileGate::last_reads(int tile) {
  std::lock_guard lock(mutex_);
  std::vector<SharedEvent> events;
  for (const SharedEvent& event : state(tile).last_read) {
    if (event) events.push_back(event);
  }
  return events;
}

void TileGate::update_ended(int tile) {
  {
    std::lock_guard lock(mutex_);
    ++state(tile).updates_ended;
  }
  on_change_();
}

}  // namespace megatrain
