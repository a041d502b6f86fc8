// The waits that keep the ring right, by name. A test removes one at a time and must see results
// change; that is the proof that delays and poison would show a wait that was forgotten.
#pragma once

#include <string_view>

namespace megatrain {

enum class Wait {
  kNone,
  kSlotFree,         // a copy up waits until the slot's readers have released it
  kSlotArrived,      // compute waits until the copy up has arrived
  kPartArrived,      // the same of parts that were asked for later
  kGateUpdate,       // a copy up waits for pending updates of the tile
  kGateFetch,        // an update waits for copies up that still read the tile
  kGradientReady,    // a copy down waits for the compute that makes the gradient
  kGradientLanded,   // an update waits for copies down
  kStagingFree,      // compute waits until a copy down has read the gradient buffer
  kKeptReady,        // a kept tensor goes down only when compute has made it
  kKeptLanded,       // and up only when it has landed
  kKeptArrived,      // compute waits for it to come up
  kResidentUpdated,  // a look at a resident tile waits for its update
};

// CallerError for an unknown name, listing the names. "" is kNone.
Wait wait_from_name(std::string_view name);
const char* wait_name(Wait wait) noexcept;

}  // namespace megatrain
