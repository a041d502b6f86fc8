// A backend under the test's control: the host backend, with hooks where the engine's worker threads
// pass by, so that a test can hold a thread at a known point or make a call of it fail.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/backend.h"
#include "stream/engine.h"

namespace megatrain::testing {

// Closed until opened; passing threads wait.
class Latch {
 public:
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
  }
  void wait_for_visitor() {  // until some thread has come to the latch
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return waiting_ > 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
  int waiting_ = 0;
};

class ControlledBackend final : public Backend {
 public:
  explicit ControlledBackend(const HostBackendOptions& options = {}) : inner_(make_host_backend(options)) {}

  // Set before the engine is made; called by its threads.
  std::function<void()> before_update = [] {};
  std::function<void(CopyKind)> before_copy = [](CopyKind) {};
  std::function<void(const void*, const void*)> on_copy = [](const void*, const void*) {};  // to, from
  std::function<void(EventView)> on_record = [](EventView) {};
  std::function<bool(EventView)> seems_ahead = [](EventView) { return false; };  // not reached() yet

  const char* name() const noexcept override { return inner_->name(); }
  int device_index() const noexcept override { return inner_->device_index(); }
  int numa_node() const noexcept override { return inner_->numa_node(); }
  void record(EventView event, StreamView stream) override {
    on_record(event);
    inner_->record(event, stream);
  }
  void wait(StreamView stream, EventView event) override { inner_->wait(stream, event); }
  void synchronize(EventView event) override { inner_->synchronize(event); }
  void synchronize(StreamView stream) override { inner_->synchronize(stream); }
  bool reached(EventView event) override { return !seems_ahead(event) && inner_->reached(event); }
  std::int64_t time_ns(EventView event) override { return inner_->time_ns(event); }
  void copy(void* destination, const void* source, std::size_t bytes, CopyKind kind,
            StreamView stream) override {
    before_copy(kind);
    on_copy(destination, source);
    inner_->copy(destination, source, bytes, kind, stream);
  }
  void update(const UpdateStep& step, const UpdateSpan& span, int* non_finite, StreamView stream) override {
    inner_->update(step, span, non_finite, stream);
  }
  void poison(void* device, std::size_t bytes) override { inner_->poison(device, bytes); }
  void random_delay() override {
    before_update();
    inner_->random_delay();
  }
  bool pin(void* host, std::size_t bytes) noexcept override { return inner_->pin(host, bytes); }
  void unpin(void* host, std::size_t bytes) noexcept override { inner_->unpin(host, bytes); }
  DeviceMemory device_memory() override { return inner_->device_memory(); }

 protected:
  // The inner backend knows a view by its handle alone, so its owners can be moved to a list here.
  StreamView new_stream(const std::string& name) override {
    std::lock_guard lock(mutex_);
    streams_.push_back(inner_->create_stream(name));
    return streams_.back().view();
  }
  EventView new_event(const std::string& name) override {
    std::lock_guard lock(mutex_);
    events_.push_back(inner_->create_event(name));
    return events_.back().view();
  }
  void destroy(StreamView stream) noexcept override { inner_->synchronize(stream); }
  void destroy(EventView) noexcept override {}

 private:
  std::unique_ptr<Backend> inner_;
  std::mutex mutex_;
  std::vector<Stream> streams_;
  std::vector<Event> events_;
};

// An engine over fp32 tiles of one trainable parameter each, with its slots and a gradient buffer.
// Everything runs on stream 0, the calling thread.
struct SmallEngine {
  static constexpr int kElements = 64;

  SmallEngine(std::shared_ptr<Backend> backend, int tiles, int slots, const EngineOptions& options = {})
      : store(std::make_shared<TileStore>(std::move(backend),
                                          TileStoreOptions{.threads = 1, .isa = "", .staging_bytes = 65536})),
        memory(static_cast<std::size_t>(slots), std::vector<float>(kElements)),
        gradient(kElements, 1.0f) {
    for (int tile = 0; tile < tiles; ++tile) {
      store->add(TileLayout(TileFormat::kFp32, {{kElements, true}}));
      const std::vector<float> master(kElements, static_cast<float>(tile + 1));
      static_cast<void>(store->set_master(tile, 0, master.data()));
    }
    engine = std::make_unique<Engine>(store, options);
    for (auto& slot : memory) {
      engine->add_slot(reinterpret_cast<std::byte*>(slot.data()), slot.size() * sizeof(float), {});
    }
  }

  // Acquires, reads, releases: the first weight of the tile.
  float read(int tile) {
    const int slot = engine->acquire(tile, {});
    const float value = memory[static_cast<std::size_t>(slot)][0];
    engine->release(slot, {});
    return value;
  }
  float host_weight(int tile) const {
    return *reinterpret_cast<const float*>(store->section(tile, Section::kWeights).data);
  }
  std::int64_t drain(int tile) {
    return engine->drain(
        {tile, Section::kGradients, 0, kElements, reinterpret_cast<std::byte*>(gradient.data())}, {});
  }
  // Pure decay: a step with lr 1 and decay 0.5 halves the weight where the gradient is zero.
  void halve(int tile, std::int64_t priority = 0) {
    UpdateStep step;
    step.lr = 1;
    step.weight_decay = 0.5;
    engine->update(tile, {{0, step}}, 1.0f, priority);
  }

  std::shared_ptr<TileStore> store;
  std::vector<std::vector<float>> memory;
  std::vector<float> gradient;
  std::unique_ptr<Engine> engine;
};

template <class Error>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing of that kind was thrown";
}

}  // namespace megatrain::testing
