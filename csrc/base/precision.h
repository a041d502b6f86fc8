// How weights and moments are kept: shared by the update, the tiles and the bindings.
#pragma once

#include <cstdint>

namespace megatrain {

enum class WeightFormat {
  kBf16Split,  // bf16, and the low half of an fp32 master; gradients bf16
  kBf16,       // bf16 alone, rounded stochastically by the update; gradients bf16
  kFp32,       // fp32, gradients too
};

enum class MomentFormat {
  kFp32,
  kBf16,  // rounded stochastically
  kInt8,  // 8-bit codes in blocks of kMomentBlock that share an exponent, rounded stochastically
};

// By which weights and moments follow from gradients.
enum class Rule {
  kAdamW,  // two moments
  kLion,   // the first one only
};
constexpr int moments_of(Rule rule) { return rule == Rule::kLion ? 1 : 2; }

// Elements that share an exponent; blocks are counted from a parameter's first element.
inline constexpr std::int64_t kMomentBlock = 128;

}  // namespace megatrain
