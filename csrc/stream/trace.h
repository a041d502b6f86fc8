// What happened when: spans of copies, compute, updates and waits, in a ring buffer. Device spans
// are pairs of events whose times are read later, when they have been reached. Any thread may add;
// adding never blocks on the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "device/backend.h"
#include "tiles/tile_gate.h"

namespace megatrain {

// A wait is one of compute: for a copy up, or (down) for a copy down to have read its buffer; also where the
// caller waited for that copy, and compute for what the caller would queue.
enum class SpanKind { kCopyUp, kCopyDown, kCompute, kUpdate, kWait, kWaitDown };
const char* span_kind_name(SpanKind kind) noexcept;  // "copy_up", "copy_down", "compute", ...

struct TraceSpan {
  SpanKind kind = SpanKind::kCopyUp;
  int tile = -1;
  std::int64_t step = 0;
  std::int64_t begin_ns = 0;  // steady clock
  std::int64_t end_ns = 0;
  std::int64_t bytes = 0;
  std::int64_t gate_ns = 0;  // how long an update of the tile held the queueing of the copy up (of a wait:
                             // of the copy that it waits for)
};

std::int64_t steady_now_ns() noexcept;

// What compute streams have waited for so far.
struct WaitTotals {
  std::int64_t up_ns = 0;
  std::int64_t update_ns = 0;  // of it, for copies that an update held back; at most all of each wait
  std::int64_t down_ns = 0;
};

class Trace {
 public:
  // Keeps the last `capacity` spans.
  Trace(Backend& backend, std::size_t capacity) : backend_(backend), capacity_(capacity) {}

  void add(const TraceSpan& span);  // its times are known
  void add(const TraceSpan& span, SharedEvent begin, SharedEvent end);
  // Waits for spans whose end has not been reached. Sorted by begin.
  std::vector<TraceSpan> spans();
  void clear();
  // Over the waits that have ended; never blocks.
  WaitTotals wait_totals();

 private:
  struct Entry {
    TraceSpan span;
    SharedEvent begin, end;  // empty once the times are known
  };
  void push(Entry entry);  // under mutex_
  void resolve(Entry& entry);
  bool resolve_next();  // false if there is none, or its end has not been reached

  Backend& backend_;
  const std::size_t capacity_;
  std::mutex mutex_;
  std::deque<Entry> entries_;
  std::size_t unresolved_ = 0;  // entries before this index have their times
  WaitTotals waits_;
};

}  // namespace megatrain
