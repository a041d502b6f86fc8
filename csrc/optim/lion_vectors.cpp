// Lion in each instruction set: one body, compiled for each by itself. No flags for the file, since what
// other headers define must not be emitted with instructions that other CPUs lack.
#include <algorithm>
#include <cstring>

#include "optim/lion_kernels.h"

#define MEGATRAIN_FLAT [[gnu::always_inline]] static inline

namespace megatrain {
namespace {

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
constexpr int kLanes = 8;
#include "optim/lion_body.h"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
constexpr int kLanes = 16;
#include "optim/lion_body.h"
}  // namespace avx512
#pragma GCC pop_options

#elif defined(__aarch64__)

namespace neon {
constexpr int kLanes = 4;
#include "optim/lion_body.h"
}  // namespace neon

#endif

}  // namespace

bool lion_vectors(Isa isa, const LionScalars& s, const RoundingKey& key, const UpdateSpan& span,
                  std::int64_t& done) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return avx512::run(s, key, span, done);
  if (isa == Isa::kAvx2) return avx2::run(s, key, span, done);
#elif defined(__aarch64__)
  if (isa == Isa::kNeon) return neon::run(s, key, span, done);
#endif
  done = 0;
  return true;
}

}  // namespace megatrain
