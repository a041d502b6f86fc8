// The fp32 master as a bf16 half that is streamed and an int16 half that stays. The high half is
// rounded, ties away from zero, so that it is the best bf16 the GPU can see; the low half is the
// signed distance to the master. 8 bytes a parameter move each way. Plain loops: the compiler
// vectorises them.
#include <bit>

#include "optim/adamw.h"
#include "optim/update_kernels.h"

namespace megatrain {

bool split_master(const float* master, std::uint16_t* high, std::int16_t* low, std::int64_t count) {
  std::uint32_t bad = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(master[i]);
    high[i] = static_cast<std::uint16_t>((bits + 0x8000) >> 16);
    low[i] = static_cast<std::int16_t>(bits);  // bits - (high << 16), of which 16 bits are left
    bad |= (bits & 0x7fffffff) >= kInfiniteUpperHalf ? 1u : 0u;
  }
  return bad == 0;
}

void join_master(const std::uint16_t* high, const std::int16_t* low, float* master, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t bits =
        (std::uint32_t{high[i]} << 16) + static_cast<std::uint32_t>(std::int32_t{low[i]});
    master[i] = std::bit_cast<float>(bits);
  }
}

}  // namespace megatrain
