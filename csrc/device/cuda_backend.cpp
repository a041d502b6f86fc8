// The CUDA backend. Handles are the runtime's own, so that streams and events of another copy of the
// runtime in this process (torch's) can be passed in: both work in the device's primary context.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <unordered_map>

#include "base/error.h"
#include "device/backend.h"
#include "device/cuda_check.h"
#include "device/cuda_clock.h"
#include "device/pin_budget.h"
#include "device/pinned_pieces.h"
#include "kernels/device_adamw.h"
#include "kernels/device_lion.h"

namespace megatrain {
namespace {

// Registered at once. Pinning a tile takes tenths of a second, and other threads' CUDA calls get in
// between the pieces.
constexpr std::size_t kPinPieceBytes = std::size_t{512} << 20;

cudaStream_t native(StreamView view) { return reinterpret_cast<cudaStream_t>(view.handle); }
cudaEvent_t native(EventView view) { return reinterpret_cast<cudaEvent_t>(view.handle); }

// Current in the calling thread from here on. Its context is the primary one, shared with torch.
void make_current(int device) {
  if (const cudaError_t code = cudaSetDevice(device); code != cudaSuccess) {
    throw_cuda(code, "cudaSetDevice(" + std::to_string(device) + ")");
  }
}

int with_context(int device) {
  make_current(device);
  check_cuda(cudaFree(nullptr), "cudaFree(0), which creates the primary context,");
  return device;
}

// By the PCI bus id, since device indices change with CUDA_VISIBLE_DEVICES.
int find_numa_node(int device) {
  int domain = 0, bus = 0, slot = 0;
  if (cudaDeviceGetAttribute(&domain, cudaDevAttrPciDomainId, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&bus, cudaDevAttrPciBusId, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&slot, cudaDevAttrPciDeviceId, device) != cudaSuccess) {
    cudaGetLastError();
    return -1;
  }
  char path[80];
  std::snprintf(path, sizeof path, "/sys/bus/pci/devices/%04x:%02x:%02x.0/numa_node", domain, bus, slot);
  std::ifstream file(path);
  int node;
  return file >> node ? node : -1;
}

// What streams and events are called, for messages.
class Names {
 public:
  void set(std::uintptr_t handle, const std::string& name) {
    std::lock_guard lock(mutex_);
    names_[handle] = name;
  }
  void forget(std::uintptr_t handle) noexcept {
    std::lock_guard lock(mutex_);
    names_.erase(handle);
  }
  std::string of(StreamView stream) { return find("stream", stream.handle); }
  std::string of(EventView event) { return find("event", event.handle); }

 private:
  std::string find(const char* kind, std::uintptr_t handle) {
    std::lock_guard lock(mutex_);
    const auto found = names_.find(handle);
    return std::string(kind) + " " + (found == names_.end() ? std::to_string(handle) : found->second);
  }
  std::mutex mutex_;
  std::unordered_map<std::uintptr_t, std::string> names_;
};

class CudaBackend final : public Backend {
 public:
  CudaBackend(int device, const CudaBackendOptions& options)
      : device_(with_context(device)),
        numa_node_(find_numa_node(device)),
        pin_budget_(options.pin_limit_bytes) {}

  const char* name() const noexcept override { return "cuda"; }
  int device_index() const noexcept override { return device_; }
  int numa_node() const noexcept override { return numa_node_; }

  void record(EventView event, StreamView stream) override {
    make_current(device_);
    check(cudaEventRecord(native(event), native(stream)), "cudaEventRecord", event, stream);
  }

  void wait(StreamView stream, EventView event) override {
    make_current(device_);
    check(cudaStreamWaitEvent(native(stream), native(event), 0), "cudaStreamWaitEvent", event, stream);
  }

  void synchronize(EventView event) override {
    make_current(device_);
    check(cudaEventSynchronize(native(event)), "cudaEventSynchronize", event);
  }

  void synchronize(StreamView stream) override {
    make_current(device_);
    check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize", stream);
  }

