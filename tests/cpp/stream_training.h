// A small training run through the engine, and the same run done synchronously. "Compute" is copies
// on a compute stream: a tile's gradient is, in its first half, its own weights as the slot held
// them, and in its second half values from a table; so a weight or gradient seen too early or too
// late changes every number after it.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "device/backend.h"
#include "tiles/tile_layout.h"

namespace megatrain::testing {

enum class Guess { kRight, kWrong, kNone };

struct TrainingOptions {
  TileFormat format = TileFormat::kBf16Split;
  int tiles = 5;
  int slots = 2;
  int steps = 20;
  std::size_t staging_bytes = std::size_t{1} << 20;
  Guess guess = Guess::kRight;
  bool update_in_backward = false;  // else all updates of a step follow its last drain
  bool update_in_forward = false;   // of one parameter, with the gradient that the host still has
  std::string without_wait = {};
};

struct TrainingResult {
  std::vector<std::vector<std::byte>> seen;   // weights as compute read them, in order
  std::vector<std::vector<std::byte>> tiles;  // weights, low half and moments at the end
  std::string error;                          // of the engine, if it threw

  friend bool operator==(const TrainingResult&, const TrainingResult&) = default;
};

TrainingResult train(std::shared_ptr<Backend> backend, const TrainingOptions& options);
TrainingResult train_synchronously(const TrainingOptions& options);

}  // namespace megatrain::testing
