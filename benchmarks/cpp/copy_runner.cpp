#include "copy_runner.h"

#include <algorithm>
#include <chrono>
#include <string>

#include "base/error.h"

namespace megatrain::bench {

double Lane::bytes() const {
  double sum = 0;
  for (const Piece& piece : pieces) sum += static_cast<double>(piece.bytes);
  return sum;
}

CopyRunner::CopyRunner(std::shared_ptr<Backend> gpu) : gpu_(std::move(gpu)), latch_(gpu_->device_index()) {
  for (int i = 0; i < 2 * kMostStreams; ++i) {
    const std::string name = "bench-" + std::to_string(i);
    tracks_.push_back({gpu_->create_stream(name), gpu_->create_event(name)});
  }
  begin_ = gpu_->create_event("bench-begin");
}

std::vector<std::vector<CopyRunner::Track*>> CopyRunner::tracks_of(const std::vector<Lane>& lanes) {
  std::vector<std::vector<Track*>> tracks;
  std::size_t next = 0;
  for (const Lane& lane : lanes) {
    tracks.emplace_back();
    for (int i = 0; i < lane.streams; ++i) tracks.back().push_back(&tracks_.at(next++));
  }
  return tracks;
}

void CopyRunner::issue(const Lane& lane, const std::vector<Track*>& tracks) {
  const bool up = lane.kind == CopyKind::kHostToDevice;
  for (std::size_t i = 0; i < lane.pieces.size(); ++i) {
    const Piece& piece = lane.pieces[i];
    std::byte* const host = lane.host + piece.offset;
    std::byte* const device = lane.device + piece.offset;
    const StreamView stream = tracks[i % tracks.size()]->stream;
    if (lane.bare) {
      cuda_bare_copy(gpu_->device_index(), up ? device : host, up ? host : device, piece.bytes, lane.kind,
                     stream);
    } else {
      gpu_->copy(up ? device : host, up ? host : device, piece.bytes, lane.kind, stream);
    }
  }
}

void CopyRunner::queue(const std::vector<Lane>& lanes) {
  std::size_t pieces = 0;
  for (const Lane& lane : lanes) pieces += lane.pieces.size();
  if (pieces > kMostHeldCopies) {
    throw CallerError(std::to_string(pieces) + " copies behind a latch; at most " +
                      std::to_string(kMostHeldCopies) + " fit");
  }
  queued_ = tracks_of(lanes);
  const StreamView first = queued_.at(0).at(0)->stream;
  latch_.hold(first);
  gpu_->record(begin_.view(), first);
  for (const auto& tracks : queued_) {
    for (const Track* track : tracks) gpu_->wait(track->stream, begin_.view());
  }
  for (std::size_t i = 0; i < lanes.size(); ++i) {
    issue(lanes[i], queued_[i]);
    for (const Track* track : queued_[i]) gpu_->record(track->end.view(), track->stream);
  }
}

std::vector<double> CopyRunner::finish() {
  std::vector<double> seconds;
  for (const auto& tracks : queued_) {
    seconds.push_back(0);
    for (const Track* track : tracks) {
      gpu_->synchronize(track->end.view());
      seconds.back() = std::max(seconds.back(), cuda_seconds(begin_.view(), track->end.view()));
    }
  }
  return seconds;
}

std::vector<double> CopyRunner::run_held(const std::vector<Lane>& lanes) {
  queue(lanes);
  release();
  return finish();
}

double CopyRunner::run_as_issued(const std::vector<Lane>& lanes) {
  const std::vector<std::vector<Track*>> tracks = tracks_of(lanes);
  const auto begin = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < lanes.size(); ++i) issue(lanes[i], tracks[i]);
  for (const auto& lane_tracks : tracks) {
    for (const Track* track : lane_tracks) gpu_->synchronize(track->stream.view());
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace megatrain::bench
