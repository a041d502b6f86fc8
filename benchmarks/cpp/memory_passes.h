// One pass over memory of each kind, by one thread over its own range: those of STREAM, and one
// with the streams of AdamW but next to no arithmetic, which shows what its bytes cost.
#pragma once

#include <cstdint>

namespace megatrain::bench {

// Bytes an element are counted as STREAM counts them: what the program reads and writes. A store
// without a preceding load makes the cache read the line first (write-allocate): such passes move
// more than is counted, those of AdamW do not, since all they write has just been read.
std::uint64_t pass_read(const float* a, std::int64_t count);             // 4; a sum, to be used
void pass_write(float* a, float value, std::int64_t count);              // 4 (8 moved)
void pass_copy(float* a, const float* b, std::int64_t count);            // 8 (12 moved)
void pass_triad(float* a, const float* b, const float* c, float scalar,  // 12 (16 moved): a = b + scalar * c
                std::int64_t count);
// The triad with stores that go past the cache: 12 moved. Where there are none, the triad.
extern const bool kHasStreamingStores;
void pass_triad_streaming(float* a, const float* b, const float* c, float scalar, std::int64_t count);

// high += gradient & mask; low += gradient & mask; moments = moments * scale + shift. With mask 0,
// scale 1 and shift 0 nothing changes, so that the same memory can be AdamW's in the next round.
struct MixScalars {
  std::uint16_t mask = 0;
  float scale = 1;
  float shift = 0;
};
struct SplitMix {  // 26 bytes a parameter: 2 + 2 + 2 + 4 + 4 read, 2 + 2 + 4 + 4 written
  std::uint16_t* high;
  std::uint16_t* low;
  const std::uint16_t* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  std::int64_t count;
};
void pass_mix(const SplitMix& streams, const MixScalars& scalars);

// weight = weight + gradient * shift; moments as above.
struct FloatMix {  // 28 bytes a parameter: 4 times 4 read, 3 times 4 written
  float* weight;
  const float* gradient;
  float* exp_avg;
  float* exp_avg_sq;
  std::int64_t count;
};
void pass_mix(const FloatMix& streams, const MixScalars& scalars);

}  // namespace megatrain::bench
