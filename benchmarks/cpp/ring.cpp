#include "ring.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "optim/adamw.h"
#include "stream/tile_update.h"

namespace megatrain::bench {
namespace {

constexpr std::uint16_t kGradient = 0x3c24;  // 0.01 in bf16
constexpr UpdateStep kStep{.lr = 1e-3, .weight_decay = 0.01};
constexpr std::int64_t kClockErrorNs = 50'000;  // beside the error that the backend knows of

float first_value(int tile) { return 0.1f * static_cast<float>(tile + 1); }

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

bool on_cuda(const Backend& backend) { return std::string(backend.name()) == "cuda"; }

std::shared_ptr<TileStore> make_store(const std::shared_ptr<Backend>& backend, const RingShape& shape) {
  auto store = std::make_shared<TileStore>(backend, TileStoreOptions{.threads = shape.threads});
  std::vector<ParameterShape> parameters;
  for (const std::int64_t elements : shape.parameters) parameters.push_back({elements, true});
  const TileLayout layout(TileFormat::kBf16Split, parameters);
  for (int tile = 0; tile < shape.layers; ++tile) {
    store->add(layout);
    for (int p = 0; p < layout.parameters(); ++p) {
      const std::vector<float> values(static_cast<std::size_t>(layout.parameter(p).elements),
                                      first_value(tile));
      static_cast<void>(store->set_master(tile, p, values.data()));
    }
  }
  return store;
}

}  // namespace

RingMemory::RingMemory(Backend& backend, std::size_t bytes) {
  if (on_cuda(backend)) {
    device_ = std::make_unique<DeviceMemory>(backend.device_index(), bytes);
  } else {
    host_ = std::make_unique<std::byte[]>(bytes);
  }
}

Ring::Ring(std::shared_ptr<Backend> backend, const RingShape& shape)
    : backend_(std::move(backend)), shape_(shape), store_(make_store(backend_, shape)) {
  const std::size_t weight_bytes = store_->section(0, Section::kWeights).bytes;
  const std::size_t gradient_bytes = store_->section(0, Section::kGradients).bytes;
  if (on_cuda(*backend_)) stream_ = backend_->create_stream("bench-compute");
  HostBuffer gradient = store_->allocate(gradient_bytes);
  std::fill_n(reinterpret_cast<std::uint16_t*>(gradient.data()), gradient_bytes / 2, kGradient);
  const Stream copies = backend_->create_stream("bench-setup");
  for (int i = 0; i < 2; ++i) {
    gradients_.push_back({std::make_unique<RingMemory>(*backend_, gradient_bytes), -1});
    backend_->copy(gradients_.back().memory->data(), gradient.data(), gradient_bytes, CopyKind::kHostToDevice,
                   copies);
  }
  backend_->synchronize(copies.view());
  engine_ = std::make_unique<Engine>(store_);
  for (int i = 0; i < shape.slots; ++i) {
    slots_.push_back(std::make_unique<RingMemory>(*backend_, weight_bytes));
    engine_->add_slot(slots_.back()->data(), weight_bytes, stream_);
  }
}

void Ring::compute(std::int64_t ns) {
  if (ns <= 0) return;
  if (on_cuda(*backend_)) {
    cuda_busy(backend_->device_index(), stream_, ns);
  } else {
    std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
  }
}

void Ring::forward(int tile, const RingRun& run) {
  const int slot = engine_->acquire(tile, stream_);
  engine_->begin_compute(tile, stream_);
  compute(run.forward_ns);
  engine_->end_compute(stream_);
  engine_->release(slot, stream_);
}

void Ring::backward(int tile, const RingRun& run) {
  const int slot = engine_->acquire(tile, stream_);
  GradientBuffer& gradient = gradients_[next_gradient_++ % gradients_.size()];
  if (gradient.ticket >= 0) engine_->wait_drain(gradient.ticket, stream_);
  engine_->begin_compute(tile, stream_);
  compute(run.backward_ns);
  engine_->end_compute(stream_);
  engine_->release(slot, stream_);
  SectionCopy copy;
  copy.tile = tile;
  copy.elements = store_->layout(tile).trainable_elements();
  copy.device = gradient.memory->data();
  gradient.ticket = engine_->drain(copy, stream_);
}

std::vector<ParameterUpdate> Ring::next_updates() {
  UpdateStep step = kStep;
  step.step = step_;
  std::vector<ParameterUpdate> updates;
  for (int p = 0; p < static_cast<int>(shape_.parameters.size()); ++p) updates.push_back({p, step});
  return updates;
}

// The first tiles of the next forward first.
void Ring::update(int tile) { engine_->update(tile, next_updates(), 1.0f, tile); }

RingResult Ring::run(const RingRun& run) {
  std::vector<int> order;
  for (int tile = 0; tile < shape_.layers; ++tile) order.push_back(tile);
  for (int tile = shape_.layers - 1; tile >= 0; --tile) order.push_back(tile);
  RingResult result;
  WaitTotals waits_before;
  auto last = std::chrono::steady_clock::now();
  // Step 0 fills the pipeline.
  for (int i = 0; i <= run.steps; ++i) {
    ++step_;
    engine_->begin_step(step_);
    engine_->expect(order);
    for (int tile = 0; tile < shape_.layers; ++tile) forward(tile, run);
    for (int tile = shape_.layers - 1; tile >= 0; --tile) {
      backward(tile, run);
      if (run.updates == UpdateTime::kAsGradientsLand) update(tile);
    }
    // As a training step does for the norm of the gradients.
    if (on_cuda(*backend_)) backend_->synchronize(stream_.view());
    if (run.updates == UpdateTime::kAfterBackward) {
      for (int tile = 0; tile < shape_.layers; ++tile) update(tile);
    }
    const auto now = std::chrono::steady_clock::now();
    if (i > 0) result.step_seconds.push_back(std::chrono::duration<double>(now - last).count());
    last = now;
    if (i == 0) {
      engine_->clear_trace();
      waits_before = engine_->wait_totals();
    }
  }
  const WaitTotals waits = engine_->wait_totals();
  result.wait_seconds = static_cast<double>(waits.up_ns - waits_before.up_ns) / 1e9 / run.steps;
  engine_->synchronize();
  count(result, run);
  return result;
}

void Ring::count(RingResult& result, const RingRun& run) {
  const std::vector<TraceSpan> spans = engine_->trace();
  engine_->clear_trace();
  const std::int64_t first_step = step_ - run.steps + 1;
  const std::int64_t error_ns = kClockErrorNs + 2 * backend_->time_error_ns();
  std::int64_t updates = 0, overlapping = 0;
  // By tile: when its gradients had landed, when its update had ended.
  std::map<int, std::int64_t> landed_ns, updated_ns;
  for (const TraceSpan& span : spans) {
    const bool counted = span.step >= first_step;
    switch (span.kind) {
      case SpanKind::kCopyUp:
        if (counted) result.up_bytes += static_cast<double>(span.bytes) / run.steps;
        if (span.begin_ns + error_ns < updated_ns[span.tile]) ++result.disorder;
        break;
      case SpanKind::kCopyDown:
        if (counted) result.down_bytes += static_cast<double>(span.bytes) / run.steps;
        landed_ns[span.tile] = span.end_ns;
        break;
      case SpanKind::kUpdate: {
        ++updates;
        overlapping += std::any_of(spans.begin(), spans.end(), [&](const TraceSpan& other) {
          return other.kind == SpanKind::kCompute && other.begin_ns < span.end_ns &&
                 span.begin_ns < other.end_ns;
        });
        if (span.begin_ns + error_ns < landed_ns[span.tile]) ++result.disorder;
        updated_ns[span.tile] = span.end_ns;
        break;
      }
      case SpanKind::kCompute:
      case SpanKind::kWait:
      case SpanKind::kWaitDown:
        break;
    }
  }
  if (updates > 0)
    result.updates_in_compute = static_cast<double>(overlapping) / static_cast<double>(updates);
}

double Ring::copy_alone(double bytes, CopyKind kind) {
  const bool up = kind == CopyKind::kHostToDevice;
  const Stream stream = backend_->create_stream("bench-alone");
  RingMemory device(*backend_, store_->section(0, Section::kWeights).bytes);
  const auto begin = std::chrono::steady_clock::now();
  double copied = 0;
  for (int tile = 0; copied < bytes; tile = (tile + 1) % shape_.layers) {
    const TileStore::SectionView host = store_->section(tile, up ? Section::kWeights : Section::kGradients);
    backend_->copy(up ? device.data() : host.data, up ? host.data : device.data(), host.bytes, kind, stream);
    copied += static_cast<double>(host.bytes);
  }
  backend_->synchronize(stream.view());
  return seconds_since(begin) * bytes / std::max(copied, 1.0);
}

double Ring::up_alone(double bytes) { return copy_alone(bytes, CopyKind::kHostToDevice); }
double Ring::down_alone(double bytes) { return copy_alone(bytes, CopyKind::kDeviceToHost); }

double Ring::updates_alone() {
  for (int tile = 0; tile < shape_.layers; ++tile) {
    const TileStore::SectionView section = store_->section(tile, Section::kGradients);
    std::fill_n(reinterpret_cast<std::uint16_t*>(section.data), section.bytes / 2, kGradient);
  }
  ++step_;
  const auto begin = std::chrono::steady_clock::now();
  for (int tile = 0; tile < shape_.layers; ++tile) {
    update_tile(*store_, tile, next_updates());
    engine_->mark_edited(tile);
  }
  return seconds_since(begin);
}

void Ring::verify() {
  for (int tile = 0; tile < shape_.layers; ++tile) {
    // One parameter, updated as often as all were.
    const float value = first_value(tile);
    std::uint16_t high = 0;
    std::int16_t low = 0;
    float exp_avg = 0, exp_avg_sq = 0;
    static_cast<void>(split_master(&value, &high, &low, 1));
    for (UpdateStep step = kStep; step.step <= step_; ++step.step) {
      static_cast<void>(apply_update(Isa::kScalar, step,
                                     AdamWSplitSpan{&high, &low, &kGradient, &exp_avg, &exp_avg_sq, 1}));
    }
    float expected = 0;
    join_master(&high, &low, &expected, 1);
    const TileLayout& layout = store_->layout(tile);
    for (int p = 0; p < layout.parameters(); ++p) {
      std::vector<float> master(static_cast<std::size_t>(layout.parameter(p).elements));
      store_->get_master(tile, p, master.data());
      for (const float got : master) {
        if (got == expected) continue;
        throw OutsideError("layer " + std::to_string(tile) + ", parameter " + std::to_string(p) + " is " +
                           std::to_string(got) + " after " + std::to_string(step_) + " updates, not " +
                           std::to_string(expected));
      }
    }
  }
}

}  // namespace megatrain::bench
