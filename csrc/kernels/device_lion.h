// The device twin of Lion, as device_adamw.h is of AdamW.
#pragma once

#include <cstdint>

#include "optim/update.h"

namespace megatrain {

// As queue_adamw; aligned or not makes no difference.
void queue_lion(const UpdateStep& step, const UpdateSpan& span, int* non_finite, std::uintptr_t stream);

}  // namespace megatrain
