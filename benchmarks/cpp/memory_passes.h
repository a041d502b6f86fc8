// One pass over memory of each kind, by one thread over its own range: those of STREAM, and one
// with the streams of an update but no arithmetic, which shows what its bytes cost.
#pragma once

#include <cstddef>
#include <cstdint>

namespace megatrain::bench {

// Bytes an element are counted as STREAM counts them: what the program reads and writes. A store
// without a preceding load makes the cache read the line first (write-allocate): such passes move
// more than is counted; an update does not, since all that it writes has just been read.
std::uint64_t pass_read(const float* a, std::int64_t count);             // 4; a sum, to be used
void pass_write(float* a, float value, std::int64_t count);              // 4 (8 moved)
void pass_copy(float* a, const float* b, std::int64_t count);            // 8 (12 moved)
void pass_triad(float* a, const float* b, const float* c, float scalar,  // 12 (16 moved): a = b + scalar * c
                std::int64_t count);
// The triad with stores that go past the cache: 12 moved. Where there are none, the triad.
extern const bool kHasStreamingStores;
void pass_triad_streaming(float* a, const float* b, const float* c, float scalar, std::int64_t count);

// The mix of streams that an update has: each is read, and some are written back in place, a few
// cache lines of each in turn. With mask 0 what is written is what was read.
struct MixStream {
  std::byte* data;
  int element_bytes;
  bool written;
};
// Elements [begin, end) of all streams; words become word ^ mask. Returns a sum of what was only read,
// to be used.
std::uint32_t pass_mix(const MixStream* streams, int count, std::int64_t begin, std::int64_t end,
                       std::uint32_t mask);

}  // namespace megatrain::bench
