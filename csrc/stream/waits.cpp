#include "stream/waits.h"

#include <string>

#include "base/error.h"

namespace megatrain {
namespace {

constexpr Wait kWaits[] = {Wait::kSlotFree,       Wait::kSlotArrived, Wait::kPartArrived,
                           Wait::kGateUpdate,     Wait::kGateFetch,   Wait::kGradientReady,
                           Wait::kGradientLanded, Wait::kStagingFree, Wait::kKeptReady,
                           Wait::kKeptLanded,     Wait::kKeptArrived, Wait::kResidentUpdated};

}  // namespace

const char* wait_name(Wait wait) noexcept {
  switch (wait) {
    case Wait::kNone:
      return "";
    case Wait::kSlotFree:
      return "slot_free";
    case Wait::kSlotArrived:
      return "slot_arrived";
    case Wait::kPartArrived:
      return "part_arrived";
    case Wait::kGateUpdate:
      return "gate_update";
    case Wait::kGateFetch:
      return "gate_fetch";
    case Wait::kGradientReady:
      return "gradient_ready";
    case Wait::kGradientLanded:
      return "gradient_landed";
    case Wait::kStagingFree:
      return "staging_free";
    case Wait::kKeptReady:
      return "kept_ready";
    case Wait::kKeptLanded:
      return "kept_landed";
    case Wait::kKeptArrived:
      return "kept_arrived";
    case Wait::kResidentUpdated:
      return "resident_updated";
  }
  return "";
}

Wait wait_from_name(std::string_view name) {
  if (name.empty()) return Wait::kNone;
  std::string known;
  for (const Wait wait : kWaits) {
    if (name == wait_name(wait)) return wait;
    known += known.empty() ? "" : ", ";
    known += wait_name(wait);
  }
  throw CallerError("unknown wait \"" + std::string(name) + "\"; there are " + known);
}

}  // namespace megatrain
