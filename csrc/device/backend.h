// What the runtime needs of a device: streams, events, asynchronous copies, pinned memory. Two
// implementations: `cuda`, and `host`, whose streams are worker threads and whose device memory is
// ordinary memory. Every function may be called from any thread. A Backend outlives all its owners.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace megatrain {

class Backend;
struct UpdateStep;
struct UpdateSpan;

// A stream that somebody else owns. Handle 0 is the default stream: torch's default stream on CUDA;
// the calling thread itself on the host, where recording is immediate and waiting blocks.
struct StreamView {
  std::uintptr_t handle = 0;
};

// An event that somebody else owns. An event that was never recorded counts as complete.
struct EventView {
  std::uintptr_t handle = 0;
};

// Owns a stream; destroying it first waits for its work.
class Stream {
 public:
  Stream() = default;
  Stream(Backend& backend, StreamView view) : backend_(&backend), view_(view) {}
  Stream(Stream&& other) noexcept { swap(other); }
  Stream& operator=(Stream&& other) noexcept {
    swap(other);
    return *this;
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream();
  StreamView view() const noexcept { return view_; }
  operator StreamView() const noexcept { return view_; }

 private:
  void swap(Stream& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(view_, other.view_);
  }
  Backend* backend_ = nullptr;
  StreamView view_{};
};

// Owns an event.
class Event {
 public:
  Event() = default;
  Event(Backend& backend, EventView view) : backend_(&backend), view_(view) {}
  Event(Event&& other) noexcept { swap(other); }
  Event& operator=(Event&& other) noexcept {
    swap(other);
    return *this;
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();
  EventView view() const noexcept { return view_; }
  operator EventView() const noexcept { return view_; }

 private:
  void swap(Event& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(view_, other.view_);
  }
  Backend* backend_ = nullptr;
  EventView view_{};
};

enum class CopyKind { kHostToDevice, kDeviceToHost };

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const char* name() const noexcept = 0;  // "cuda", "host"
  virtual int device_index() const noexcept = 0;
  virtual int numa_node() const noexcept = 0;  // of the device, by PCI bus id; -1 where unknown

  Stream create_stream(const std::string& name) { return Stream(*this, new_stream(name)); }
  // Events carry time stamps, so that a trace can place what they mark.
  Event create_event(const std::string& name) { return Event(*this, new_event(name)); }

  // Marks the point after all work queued on `stream` so far. Recording again moves the mark.
  virtual void record(EventView event, StreamView stream) = 0;
  // Work queued on `stream` from now on starts after the mark that `event` holds at this call.
  virtual void wait(StreamView stream, EventView event) = 0;
  virtual void synchronize(EventView event) = 0;    // blocks the caller until the mark is reached
  virtual void synchronize(StreamView stream) = 0;  // blocks the caller until the stream is empty
  virtual bool reached(EventView event) = 0;
  // Nanoseconds on the steady clock (std::chrono::steady_clock) at which the mark was reached;
  // waits for it. On CUDA this is an anchor plus cudaEventElapsedTime. 0 if never recorded.
  virtual std::int64_t time_ns(EventView event) = 0;
  // By how much at most times given so far may be off: on CUDA microseconds, but milliseconds where processes
  // take turns on the device.
  virtual std::int64_t time_error_ns() { return 0; }

  // Queues a copy; it ends before any event recorded on `stream` after this call. The caller keeps
  // both ranges alive and unchanged until such an event is reached. On CUDA the host range should be
  // pinned: a pageable one makes the copy wait for the stream.
  virtual void copy(void* destination, const void* source, std::size_t bytes, CopyKind kind,
                    StreamView stream) = 0;
  // Queues an update (optim/update.h) over device memory; `*non_finite`, device memory too, becomes 1 if a
  // weight became infinite or NaN and is left alone otherwise. Ends before any event recorded on
  // `stream` after this call.
  virtual void update(const UpdateStep& step, const UpdateSpan& span, int* non_finite, StreamView stream) = 0;
  // Fills device memory that nobody may read any more with NaN (0xFF bytes), where the backend was
  // asked to; else nothing.
  virtual void poison(void* device, std::size_t bytes) = 0;
  // A seeded random pause before host-side work such as an update, where the backend was asked to.
  virtual void random_delay() = 0;

  // Registers memory for direct copies, in pieces. False when the machine refuses (limits,
  // containers): the caller then copies through a staging ring. Never throws.
  virtual bool pin(void* host, std::size_t bytes) noexcept = 0;
  virtual void unpin(void* host, std::size_t bytes) noexcept = 0;

  struct DeviceMemory {
    std::size_t free_bytes;
    std::size_t total_bytes;
  };
  virtual DeviceMemory device_memory() = 0;

 protected:
  friend class Stream;
  friend class Event;
  virtual StreamView new_stream(const std::string& name) = 0;
  virtual EventView new_event(const std::string& name) = 0;
  virtual void destroy(StreamView stream) noexcept = 0;  // waits for its work
  virtual void destroy(EventView event) noexcept = 0;
};

inline Stream::~Stream() {
  if (backend_) backend_->destroy(view_);
}
inline Event::~Event() {
  if (backend_) backend_->destroy(view_);
}

struct HostBackendOptions {
  std::int64_t max_delay_us = 0;  // before each copy, uniform in [0, max], seeded
  std::uint64_t seed = 0;
  bool poison = false;                     // released device memory becomes NaN
  std::size_t pin_limit_bytes = SIZE_MAX;  // pin() refuses what would exceed it
};
std::unique_ptr<Backend> make_host_backend(const HostBackendOptions& options);

// The build has the CUDA backend, a driver answers, and there is a device: their number, else 0.
int cuda_device_count() noexcept;
// Why cuda_device_count() is 0: "built without CUDA", or the driver's words. Empty when it is not 0.
std::string cuda_unavailable_reason();
struct CudaBackendOptions {
  std::size_t pin_limit_bytes = SIZE_MAX;
};
// Throws OutsideError without a device, CallerError for an index out of range.
std::unique_ptr<Backend> make_cuda_backend(int device_index, const CudaBackendOptions& options);

}  // namespace megatrain
