// The device twin of optim/adamw.h, for layers whose state stays on the GPU: the same arithmetic in
// the same bits, NaN patterns aside (each architecture makes its own). Built only with CUDA.
#pragma once

#include <cstdint>

#include "optim/adamw.h"

namespace megatrain {

// Queues one update on `stream` of the current device and returns. All pointers are device memory,
// aligned to 16 bytes where the full speed is wanted. `*non_finite` (device memory) becomes 1 if a
// weight became non-finite and is left alone otherwise. Nothing may touch the span before an event
// recorded on `stream` after this call has been reached.
void queue_adamw(const UpdateStep& step, const UpdateSpan& span, int* non_finite, std::uintptr_t stream);

}  // namespace megatrain
