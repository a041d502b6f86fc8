// Runs copies between host and device and says how long they took: from a held start, by events on
// the device, so that the time it takes to queue them is not measured; or as issued, by the clock of
// the host, so that it is. One runner a GPU; one thread at a time.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "cuda_tools.h"
#include "device/backend.h"

namespace megatrain::bench {

struct Piece {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

// Copies in one direction between a host range and a device range.
struct Lane {
  CopyKind kind = CopyKind::kHostToDevice;
  std::byte* host = nullptr;
  std::byte* device = nullptr;
  std::vector<Piece> pieces;
  int streams = 1;    // the pieces are dealt out to them in turn
  bool bare = false;  // cudaMemcpyAsync itself, not the Backend

  double bytes() const;
};

constexpr int kMostStreams = 4;

class CopyRunner {
 public:
  explicit CopyRunner(std::shared_ptr<Backend> gpu);

  // Seconds of each lane, all of them at once. At most kMostHeldCopies pieces, from pinned memory.
  std::vector<double> run_held(const std::vector<Lane>& lanes);
  // Seconds from before the first call to the end of the last copy.
  double run_as_issued(const std::vector<Lane>& lanes);

  // The parts of run_held, so that several GPUs can be queued before any is let go.
  void queue(const std::vector<Lane>& lanes);
  void release() { latch_.release(); }
  std::vector<double> finish();

  Backend& gpu() const noexcept { return *gpu_; }

 private:
  // Copies of a lane go to its streams; lanes of one direction get streams of their own.
  struct Track {
    Stream stream;
    Event end;
  };
  void issue(const Lane& lane, const std::vector<Track*>& tracks);
  std::vector<std::vector<Track*>> tracks_of(const std::vector<Lane>& lanes);

  std::shared_ptr<Backend> gpu_;
  Latch latch_;
  std::vector<Track> tracks_;
  Event begin_;
  std::vector<std::vector<Track*>> queued_;
};

}  // namespace megatrain::bench
