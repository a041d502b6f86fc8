// The ring, composed: weights up (prefetcher), gradients down (drain), updates on the host (queue),
// joined by the tile gate. Calls come from one thread at a time. An exception of a worker thread is
// rethrown by the next call and by all after it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "stream/gradient_drain.h"
#include "stream/kept_store.h"
#include "stream/parts.h"
#include "stream/prefetcher.h"
#include "stream/resident_tiles.h"
#include "stream/update_queue.h"

namespace megatrain {

struct EngineOptions {
  std::size_t trace_capacity = 65536;
  std::string without_wait = {};  // for tests: the name of one wait to leave out
};

class Engine {
 public:
  explicit Engine(std::shared_ptr<TileStore> store, const EngineOptions& options = {});
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();  // closes

  // A device buffer for weights, which earlier work on `stream` may still use; with `only_tile`, for that
  // tile alone, which then uses no other. The caller keeps it alive until clear_device() or close() has
  // returned.
  int add_slot(std::byte* device, std::size_t bytes, StreamView stream, int only_tile = -1);
  // The tiles that will be acquired next, in order. A guess: others are right, only slower.
  void expect(const std::vector<int>& tiles);

  // The slot with the tile's weights after all updates so far. Blocks until the copy up is queued;
  // work put on `stream` afterwards sees the weights.
  int acquire(int tile, StreamView stream);
  // The work on `stream` so far was the last that reads this acquisition.
  void release(int slot, StreamView stream);
  // Weights that go up in parts: see Prefetcher.
  void split(int tile, std::vector<std::vector<ElementRange>> parts);
  void want(int tile, const std::vector<int>& parts);
  void bring(int slot, const std::vector<int>& parts, StreamView stream);
  // For a caller whose work was cut short: nothing is acquired any more, no compute span is open.
  void release_all(StreamView stream);

  std::int64_t version(int tile);  // counts updates and edits
  void mark_edited(int tile);      // the caller has written the host weights

  // See GradientDrain.
  std::int64_t drain(const SectionCopy& copy, StreamView stream);
  void wait_drain(std::int64_t ticket, StreamView stream);
  void fetch(const SectionCopy& copy, StreamView stream);

  // Takes back all slots and resident tiles: the caller may free their memory, and give other.
  void clear_device();
  // From now on weights go up parameter by parameter instead of tile by tile: to measure what bursts
  // are worth.
  void copy_by_parameter(bool on);

  // See ResidentTiles. A resident tile is never acquired.
  void add_resident(int tile, std::byte* device, int* non_finite);
  void use_resident(int tile, StreamView stream);
  // See KeptStore.
  KeptStore& kept();

  // Queues the update of the listed parameters: on the host (see UpdateQueue::push), or on `stream`
  // where the tile is resident.
  void update(int tile, std::vector<ParameterUpdate> updates, float gradient_scale, std::int64_t priority,
              StreamView stream = {});
  // Blocks until the host's tiles are what all updates so far have made of them, and none is held.
  void wait_updates();
  // For a reader of the host's tiles that goes on beside the next steps: blocks like wait_updates, then
  // keeps each of these tiles as it is until its release, which may come from any thread and must come
  // before close() can return. Updates of a held tile wait, and reads of its weights for them.
  void hold(const std::vector<int>& tiles);
  void release_hold(int tile) { gate_.release(tile); }
  std::int64_t held_up_ns() { return gate_.held_up_ns(); }  // so far some update waited for a release
  bool updates_pending();
  void synchronize();  // blocks until drains, updates and copies have ended

  void begin_step(std::int64_t step);  // spans from here on belong to it
  void begin_compute(int tile, StreamView stream);
  void end_compute(StreamView stream);
  // Spans of what was queued so far, oldest first; waits for them.
  std::vector<TraceSpan> trace();
  void clear_trace();
  WaitTotals wait_totals();

  // Ends what is queued (unless a worker failed), then stops the threads, then throws a failure that
  // no call has thrown yet. Twice is fine; other calls throw afterwards.
  void close();

  TileStore& store() const noexcept { return *store_; }

 private:
  void check();                          // throws if closed or failed
  std::exception_ptr finish() noexcept;  // returns a failure that no call has thrown yet

  std::shared_ptr<TileStore> store_;  // first: everything below uses it
  Backend& backend_;
  EventPool events_;
  Monitor monitor_;
  TileGate gate_;
  Trace trace_;
  StagingRing staging_up_;
  StagingRing staging_down_;
  std::atomic<std::int64_t> step_{0};
  std::atomic<bool> copy_by_parameter_{false};
  const EngineParts parts_;
  struct Compute {
    int tile = -1;
    std::int64_t step = 0;
    SharedEvent begin;
  };
  Compute compute_;
  bool closed_ = false;
  KeptStore kept_;
  ResidentTiles resident_;
  std::unique_ptr<Prefetcher> prefetcher_;
  std::unique_ptr<GradientDrain> drain_;
  std::unique_ptr<UpdateQueue> updates_;
};

}  // namespace megatrain