  bool reached(EventView event) override {
    make_current(device_);
    const cudaError_t code = cudaEventQuery(native(event));
    if (code == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check(code, "cudaEventQuery", event);
    return true;
  }

  std::int64_t time_ns(EventView event) override {
    synchronize(event);
    return clock_.time_ns(native(event));
  }

  std::int64_t time_error_ns() override { return clock_.error_ns(); }

  void copy(void* destination, const void* source, std::size_t bytes, CopyKind kind,
            StreamView stream) override {
    make_current(device_);
    const bool up = kind == CopyKind::kHostToDevice;
    auto* to = static_cast<std::byte*>(destination);
    auto* from = static_cast<const std::byte*>(source);
    // The driver refuses a copy that spans two registrations.
    for (std::size_t piece; bytes > 0; bytes -= piece, to += piece, from += piece) {
      piece = pieces_.in_one_piece(up ? from : to, bytes);
      const cudaError_t code = cudaMemcpyAsync(
          to, from, piece, up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost, native(stream));
      if (code != cudaSuccess) {
        throw_cuda(code, "cudaMemcpyAsync of " + std::to_string(piece) + " bytes " +
                             (up ? "to the device" : "to the host") + " on " + names_.of(stream));
      }
    }
  }

  void update(const UpdateStep& step, const UpdateSpan& span, int* non_finite, StreamView stream) override {
    make_current(device_);
    const auto queue = span.rule == Rule::kLion ? queue_lion : queue_adamw;
    queue(step, span, non_finite, stream.handle);
  }

  void poison(void*, std::size_t) override {}
  void random_delay() override {}

  bool pin(void* host, std::size_t bytes) noexcept override {
    if (!pin_budget_.take(bytes)) return false;
    std::size_t done = 0;
    if (cudaSetDevice(device_) == cudaSuccess) {
      while (done < bytes) {
        const std::size_t piece = std::min(kPinPieceBytes, bytes - done);
        if (cudaHostRegister(static_cast<std::byte*>(host) + done, piece, cudaHostRegisterDefault) !=
            cudaSuccess) {
          break;
        }
        pieces_.add(static_cast<std::byte*>(host) + done, piece);
        done += piece;
      }
      if (done == bytes) return true;
    }
    unregister(host, done);
    pin_budget_.give_back(bytes);
    return false;
  }

  void unpin(void* host, std::size_t bytes) noexcept override {
    cudaSetDevice(device_);
    unregister(host, bytes);
    pin_budget_.give_back(bytes);
  }

  DeviceMemory device_memory() override {
    make_current(device_);
    DeviceMemory memory{};
    check_cuda(cudaMemGetInfo(&memory.free_bytes, &memory.total_bytes), "cudaMemGetInfo");
    return memory;
  }

 protected:
  StreamView new_stream(const std::string& name) override {
    make_current(device_);
    cudaStream_t stream = nullptr;
    // Non-blocking: a blocking one would wait for whatever torch puts on the default stream.
    if (const cudaError_t code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)) {
      throw_cuda(code, "cudaStreamCreateWithFlags for stream " + name);
    }
    const StreamView view{reinterpret_cast<std::uintptr_t>(stream)};
    names_.set(view.handle, name);
    return view;
  }

  EventView new_event(const std::string& name) override {
    make_current(device_);
    cudaEvent_t event = nullptr;
    // Blocking: a thread that waits sleeps, and leaves its core to the update.
    if (const cudaError_t code = cudaEventCreateWithFlags(&event, cudaEventBlockingSync)) {
      throw_cuda(code, "cudaEventCreateWithFlags for event " + name);
    }
    const EventView view{reinterpret_cast<std::uintptr_t>(event)};
    names_.set(view.handle, name);
    return view;
  }

  void destroy(StreamView stream) noexcept override {
    if (process_ != getpid()) return;  // CUDA does not follow into a forked child
    cudaSetDevice(device_);
    cudaStreamSynchronize(native(stream));
    cudaStreamDestroy(native(stream));
    cudaGetLastError();
    names_.forget(stream.handle);
  }

  void destroy(EventView event) noexcept override {
    if (process_ != getpid()) return;
    cudaSetDevice(device_);
    cudaEventDestroy(native(event));
    cudaGetLastError();
    names_.forget(event.handle);
  }

 private:
  // Words for the message are put together only when there is something to say.
  template <class... Views>
  void check(cudaError_t code, const char* call, Views... views) {
    if (code == cudaSuccess) return;
    throw_cuda(code, call + (std::string() + ... + (" of " + names_.of(views))));
  }

  // In the pieces of pin().
  void unregister(void* host, std::size_t bytes) noexcept {
    for (std::size_t begin = 0; begin < bytes; begin += kPinPieceBytes) {
      pieces_.remove(static_cast<std::byte*>(host) + begin);
      cudaHostUnregister(static_cast<std::byte*>(host) + begin);
    }
    cudaGetLastError();
  }

  const pid_t process_ = getpid();
  const int device_;
  const int numa_node_;
  PinBudget pin_budget_;
  PinnedPieces pieces_;
  Names names_;
  CudaClock clock_;  // after device_, whose initialisation makes the device current
};

}  // namespace

int cuda_device_count() noexcept {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

std::string cuda_unavailable_reason() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code == cudaSuccess) return count > 0 ? "" : "the driver shows no device";
  cudaGetLastError();
  return std::string("cudaGetDeviceCount: ") + cudaGetErrorString(code) + " (code " +
         std::to_string(static_cast<int>(code)) + ")";
}

std::unique_ptr<Backend> make_cuda_backend(int device_index, const CudaBackendOptions& options) {
  const int count = cuda_device_count();
  if (count == 0) throw OutsideError("no CUDA device: " + cuda_unavailable_reason());
  if (device_index < 0 || device_index >= count) {
    throw CallerError("CUDA device " + std::to_string(device_index) + " does not exist: there are " +
                      std::to_string(count) + ", counted from 0");
  }
  return std::make_unique<CudaBackend>(device_index, options);
}

}  // namespace megatrain
