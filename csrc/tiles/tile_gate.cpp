#include "tiles/tile_gate.h"

#include <cassert>
#include <chrono>
#include <utility>

namespace megatrain {
namespace {

std::int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

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
  if (s.holds > 0 && !std::exchange(s.held_up, true)) count_held_up(1);
  return s.drains_asked;
}

bool TileGate::reads_queued(int tile) {
  std::lock_guard lock(mutex_);
  const State& s = state(tile);
  return s.reads_starting == 0 && s.holds == 0;
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

void TileGate::hold(int tile) {
  std::lock_guard lock(mutex_);
  State& s = state(tile);
  assert(s.updates_ended == s.updates_queued);
  ++s.holds;
  ++holds_;
}

void TileGate::release(int tile) {
  {
    std::lock_guard lock(mutex_);
    State& s = state(tile);
    assert(s.holds > 0);
    --s.holds;
    --holds_;
    if (s.holds == 0 && std::exchange(s.held_up, false)) count_held_up(-1);
  }
  on_change_();
}

bool TileGate::any_held() {
  std::lock_guard lock(mutex_);
  return holds_ > 0;
}

std::int64_t TileGate::held_up_ns() {
  std::lock_guard lock(mutex_);
  return held_up_ns_ + (held_up_ > 0 ? now_ns() - held_up_since_ns_ : 0);
}

void TileGate::count_held_up(int change) {
  const std::int64_t now = now_ns();
  if (held_up_ > 0) held_up_ns_ += now - held_up_since_ns_;
  held_up_since_ns_ = now;
  held_up_ += change;
}

}  // namespace megatrain
