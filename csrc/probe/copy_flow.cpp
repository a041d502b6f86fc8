#include "probe/copy_flow.h"

#include <string>
#include <utility>

namespace megatrain {

CopyFlow::CopyFlow(Backend& gpu, CopyKind kind, std::byte* host, std::size_t host_bytes, std::byte* device,
                   std::size_t bytes)
    : gpu_(gpu), kind_(kind), host_(host), pieces_(host_bytes / bytes), device_(device), bytes_(bytes) {
  const std::string name = kind == CopyKind::kHostToDevice ? "probe-up" : "probe-down";
  stream_ = gpu.create_stream(name);
  for (Event& end : ends_) end = gpu.create_event(name);
}

CopyFlow::~CopyFlow() {
  running_ = false;
  if (thread_.joinable()) thread_.join();
}

void CopyFlow::start() {
  running_ = true;
  thread_ = std::thread([this] {
    try {
      copy();
    } catch (...) {
      failure_ = std::current_exception();
    }
  });
}

void CopyFlow::stop() {
  running_ = false;
  if (thread_.joinable()) thread_.join();
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

void CopyFlow::copy() {
  const bool up = kind_ == CopyKind::kHostToDevice;
  for (std::size_t i = 0; running_; ++i) {
    const EventView end = ends_[i % kInFlight].view();
    gpu_.synchronize(end);
    if (i >= kInFlight) ++copies_;
    std::byte* const host = host_ + next_ * bytes_;
    next_ = (next_ + 1) % pieces_;
    gpu_.copy(up ? device_ : host, up ? host : device_, bytes_, kind_, stream_);
    gpu_.record(end, stream_);
  }
  gpu_.synchronize(stream_.view());
}

}  // namespace megatrain
