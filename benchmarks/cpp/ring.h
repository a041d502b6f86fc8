// The engine's ring without a model: weights up, a wait of known length in place of the computation,
// gradients down, AdamW. On a GPU the wait is a kernel; on the host backend the calling thread sleeps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cuda_tools.h"
#include "device/backend.h"
#include "stream/engine.h"
#include "tiles/tile_store.h"

namespace megatrain::bench {

// Memory of the backend's device.
class RingMemory {
 public:
  RingMemory(Backend& backend, std::size_t bytes);
  std::byte* data() const noexcept { return device_ ? device_->data() : host_.get(); }

 private:
  std::unique_ptr<DeviceMemory> device_;
  std::unique_ptr<std::byte[]> host_;
};

struct RingShape {
  std::vector<std::int64_t> parameters;  // of each layer
  int layers = 0;
  int slots = 2;
  unsigned threads = 0;  // 0: what the tile store chooses
};

enum class UpdateTime { kAfterBackward, kAsGradientsLand };

struct RingRun {
  UpdateTime updates = UpdateTime::kAfterBackward;
  std::int64_t forward_ns = 0;  // a layer
  std::int64_t backward_ns = 0;
  int steps = 1;
};

// What a step took, and what the engine did in it.
struct RingResult {
  std::vector<double> step_seconds;  // from the end of one step's computation to that of the next
  double up_bytes = 0;               // of each step, on average
  double down_bytes = 0;
  double wait_seconds = 0;        // of the computation, each step, on average
  double updates_in_compute = 0;  // share of the update spans that overlap a computation
  std::int64_t disorder = 0;      // spans that began before what they depend on had ended
};

class Ring {
 public:
  Ring(std::shared_ptr<Backend> backend, const RingShape& shape);
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  RingResult run(const RingRun& run);

  // Seconds that a whole step's worth takes with nothing else going on.
  double up_alone(double bytes);
  double down_alone(double bytes);
  double updates_alone();

  // Throws OutsideError unless every parameter is what the updates so far make of its first value.
  void verify();
  TileStore& store() const noexcept { return *store_; }

 private:
  void compute(std::int64_t ns);
  void forward(int tile, const RingRun& run);
  void backward(int tile, const RingRun& run);
  void update(int tile);
  double copy_alone(double bytes, CopyKind kind);
  std::vector<ParameterUpdate> next_updates();
  void count(RingResult& result, const RingRun& run);

  std::shared_ptr<Backend> backend_;
  RingShape shape_;
  std::shared_ptr<TileStore> store_;
  std::vector<std::unique_ptr<RingMemory>> slots_;
  struct GradientBuffer {
    std::unique_ptr<RingMemory> memory;
    std::int64_t ticket = -1;
  };
  std::vector<GradientBuffer> gradients_;
  std::size_t next_gradient_ = 0;
  Stream stream_;          // of the computation; empty on the host
  std::int64_t step_ = 0;  // that AdamW counts; the same for all tiles once a step is over
  std::unique_ptr<Engine> engine_;
};

}  // namespace megatrain::bench
