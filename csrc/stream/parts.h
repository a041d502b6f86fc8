// What the engine's queues share. The engine owns all of it and outlives them.
#pragma once

#include <atomic>
#include <cstdint>

#include "stream/event_pool.h"
#include "stream/monitor.h"
#include "stream/staging.h"
#include "stream/trace.h"
#include "stream/waits.h"
#include "tiles/tile_gate.h"
#include "tiles/tile_store.h"

namespace megatrain {

struct EngineParts {
  TileStore& store;
  TileGate& gate;
  Monitor& monitor;
  EventPool& events;
  Trace& trace;
  StagingRing& staging_up;
  StagingRing& staging_down;
  std::atomic<std::int64_t>& step;             // that spans belong to
  Wait removed;                                // by a test; kNone otherwise
  const std::atomic<bool>& copy_by_parameter;  // see Engine

  bool keeps(Wait wait) const noexcept { return wait != removed; }
};

}  // namespace megatrain
