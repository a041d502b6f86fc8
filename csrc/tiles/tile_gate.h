// The one place where the ring closes: who may touch a tile's host memory next. An update of tile L
// waits until reads of L have ended and its drains have landed; the next read of L waits for the
// update. Any thread may call; nothing here blocks. Work on the device is known by the last event
// of each lane, since a lane's copies end in the order in which they were queued.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device/backend.h"

namespace megatrain {

// Recorded once, shared by all who wait for it.
using SharedEvent = std::shared_ptr<const Event>;

enum class ReadLane { kWeights, kFetch, kParts };  // the streams on which copies up are queued

class TileGate {
 public:
  // `on_change` is called, without the gate's lock, after whatever may let a waiter go on.
  explicit TileGate(std::function<void()> on_change) : on_change_(std::move(on_change)) {}

  // Counts the updates and edits queued for the tile: a copy made under another version is stale.
  std::int64_t version(int tile);
  void mark_edited(int tile);
  bool open(int tile);  // no update is queued or running

  // A read that is about to be queued; the version that it will see, or nothing while an update is
  // pending (`ignore_updates` is for tests of that wait). Then read_queued, with its last event.
  std::optional<std::int64_t> begin_read(int tile, bool ignore_updates = false);
  void read_queued(int tile, ReadLane lane, SharedEvent end);

  // Drains wait for the updates that were queued before them: the number that may_drain asks for.
  std::int64_t queue_drain(int tile);
  bool may_drain(int tile, std::int64_t updates_before);
  void drain_queued(int tile, SharedEvent landed);
  bool drains_queued(int tile);  // all that were asked for are on their stream
  SharedEvent last_drain(int tile);

  // Closes the gate at once. Returns the number of drains that the update has to wait for.
  std::int64_t queue_update(int tile);
  bool reads_queued(int tile);  // no read is between begin_read and read_queued, no hold is left
  bool may_update(int tile, std::int64_t drains_before);
  std::vector<SharedEvent> last_reads(int tile);
  void update_ended(int tile);

  // Reads by the host, of a tile without a pending update: updates queued later wait for the release.
  void hold(int tile);
  void release(int tile);
  bool any_held();
  std::int64_t held_up_ns();  // so far some update had to wait for a release

 private:
  struct State {
    std::int64_t version = 0;
    std::int64_t updates_queued = 0, updates_ended = 0;
    std::int64_t drains_asked = 0, drains_on_stream = 0;
    int reads_starting = 0;
    int holds = 0;
    bool held_up = false;  // an update waits for the release
    std::array<SharedEvent, 3> last_read;
    SharedEvent last_drain;
  };
  State& state(int tile);  // under mutex_
  void count_held_up(int change);

  std::function<void()> on_change_;
  std::mutex mutex_;
  std::vector<State> states_;  // by tile, grown on demand
  int holds_ = 0;
  int held_up_ = 0;  // tiles
  std::int64_t held_up_since_ns_ = 0, held_up_ns_ = 0;
};

}  // namespace megatrain
