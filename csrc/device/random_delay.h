// The host backend's pauses: a pure function of what is being delayed, so that a seed printed by a
// failed run gives every stream the same pauses again, whatever the threads' interleaving.
#pragma once

#include <cstdint>

namespace megatrain {

// The finaliser of splitmix64: neighbouring inputs give unrelated outputs.
inline std::uint64_t mix_bits(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// Uniform in [0, max_us], for the `sequence`-th delay of stream number `stream`.
inline std::int64_t delay_us(std::uint64_t seed, std::uint64_t stream, std::uint64_t sequence,
                             std::int64_t max_us) noexcept {
  if (max_us <= 0) return 0;
  const std::uint64_t bits = mix_bits(mix_bits(mix_bits(seed) + stream) + sequence);
  return static_cast<std::int64_t>(bits % (static_cast<std::uint64_t>(max_us) + 1));
}

}  // namespace megatrain
