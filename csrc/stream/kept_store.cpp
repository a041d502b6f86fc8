#include "stream/kept_store.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"

namespace megatrain {

namespace {
constexpr std::size_t kPageBytes = 4096;  // places are whole pages
}

KeptStore::KeptStore(const EngineParts& parts)
    : parts_(parts),
      backend_(parts.store.backend()),
      down_(backend_.create_stream("mt-keep-down")),
      up_(backend_.create_stream("mt-keep-up")) {}

void KeptStore::synchronize() {
  backend_.synchronize(down_);
  backend_.synchronize(up_);
}

KeptStore::Kept& KeptStore::find(std::int64_t kept) {
  const auto found = kept_.find(kept);
  if (found == kept_.end()) throw CallerError("nothing is kept under the number " + std::to_string(kept));
  return found->second;
}

// The smallest free place that is large enough and not more than twice as large; else a new one, for which
// free places make room where there is none.
KeptStore::Place KeptStore::take(std::size_t bytes) {
  const auto found = free_.lower_bound(bytes);
  if (found != free_.end() && found->first <= 2 * std::max(bytes, kPageBytes)) {
    Place place = std::move(found->second);
    free_.erase(found);
    return place;
  }
  try {
    return allocate(bytes);
  } catch (const OutsideError&) {
    if (free_.empty()) throw;
  }
  free_unused();
  return allocate(bytes);
}

KeptStore::Place KeptStore::allocate(std::size_t bytes) {
  if (limit_ && bytes_ + bytes > *limit_) {
    throw MemoryLimitError("keeping " + std::to_string(bytes) + " more bytes on the host, where " +
                           std::to_string(bytes_) + " are taken for what is kept and " +
                           std::to_string(*limit_) + " may be: let blocks keep less, or on the device");
  }
  require_host_memory(bytes, limit_ ? *limit_ - bytes_ : 0);  // a cgroup's limit holds in any case
  Place place;
  place.memory = parts_.store.allocate(bytes);
  bytes_ += place.memory.bytes();
  return place;
}

void KeptStore::free_unused() {
  for (auto& [bytes, place] : free_) {
    if (place.last) backend_.synchronize(*place.last);
    bytes_ -= bytes;
  }
  free_.clear();
}

std::int64_t KeptStore::put(int tile, const std::byte* device, std::size_t bytes, StreamView stream) {
  parts_.store.layout(tile);  // throws for one that does not exist
  Kept kept{tile, bytes, take(bytes), nullptr, nullptr};
  if (parts_.keeps(Wait::kKeptReady)) backend_.wait(down_, *parts_.events.record(stream));
  if (kept.place.last) backend_.wait(down_, *kept.place.last);
  const SharedEvent begin = parts_.events.record(down_);
  if (bytes > 0) backend_.copy(kept.place.memory.data(), device, bytes, CopyKind::kDeviceToHost, down_);
  kept.down = parts_.events.record(down_);
  trace(SpanKind::kCopyDown, kept, begin, kept.down);
  kept_.emplace(next_, std::move(kept));
  return next_++;
}

// The device waits only if it has no work left meanwhile: events at both ends see just that.
void KeptStore::wait_landed(std::int64_t number, StreamView stream) {
  const Kept& kept = find(number);
  if (backend_.reached(*kept.down)) return;
  const SharedEvent before = parts_.events.record(stream);
  backend_.synchronize(*kept.down);
  trace(SpanKind::kWaitDown, kept, before, parts_.events.record(stream));
}

void KeptStore::get(std::int64_t number, std::byte* device, StreamView stream) {
  Kept& kept = find(number);
  backend_.wait(up_, *parts_.events.record(stream));  // whatever used the device memory before
  if (parts_.keeps(Wait::kKeptLanded)) backend_.wait(up_, *kept.down);
  const SharedEvent begin = parts_.events.record(up_);
  if (kept.bytes > 0) {
    backend_.copy(device, kept.place.memory.data(), kept.bytes, CopyKind::kHostToDevice, up_);
  }
  kept.up = parts_.events.record(up_);
  trace(SpanKind::kCopyUp, kept, begin, kept.up);
}

void KeptStore::wait_got(std::int64_t number, StreamView stream) {
  Kept& kept = find(number);
  if (!kept.up)
    throw CallerError("what is kept under the number " + std::to_string(number) + " was not asked for");
  if (!parts_.keeps(Wait::kKeptArrived)) return;
  const SharedEvent before = parts_.events.record(stream);
  backend_.wait(stream, *kept.up);
  trace(SpanKind::kWait, kept, before, parts_.events.record(stream));
}

void KeptStore::drop(std::int64_t number) {
  Kept& kept = find(number);
  kept.place.last = kept.up ? kept.up : kept.down;
  const std::size_t bytes = kept.place.memory.bytes();
  free_.emplace(bytes, std::move(kept.place));
  kept_.erase(number);
}

void KeptStore::trace(SpanKind kind, const Kept& kept, SharedEvent begin, const SharedEvent& end) {
  TraceSpan span;
  span.kind = kind;
  span.tile = kept.tile;
  span.step = parts_.step;
  const bool copies = kind == SpanKind::kCopyUp || kind == SpanKind::kCopyDown;
  if (copies) span.bytes = static_cast<std::int64_t>(kept.bytes);
  parts_.trace.add(span, std::move(begin), end);
}

}  // namespace megatrain
