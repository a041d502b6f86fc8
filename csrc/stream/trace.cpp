#include "stream/trace.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace megatrain {

const char* span_kind_name(SpanKind kind) noexcept {
  switch (kind) {
    case SpanKind::kCopyUp:
      return "copy_up";
    case SpanKind::kCopyDown:
      return "copy_down";
    case SpanKind::kCompute:
      return "compute";
    case SpanKind::kUpdate:
      return "update";
    case SpanKind::kWait:
      return "wait";
    case SpanKind::kWaitDown:
      return "wait_down";
  }
  return "unknown";
}

std::int64_t steady_now_ns() noexcept {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Trace::add(const TraceSpan& span) {
  std::lock_guard lock(mutex_);
  push({span, nullptr, nullptr});
}

void Trace::add(const TraceSpan& span, SharedEvent begin, SharedEvent end) {
  std::lock_guard lock(mutex_);
  push({span, std::move(begin), std::move(end)});
}

void Trace::push(Entry entry) {
  if (capacity_ == 0) return;
  entries_.push_back(std::move(entry));
  if (entries_.size() > capacity_) {
    entries_.pop_front();
    if (unresolved_ > 0) --unresolved_;
  }
  // Gives events back as the work goes on: a ring full of unread pairs would hold one event a copy for
  // as long as nobody asks for the trace. Two a call keep up with one new span a call.
  if (resolve_next()) resolve_next();
}

void Trace::resolve(Entry& entry) {
  if (!entry.end) return;
  entry.span.begin_ns = backend_.time_ns(*entry.begin);
  entry.span.end_ns = backend_.time_ns(*entry.end);
  entry.begin.reset();
  entry.end.reset();
  const std::int64_t waited = entry.span.end_ns - entry.span.begin_ns;
  if (entry.span.kind == SpanKind::kWaitDown) waits_.down_ns += waited;
  if (entry.span.kind != SpanKind::kWait) return;
  waits_.up_ns += waited;
  waits_.update_ns += std::min(waited, entry.span.gate_ns);
}

bool Trace::resolve_next() {
  if (unresolved_ >= entries_.size()) return false;
  Entry& entry = entries_[unresolved_];
  if (entry.end && !backend_.reached(*entry.end)) return false;
  resolve(entry);
  ++unresolved_;
  return true;
}

WaitTotals Trace::wait_totals() {
  std::lock_guard lock(mutex_);
  while (resolve_next()) {
  }
  return waits_;
}

std::vector<TraceSpan> Trace::spans() {
  std::vector<TraceSpan> result;
  {
    std::lock_guard lock(mutex_);
    for (Entry& entry : entries_) resolve(entry);
    unresolved_ = entries_.size();
    result.reserve(entries_.size());
    for (const Entry& entry : entries_) result.push_back(entry.span);
  }
  std::stable_sort(result.begin(), result.end(),
                   [](const TraceSpan& a, const TraceSpan& b) { return a.begin_ns < b.begin_ns; });
  return result;
}

void Trace::clear() {
  std::lock_guard lock(mutex_);
  while (resolve_next()) {
  }
  entries_.clear();
  unresolved_ = 0;
}

}  // namespace megatrain
