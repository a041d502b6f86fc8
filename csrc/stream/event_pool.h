// Reusable events. One that was handed out is recorded once and goes back when its last holder lets
// go of it, so nobody ever waits for a later mark than the one that was meant.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "device/backend.h"
#include "tiles/tile_gate.h"

namespace megatrain {

class EventPool {
 public:
  explicit EventPool(Backend& backend) : free_(std::make_shared<Free>()), backend_(&backend) {}

  // A new mark: after all work queued on `stream` so far.
  SharedEvent record(StreamView stream);

 private:
  struct Free {
    std::mutex mutex;
    std::vector<std::unique_ptr<const Event>> events;
  };
  std::shared_ptr<Free> free_;  // shared with the events that are out
  Backend* backend_;
};

}  // namespace megatrain
