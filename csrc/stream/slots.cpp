#include "stream/slots.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace megatrain {
namespace {

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

}  // namespace

int SlotRing::add(std::byte* device, std::size_t bytes, int only_tile) {
  Slot slot;
  slot.device = device;
  slot.bytes = bytes;
  slot.only_tile = only_tile;
  slots_.push_back(std::move(slot));
  return size() - 1;
}

int SlotRing::find(int tile, std::int64_t version) const {
  for (int i = 0; i < size(); ++i) {
    const Slot& slot = slots_[static_cast<std::size_t>(i)];
    if (slot.tile == tile && slot.version == version) return i;
  }
  return -1;
}

bool SlotRing::fits(int index, int tile, std::size_t bytes) const {
  const Slot& slot = slots_[static_cast<std::size_t>(index)];
  return slot.bytes >= bytes && (slot.only_tile == tile || (slot.only_tile == -1 && !has_own(tile)));
}

bool SlotRing::has_own(int tile) const {
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) { return slot.only_tile == tile; });
}

std::size_t SlotRing::largest_for(int tile) const {
  std::size_t largest = 0;
  for (int i = 0; i < size(); ++i) {
    if (fits(i, tile, 0)) largest = std::max(largest, slots_[static_cast<std::size_t>(i)].bytes);
  }
  return largest;
}

int SlotRing::victim(const Want& want, const NextUse& next_use, const std::vector<int>& claimed,
                     const std::function<std::int64_t(int)>& version, bool ignore_uses) const {
  int best = -1;
  std::tuple<bool, std::size_t, std::uint64_t> best_rank;
  for (int i = 0; i < size(); ++i) {
    const Slot& slot = slots_[static_cast<std::size_t>(i)];
    if (slot.filling || (slot.uses > 0 && !ignore_uses) || !fits(i, want.tile, want.bytes)) continue;
    if (std::find(claimed.begin(), claimed.end(), i) != claimed.end()) continue;
    std::size_t used_next = kNever;
    if (slot.tile != -1 && slot.version == version(slot.tile)) {
      const auto found = next_use.find(slot.tile);
      used_next = found == next_use.end() ? kNever - 1 : found->second;
    }
    if (!want.demanded && used_next <= want.position) continue;
    const std::tuple rank(slot.only_tile == want.tile, used_next, kNever - slot.touched);
    if (best == -1 || rank > best_rank) {
      best = i;
      best_rank = rank;
    }
  }
  return best;
}

}  // namespace megatrain
