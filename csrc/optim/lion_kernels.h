// The variants of Lion. Called only by lion.cpp.
#pragma once

#include "optim/lion_math.h"
#include "optim/update_kernels.h"

namespace megatrain {

// As RuleKernel.
bool lion_scalar(const LionScalars& s, const RoundingKey& key, const UpdateSpan& span);
// Of the span's whole vectors, of 8-bit moments' whole blocks; `done` are the elements that these were. The
// same bits.
bool lion_vectors(Isa isa, const LionScalars& s, const RoundingKey& key, const UpdateSpan& span,
                  std::int64_t& done);

}  // namespace megatrain
