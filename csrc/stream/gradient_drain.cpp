#include "stream/gradient_drain.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "tiles/share.h"

namespace megatrain {

GradientDrain::GradientDrain(const EngineParts& parts)
    : parts_(parts),
      backend_(parts.store.backend()),
      down_(backend_.create_stream("mt-d2h")),
      up_(backend_.create_stream("mt-fetch")) {
  thread_ = parts_.monitor.start("mt-drain", [this] { work(); });
}

GradientDrain::~GradientDrain() { join(); }

void GradientDrain::join() {
  if (thread_.joinable()) thread_.join();
}

void GradientDrain::synchronize() {
  backend_.synchronize(down_);
  backend_.synchronize(up_);
}

GradientDrain::Burst GradientDrain::burst_of(const SectionCopy& copy) const {
  const TileLayout& layout = parts_.store.layout(copy.tile);
  const std::string where = std::string(section_name(copy.section)) + " of tile " + std::to_string(copy.tile);
  const std::int64_t limit = layout.section_elements(copy.section);
  if (copy.element_offset < 0 || copy.elements < 0 || copy.element_offset > limit ||
      copy.elements > limit - copy.element_offset) {
    throw CallerError(std::to_string(copy.elements) + " elements at offset " +
                      std::to_string(copy.element_offset) + " of the " + where + ", which has " +
                      std::to_string(limit) + " elements");
  }
  const ElementRange asked{copy.element_offset, copy.element_offset + copy.elements};
  const ElementRange mine = copy.section == Section::kWeights ? asked : intersect(asked, layout.owned());
  const TileStore::SectionView memory = parts_.store.section(copy.tile, copy.section);
  const std::size_t width = element_bytes(layout.format(), copy.section);
  const auto bytes_before = [&](std::int64_t elements) { return static_cast<std::size_t>(elements) * width; };
  return {memory.data + bytes_before(mine.begin),
          copy.device + bytes_before(mine.begin - copy.element_offset), bytes_before(mine.size()),
          memory.pinned};
}

std::int64_t GradientDrain::drain(const SectionCopy& copy, StreamView stream) {
  if (copy.section == Section::kWeights) {
    throw CallerError("a drain into the weights of tile " + std::to_string(copy.tile) +
                      "; only updates and edits write weights");
  }
  Job job;
  job.tile = copy.tile;
  job.burst = burst_of(copy);
  job.ready = parts_.events.record(stream);
  job.step = parts_.step;
  const Monitor::Lock lock = parts_.monitor.lock();
  forget_landed();
  job.ticket = next_ticket_++;
  job.updates_before = parts_.gate.queue_drain(copy.tile);
  if (const auto found = fetched_.find(copy.tile); found != fetched_.end()) job.fetched = found->second;
  tickets_[job.ticket] = {copy.tile, nullptr};
  const std::int64_t ticket = job.ticket;
  jobs_.push_back(std::move(job));
  parts_.monitor.notify_locked();
  return ticket;
}

// A ticket that is never waited for would otherwise keep its event for ever.
void GradientDrain::forget_landed() {
  while (!tickets_.empty()) {
    const SharedEvent& landed = tickets_.begin()->second.landed;
    if (!landed || !backend_.reached(*landed)) return;
    tickets_.erase(tickets_.begin());
  }
}

void GradientDrain::wait_drain(std::int64_t ticket, StreamView stream) {
  Monitor::Lock lock = parts_.monitor.lock();
  if (ticket < 0 || ticket >= next_ticket_) {
    throw CallerError("drain ticket " + std::to_string(ticket) + "; tickets 0 to " +
                      std::to_string(next_ticket_ - 1) + " were given out");
  }
  if (!parts_.keeps(Wait::kStagingFree)) return;
  Ticket found;
  parts_.monitor.wait(lock, [&] {
    const auto entry = tickets_.find(ticket);
    if (entry == tickets_.end()) return true;  // landed and forgotten
    found = entry->second;
    return found.landed != nullptr;
  });
  lock.unlock();
  if (!found.landed) return;
  const SharedEvent before = parts_.events.record(stream);
  backend_.wait(stream, *found.landed);
  TraceSpan span;
  span.kind = SpanKind::kWaitDown;
  span.tile = found.tile;
  span.step = parts_.step;
  parts_.trace.add(span, before, parts_.events.record(stream));
}

void GradientDrain::fetch(const SectionCopy& copy, StreamView stream) {
  const Burst burst = burst_of(copy);
  const SharedEvent after = parts_.events.record(stream);
  Monitor::Lock lock = parts_.monitor.lock();
  parts_.monitor.wait(lock, [&] {
    return parts_.gate.drains_queued(copy.tile) && parts_.gate.begin_read(copy.tile).has_value();
  });
  lock.unlock();
  try {
    const SharedEvent end = queue_fetch(copy.tile, burst, after);
    lock.lock();
    fetched_[copy.tile] = end;
    lock.unlock();
    parts_.gate.read_queued(copy.tile, ReadLane::kFetch, end);
    backend_.wait(stream, *end);
  } catch (...) {
    // The gate still counts a read that will never be queued, and an update would wait for it.
    parts_.monitor.fail(std::current_exception());
    parts_.monitor.rethrow_failure();
  }
}

SharedEvent GradientDrain::queue_fetch(int tile, const Burst& burst, const SharedEvent& after) {
  const SharedEvent landed = parts_.gate.last_drain(tile);
  backend_.wait(up_, *after);
  if (landed && burst.pinned) backend_.wait(up_, *landed);
  if (landed && !burst.pinned) backend_.synchronize(*landed);  // the staging ring reads at once
  const SharedEvent begin = parts_.events.record(up_);
  if (!burst.pinned) {
    parts_.staging_up.copy_up(burst.device, burst.host, burst.bytes, up_);
  } else if (burst.bytes > 0) {
    backend_.copy(burst.device, burst.host, burst.bytes, CopyKind::kHostToDevice, up_);
  }
  SharedEvent end = parts_.events.record(up_);
  TraceSpan span;
  span.kind = SpanKind::kCopyUp;
  span.tile = tile;
  span.step = parts_.step;
  span.bytes = static_cast<std::int64_t>(burst.bytes);
  parts_.trace.add(span, begin, end);
  return end;
}

void GradientDrain::wait_queued() {
  Monitor::Lock lock = parts_.monitor.lock();
  parts_.monitor.wait(lock, [&] {
    return std::all_of(tickets_.begin(), tickets_.end(),
                       [](const auto& ticket) { return ticket.second.landed != nullptr; });
  });
}

// In order, except that one which an update still holds lets others pass: the update might be
// waiting for one of them. Those of one tile stay in order, since each waits for at least as many
// updates as the one before.
std::optional<GradientDrain::Job> GradientDrain::next_job() {
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    if (!parts_.gate.may_drain(job->tile, job->updates_before)) continue;
    Job found = std::move(*job);
    jobs_.erase(job);
    return found;
  }
  return std::nullopt;
}

