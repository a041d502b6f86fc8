#include "stream/event_pool.h"

#include <utility>

namespace megatrain {

SharedEvent EventPool::record(StreamView stream) {
  std::unique_ptr<const Event> event;
  {
    std::lock_guard lock(free_->mutex);
    if (!free_->events.empty()) {
      event = std::move(free_->events.back());
      free_->events.pop_back();
    }
  }
  if (!event) event = std::make_unique<const Event>(backend_->create_event("mt-mark"));
  backend_->record(*event, stream);
  return SharedEvent(event.release(), [free = free_](const Event* returned) {
    std::unique_ptr<const Event> owned(returned);
    std::lock_guard lock(free->mutex);
    free->events.push_back(std::move(owned));
  });
}

}  // namespace megatrain
