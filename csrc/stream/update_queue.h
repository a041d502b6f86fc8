// Updates tiles on the host: a thread that takes the update whose tile is needed first. All
// functions are for the engine's caller.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <thread>
#include <vector>

#include "stream/parts.h"
#include "stream/tile_update.h"

namespace megatrain {

class UpdateQueue {
 public:
  explicit UpdateQueue(const EngineParts& parts);
  ~UpdateQueue();  // after Monitor::stop or a failure: joins

  // Queues one update and closes the tile's gate. It starts when the tile's drains so far have
  // landed and no copy reads its weights. Of those that could start now the lowest priority goes
  // first, equal ones in order; updates of one tile stay in order. An empty list does nothing.
  void push(int tile, std::vector<ParameterUpdate> updates, std::int64_t priority);
  void wait_idle();  // blocks until all queued updates have ended
  bool idle();
  void join();

 private:
  struct Job {
    int tile = -1;
    std::vector<ParameterUpdate> updates;
    std::int64_t priority = 0;
    std::int64_t drains_before = 0;
    std::int64_t step = 0;
  };

  void work();
  std::optional<Job> next_job();   // under the lock
  bool may_start(const Job& job);  // what it waits for is on its stream
  bool ready(const Job& job);      // and has ended
  void run(const Job& job);

  EngineParts parts_;
  Backend& backend_;
  // Guarded by the monitor's lock:
  std::deque<Job> jobs_;
  bool running_ = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace megatrain