void GradientDrain::work() {
  Monitor::Lock lock = parts_.monitor.lock();
  std::optional<Job> job;
  while (parts_.monitor.wait_for_work(lock, [&] { return (job = next_job()).has_value(); })) {
    lock.unlock();
    const SharedEvent landed = queue_copy(*job);
    parts_.gate.drain_queued(job->tile, landed);
    lock.lock();
    tickets_[job->ticket].landed = landed;
    parts_.monitor.notify_locked();
  }
}

SharedEvent GradientDrain::queue_copy(const Job& job) {
  const Burst& burst = job.burst;
  if (parts_.keeps(Wait::kGradientReady)) backend_.wait(down_, *job.ready);
  if (job.fetched) backend_.wait(down_, *job.fetched);
  const SharedEvent begin = parts_.events.record(down_);
  if (!burst.pinned) {
    parts_.staging_down.copy_down(burst.host, burst.device, burst.bytes, down_);
  } else if (burst.bytes > 0) {
    backend_.copy(burst.host, burst.device, burst.bytes, CopyKind::kDeviceToHost, down_);
  }
  SharedEvent landed = parts_.events.record(down_);
  TraceSpan span;
  span.kind = SpanKind::kCopyDown;
  span.tile = job.tile;
  span.step = job.step;
  span.bytes = static_cast<std::int64_t>(burst.bytes);
  parts_.trace.add(span, begin, landed);
  return landed;
}

}  // namespace megatrain
