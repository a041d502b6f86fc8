// Brings weights up: a thread that copies tiles into slots, first what the caller is waiting for,
// then what it said it will need. acquire and release are called by the engine's caller; the thread
// never blocks on a guess, so a tile that is waited for always goes first. Of a tile that was split
// only the base and the parts that are wanted go up by themselves; others when the caller brings them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "stream/parts.h"
#include "stream/slots.h"
#include "stream/weight_parts.h"

namespace megatrain {

class Prefetcher {
 public:
  explicit Prefetcher(const EngineParts& parts);
  ~Prefetcher();  // after Monitor::stop or a failure: joins

  // Nothing is written there before the work on `stream` so far has ended.
  int add_slot(std::byte* device, std::size_t bytes, StreamView stream, int only_tile);
  void remove_slots();  // CallerError if one is in use; blocks until copies into them and reads have ended
  void expect(const std::vector<int>& tiles);

  // Blocks until the copy up is queued; `stream` then waits for its end.
  int acquire(int tile, StreamView stream);
  void release(int slot, StreamView stream);

  // From now on the tile's weights go up in parts; nothing of it may be in a slot. Once a tile.
  void split(int tile, std::vector<std::vector<ElementRange>> parts);
  // The parts that later copies of the tile have besides the base; at first none. A guess.
  void want(int tile, const std::vector<int>& parts);
  // Queues the copies of those parts that an acquired slot lacks; `stream` then waits for their end.
  void bring(int slot, const std::vector<int>& parts, StreamView stream);
  // Releases every acquisition that is outstanding, for a caller whose work was cut short.
  void release_all(StreamView stream);

  void join();         // returns when the thread has ended
  void synchronize();  // returns when the copies queued so far have ended

 private:
  struct Request {
    int tile = -1;
    int slot = -1;
    std::int64_t version = 0;
    std::int64_t gate_ns = 0;
    std::vector<ElementRange> ranges;
    std::vector<bool> parts;  // of a split tile: which go up with the base
  };
  struct Split {
    WeightParts parts;
    std::vector<bool> wanted;
  };

  void work();
  // The best copy that can be queued now; it has begun its read at the gate. Under the lock.
  std::optional<Request> next_request();
  std::optional<Request> begin(int tile, int slot);
  SharedEvent queue_copy(const Request& request, std::byte* device);  // returns its end
  // Elements of the tile's weights to their places in a slot; returns the bytes.
  std::size_t copy_ranges(int tile, const std::vector<ElementRange>& ranges, std::byte* device,
                          StreamView stream);
  SharedEvent queue_parts(int tile, const std::vector<ElementRange>& ranges, const Slot& slot);
  const Split& split_at(int tile) const;
  bool gate_open(int tile);
  bool idle(const Slot& slot) const;
  void drop(Slot& slot);
  void check_that_it_fits(int tile) const;
  void check_that_one_is_free(int tile);
  std::int64_t version(int tile) { return parts_.gate.version(tile); }
  std::size_t weight_bytes(int tile) const;

  EngineParts parts_;
  Backend& backend_;
  Stream stream_;
  Stream parts_stream_;  // what the caller waits for overtakes guesses that are queued already
  // Guarded by the monitor's lock:
  SlotRing slots_;
  std::deque<int> expected_;
  std::optional<int> demanded_;
  std::unordered_map<int, std::int64_t> held_since_ns_;  // wanted, but its gate was closed
  std::unordered_map<int, Split> splits_;                // of an entry, only what is wanted changes
  std::uint64_t clock_ = 0;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace megatrain
