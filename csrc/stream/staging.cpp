#include "stream/staging.h"

#include <algorithm>
#include <cstring>
#include <deque>

namespace megatrain {
namespace {

// Four chunks keep both sides busy; below this size two larger ones move more at a time.
constexpr std::size_t kSmallRing = std::size_t{1} << 20;
constexpr std::size_t kLine = 64;

std::size_t chunk_count(std::size_t bytes) { return bytes < kSmallRing ? 2 : 4; }

}  // namespace

StagingRing::StagingRing(TileStore& store, EventPool& events, std::size_t bytes)
    : store_(store),
      events_(events),
      chunks_count_(chunk_count(bytes)),
      chunk_bytes_(std::max(kLine, bytes / chunk_count(bytes) / kLine * kLine)) {}

StagingRing::Chunk& StagingRing::next_chunk() {
  if (chunks_.empty()) {
    memory_ = store_.allocate(chunks_count_ * chunk_bytes_);
    chunks_.resize(chunks_count_);
    for (std::size_t i = 0; i < chunks_count_; ++i) chunks_[i].data = memory_.data() + i * chunk_bytes_;
  }
  Chunk& chunk = chunks_[next_];
  next_ = (next_ + 1) % chunks_count_;
  return chunk;
}

void StagingRing::copy_up(std::byte* device, const std::byte* host, std::size_t bytes, StreamView stream) {
  std::lock_guard lock(mutex_);
  Backend& backend = store_.backend();
  for (std::size_t offset = 0; offset < bytes; offset += chunk_bytes_) {
    const std::size_t piece = std::min(chunk_bytes_, bytes - offset);
    Chunk& chunk = next_chunk();
    if (chunk.last) backend.synchronize(*chunk.last);
    std::memcpy(chunk.data, host + offset, piece);
    backend.copy(device + offset, chunk.data, piece, CopyKind::kHostToDevice, stream);
    chunk.last = events_.record(stream);
  }
}

void StagingRing::copy_down(std::byte* host, const std::byte* device, std::size_t bytes, StreamView stream) {
  std::lock_guard lock(mutex_);
  Backend& backend = store_.backend();
  struct Piece {
    Chunk* chunk;
    std::byte* host;
    std::size_t bytes;
  };
  std::deque<Piece> on_their_way;
  const auto land_oldest = [&] {
    const Piece piece = on_their_way.front();
    on_their_way.pop_front();
    backend.synchronize(*piece.chunk->last);
    std::memcpy(piece.host, piece.chunk->data, piece.bytes);
  };
  for (std::size_t offset = 0; offset < bytes; offset += chunk_bytes_) {
    if (on_their_way.size() == chunks_count_) land_oldest();
    const std::size_t piece = std::min(chunk_bytes_, bytes - offset);
    Chunk& chunk = next_chunk();
    backend.copy(chunk.data, device + offset, piece, CopyKind::kDeviceToHost, stream);
    chunk.last = events_.record(stream);
    on_their_way.push_back({&chunk, host + offset, piece});
  }
  while (!on_their_way.empty()) land_oldest();
}

}  // namespace megatrain
