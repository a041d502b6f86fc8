#include "stream/update_queue.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace megatrain {

UpdateQueue::UpdateQueue(const EngineParts& parts) : parts_(parts), backend_(parts.store.backend()) {
  thread_ = parts_.monitor.start("mt-update", [this] { work(); });
}

UpdateQueue::~UpdateQueue() { join(); }

void UpdateQueue::join() {
  if (thread_.joinable()) thread_.join();
}

void UpdateQueue::push(int tile, std::vector<ParameterUpdate> updates, std::int64_t priority) {
  check_updates(parts_.store.layout(tile), tile, updates);
  if (updates.empty()) return;
  const Monitor::Lock lock = parts_.monitor.lock();
  const std::int64_t drains_before = parts_.gate.queue_update(tile);
  jobs_.push_back({tile, std::move(updates), priority, drains_before, parts_.step});
  parts_.monitor.notify_locked();
}

void UpdateQueue::wait_idle() {
  Monitor::Lock lock = parts_.monitor.lock();
  parts_.monitor.wait(lock, [&] { return jobs_.empty() && !running_; });
}

bool UpdateQueue::idle() {
  const Monitor::Lock lock = parts_.monitor.lock();
  return jobs_.empty() && !running_;
}

// Only what is on its stream already is waited for inside run(): that ends without the help of this
// thread, whatever else is queued.
bool UpdateQueue::may_start(const Job& job) {
  const bool drained =
      parts_.gate.may_update(job.tile, job.drains_before) || !parts_.keeps(Wait::kGradientLanded);
  return drained && (parts_.gate.reads_queued(job.tile) || !parts_.keeps(Wait::kGateFetch));
}

bool UpdateQueue::ready(const Job& job) {
  if (parts_.keeps(Wait::kGradientLanded)) {
    if (const SharedEvent landed = parts_.gate.last_drain(job.tile); landed && !backend_.reached(*landed)) {
      return false;
    }
  }
  if (!parts_.keeps(Wait::kGateFetch)) return true;
  const std::vector<SharedEvent> reads = parts_.gate.last_reads(job.tile);
  return std::all_of(reads.begin(), reads.end(),
                     [&](const SharedEvent& read) { return backend_.reached(*read); });
}

// A caller that runs ahead of the device queues updates whose gradients land much later: to wait for
// the most urgent of them would leave others undone that have landed long ago. Where none has, the
// one queued first is the next to land.
std::optional<UpdateQueue::Job> UpdateQueue::next_job() {
  // The oldest of each tile, with the lowest priority of all of that tile's.
  struct Candidate {
    std::deque<Job>::iterator oldest;
    std::int64_t priority;
  };
  std::vector<Candidate> candidates;
  std::unordered_map<int, std::size_t> of_tile;
  for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
    const auto [found, added] = of_tile.try_emplace(job->tile, candidates.size());
    if (added) {
      candidates.push_back({job, job->priority});
    } else {
      Candidate& candidate = candidates[found->second];
      candidate.priority = std::min(candidate.priority, job->priority);
    }
  }
  std::erase_if(candidates, [&](const Candidate& candidate) { return !may_start(*candidate.oldest); });
  if (candidates.empty()) return std::nullopt;
  const auto first_queued = candidates.front().oldest;
  std::stable_sort(candidates.begin(), candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.priority < b.priority; });
  const auto best = std::find_if(candidates.begin(), candidates.end(),
                                 [&](const Candidate& candidate) { return ready(*candidate.oldest); });
  const auto chosen = best == candidates.end() ? first_queued : best->oldest;
  Job job = std::move(*chosen);
  jobs_.erase(chosen);
  return job;
}

void UpdateQueue::work() {
  Monitor::Lock lock = parts_.monitor.lock();
  std::optional<Job> job;
  while (parts_.monitor.wait_for_work(lock, [&] { return (job = next_job()).has_value(); })) {
    running_ = true;
    lock.unlock();
    run(*job);
    parts_.gate.update_ended(job->tile);
    lock.lock();
    running_ = false;
    parts_.monitor.notify_locked();
  }
}

void UpdateQueue::run(const Job& job) {
  if (parts_.keeps(Wait::kGradientLanded)) {
    if (const SharedEvent landed = parts_.gate.last_drain(job.tile)) backend_.synchronize(*landed);
  }
  if (parts_.keeps(Wait::kGateFetch)) {
    for (const SharedEvent& read : parts_.gate.last_reads(job.tile)) backend_.synchronize(*read);
  }
  backend_.random_delay();
  TraceSpan span;
  span.kind = SpanKind::kUpdate;
  span.tile = job.tile;
  span.step = job.step;
  span.begin_ns = steady_now_ns();
  span.bytes = update_tile(parts_.store, job.tile, job.updates);
  span.end_ns = steady_now_ns();
  parts_.trace.add(span);
}

}  // namespace megatrain
