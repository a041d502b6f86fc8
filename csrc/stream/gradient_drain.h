// Brings gradients down, and sections other than weights up again: a thread that puts each copy on
// the D2H stream as soon as no earlier update still reads what it will overwrite. All functions are
// for the engine's caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <thread>
#include <unordered_map>

#include "stream/parts.h"

namespace megatrain {

// Elements of one section of a tile, and the device memory that goes with them.
struct SectionCopy {
  int tile = -1;
  Section section = Section::kGradients;
  std::int64_t element_offset = 0;
  std::int64_t elements = 0;
  std::byte* device = nullptr;
};

class GradientDrain {
 public:
  explicit GradientDrain(const EngineParts& parts);
  ~GradientDrain();  // after Monitor::stop or a failure: joins

  // Queues a copy down, after the work on `stream` so far. A shard copies only what it owns. The
  // device memory may be overwritten by work that comes after wait_drain of the returned ticket.
  std::int64_t drain(const SectionCopy& copy, StreamView stream);
  // Blocks until the copy is on its stream; `stream` then waits for its end.
  void wait_drain(std::int64_t ticket, StreamView stream);
  // Queues a copy up, after the tile's drains and updates so far and after the work on `stream` so
  // far; blocks until it is on its stream; `stream` then waits for its end.
  void fetch(const SectionCopy& copy, StreamView stream);

  void wait_queued();  // blocks until every drain is on its stream
  void join();
  void synchronize();  // returns when the copies queued so far have ended

 private:
  // A copy clipped to what this shard owns, in bytes.
  struct Burst {
    std::byte* host = nullptr;
    std::byte* device = nullptr;
    std::size_t bytes = 0;
    bool pinned = false;
  };
  struct Job {
    std::int64_t ticket = 0;
    int tile = -1;
    Burst burst;
    SharedEvent ready;    // the compute that makes the gradient has ended
    SharedEvent fetched;  // the last copy up of the tile has read what this one overwrites
    std::int64_t updates_before = 0;
    std::int64_t step = 0;
  };

  void work();
  std::optional<Job> next_job();           // under the lock
  SharedEvent queue_copy(const Job& job);  // returns its end
  SharedEvent queue_fetch(int tile, const Burst& burst, const SharedEvent& after);
  Burst burst_of(const SectionCopy& copy) const;
  void forget_landed();  // under the lock

  EngineParts parts_;
  Backend& backend_;
  Stream down_;
  Stream up_;
  // Guarded by the monitor's lock:
  std::deque<Job> jobs_;
  struct Ticket {
    int tile = -1;
    SharedEvent landed;  // empty until the copy is on its stream
  };
  std::map<std::int64_t, Ticket> tickets_;
  std::int64_t next_ticket_ = 0;
  std::unordered_map<int, SharedEvent> fetched_;  // by tile
  std::thread thread_;                            // last: it uses everything above
};

}  // namespace megatrain
