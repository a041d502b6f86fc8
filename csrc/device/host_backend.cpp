// The host backend: streams are threads, device memory is ordinary memory. It is meant to be
// unkind: copies start late by random amounts, and released memory turns into NaN, so that a wait
// forgotten in the engine shows on any machine.
#include <unistd.h>

#include <atomic>
#include <cassert>
#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "device/backend.h"
#include "device/host_stream.h"
#include "device/meminfo.h"
#include "device/pin_budget.h"
#include "device/random_delay.h"
#include "optim/update.h"

namespace megatrain {
namespace {

// What delays are drawn for. Streams are numbered from kFirstStream in the order of creation.
constexpr std::uint64_t kCallerStream = 0;  // copies on handle 0
constexpr std::uint64_t kHostWork = 1;      // random_delay()
constexpr std::uint64_t kFirstStream = 2;

struct DelaySource {
  std::uint64_t number;
  std::atomic<std::uint64_t> drawn{0};
};

struct OwnedStream {
  OwnedStream(const std::string& name, std::uint64_t number) : delays{number}, stream(name) {}
  DelaySource delays;
  HostStream stream;
};

// Holds the mark recorded last; empty before the first.
class OwnedEvent {
 public:
  void set(std::shared_ptr<Mark> mark) {
    std::lock_guard lock(mutex_);
    mark_ = std::move(mark);
  }
  std::shared_ptr<Mark> mark() {
    std::lock_guard lock(mutex_);
    return mark_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Mark> mark_;
};

OwnedStream& owned(StreamView view) { return *reinterpret_cast<OwnedStream*>(view.handle); }
OwnedEvent& owned(EventView view) {
  assert(view.handle != 0);
  return *reinterpret_cast<OwnedEvent*>(view.handle);
}

class HostBackend final : public Backend {
 public:
  explicit HostBackend(const HostBackendOptions& options)
      : options_(options), pin_budget_(options.pin_limit_bytes) {}

  const char* name() const noexcept override { return "host"; }
  int device_index() const noexcept override { return 0; }
  int numa_node() const noexcept override { return -1; }

  void record(EventView event, StreamView stream) override {
    if (stream.handle != 0) {
      owned(event).set(owned(stream).stream.push_mark());
      return;
    }
    auto mark = std::make_shared<Mark>();
    mark->reach();
    owned(event).set(std::move(mark));
  }

  void wait(StreamView stream, EventView event) override {
    std::shared_ptr<Mark> mark = owned(event).mark();
    if (!mark) return;
    if (stream.handle != 0) {
      owned(stream).stream.push([mark = std::move(mark)] { mark->wait(); });
    } else {
      mark->wait();
    }
  }

  void synchronize(EventView event) override {
    if (const std::shared_ptr<Mark> mark = owned(event).mark()) mark->wait();
  }

  void synchronize(StreamView stream) override {
    if (stream.handle != 0) owned(stream).stream.push_mark()->wait();
  }

  bool reached(EventView event) override {
    const std::shared_ptr<Mark> mark = owned(event).mark();
    return !mark || mark->reached();
  }

  std::int64_t time_ns(EventView event) override {
    const std::shared_ptr<Mark> mark = owned(event).mark();
    return mark ? mark->time_ns() : 0;
  }

  void copy(void* destination, const void* source, std::size_t bytes, CopyKind, StreamView stream) override {
    if (stream.handle == 0) {
      delay(caller_delays_);
      copy_bytes(destination, source, bytes);
      return;
    }
    OwnedStream& target = owned(stream);
    target.stream.push([this, &target, destination, source, bytes] {
      delay(target.delays);
      copy_bytes(destination, source, bytes);
    });
  }

  void update(const UpdateStep& step, const UpdateSpan& span, int* non_finite, StreamView stream) override {
    const auto work = [this, step, span, non_finite] {
      if (!apply_update(isa_, step, span)) *non_finite = 1;
    };
    if (stream.handle == 0) {
      work();
      return;
    }
    OwnedStream& target = owned(stream);
    target.stream.push([this, &target, work] {
      delay(target.delays);
      work();
    });
  }

  void poison(void* device, std::size_t bytes) override {
    if (options_.poison && bytes > 0) std::memset(device, 0xFF, bytes);
  }

  void random_delay() override { delay(host_work_delays_); }

  bool pin(void*, std::size_t bytes) noexcept override { return pin_budget_.take(bytes); }
  void unpin(void*, std::size_t bytes) noexcept override { pin_budget_.give_back(bytes); }

  DeviceMemory device_memory() override {
    const MemInfo info = read_meminfo("");
    return {info.available_bytes, info.total_bytes};
  }

 protected:
  StreamView new_stream(const std::string& name) override {
    return {reinterpret_cast<std::uintptr_t>(new OwnedStream(name, next_stream_++))};
  }
  EventView new_event(const std::string&) override {
    return {reinterpret_cast<std::uintptr_t>(new OwnedEvent)};
  }
  void destroy(StreamView stream) noexcept override {
    // The thread did not follow into a forked child, and may have held the queue's lock at the fork.
    if (process_ == getpid()) delete &owned(stream);
  }
  void destroy(EventView event) noexcept override { delete &owned(event); }

 private:
  void delay(DelaySource& source) {
    if (options_.max_delay_us <= 0) return;
    const std::int64_t us = delay_us(options_.seed, source.number, source.drawn++, options_.max_delay_us);
    std::this_thread::sleep_for(std::chrono::microseconds(us));
  }

  // memcpy may not be given null pointers, not even for no bytes.
  static void copy_bytes(void* destination, const void* source, std::size_t bytes) {
    if (bytes > 0) std::memcpy(destination, source, bytes);
  }

  const HostBackendOptions options_;
  const Isa isa_ = select_isa("");
  const pid_t process_ = getpid();
  PinBudget pin_budget_;
  std::atomic<std::uint64_t> next_stream_{kFirstStream};
  DelaySource caller_delays_{kCallerStream};
  DelaySource host_work_delays_{kHostWork};
};

}  // namespace

std::unique_ptr<Backend> make_host_backend(const HostBackendOptions& options) {
  return std::make_unique<HostBackend>(options);
}

}  // namespace megatrain
