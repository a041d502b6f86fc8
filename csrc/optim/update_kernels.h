// What the rules behind apply_update() are made of, and what they share. Called only by update.cpp, which has
// checked step and span and that the CPU has the instructions, and has set the floating-point modes.
#pragma once

#include "optim/update.h"

namespace megatrain {

// Of the words that stochastic rounding draws, see random_word in adamw_math.h.
struct RoundingKey {
  std::uint32_t first, second;
};
inline constexpr std::uint32_t kWeyl = 0x9e3779b9;    // 2^32 over the golden ratio
inline constexpr std::uint32_t kMixing = 0x846ca68b;  // neighbours' words are least alike with it

// A split master from this size on (bits without the sign) is not finite: its upper half, which the GPU gets,
// is rounded, to infinity from here on.
inline constexpr std::uint32_t kInfiniteUpperHalf = 0x7f7f8000;

// For elements whose index has these upper 32 bits.
RoundingKey rounding_key(const UpdateStep& step, std::uint32_t upper_index);

// CallerError for settings and spans that mean nothing.
void check_update(const UpdateStep& step, const UpdateSpan& span);
// The span from element `skipped` on.
UpdateSpan rest_of(const UpdateSpan& span, std::int64_t skipped);

// One for each rule. Indices of the span do not cross a multiple of 2^32; the key is theirs. False if a
// weight became non-finite.
using RuleKernel = bool(Isa isa, const UpdateStep& step, const RoundingKey& key, const UpdateSpan& span);
RuleKernel update_by_adamw;
RuleKernel update_by_lion;

}  // namespace megatrain
