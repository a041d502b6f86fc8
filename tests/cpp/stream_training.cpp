#include "stream_training.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "base/error.h"
#include "device_memory.h"
#include "optim_data.h"
#include "stream/engine.h"
#include "tile_span.h"

namespace megatrain::testing {
namespace {

using Bytes = std::vector<std::byte>;
constexpr int kFrozen = 2;            // the index of the frozen parameter
constexpr int kForwardParameter = 3;  // the one that update_in_forward updates
constexpr float kGradientScale = 0.5f;

TileLayout layout_of(const TrainingOptions& options, int tile) {
  return TileLayout(options.format, {{1031 + 37 * tile, true}, {0, true}, {64 + tile, false}, {97, true}});
}

std::size_t width(const TrainingOptions& options) { return element_bytes(options.format, Section::kWeights); }

// Values of the width of the weights: bf16 or fp32.
Bytes random_elements(const TrainingOptions& options, std::int64_t count, std::uint64_t seed) {
  Values values(seed);
  Bytes bytes(static_cast<std::size_t>(count) * width(options));
  for (std::int64_t i = 0; i < count; ++i) {
    const float value = values.normal(0.1f);
    const std::uint16_t narrow = to_bf16(value);
    const void* source =
        options.format.weights == WeightFormat::kFp32 ? static_cast<const void*>(&value) : &narrow;
    std::memcpy(bytes.data() + static_cast<std::size_t>(i) * width(options), source, width(options));
  }
  return bytes;
}

std::vector<float> master_of(const TrainingOptions& options, int tile, int parameter) {
  Values values(static_cast<std::uint64_t>(1000 + 10 * tile + parameter));
  std::vector<float> master(static_cast<std::size_t>(layout_of(options, tile).parameter(parameter).elements));
  for (float& value : master) value = values.normal(1.0f);
  return master;
}

Bytes gradient_table(const TrainingOptions& options, int step, int tile) {
  return random_elements(options, layout_of(options, tile).trainable_elements(),
                         static_cast<std::uint64_t>(100 * step + tile));
}

UpdateStep hyperparameters(std::int64_t step) {
  return {.lr = 0.01,
          .beta1 = 0.9,
          .beta2 = 0.99,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .step = step,
          .gradient_scale = kGradientScale};
}

// Steps are counted per parameter.
class StepCounts {
 public:
  std::vector<ParameterUpdate> next(int tile, const std::vector<int>& parameters) {
    std::vector<ParameterUpdate> updates;
    for (const int parameter : parameters) {
      updates.push_back({parameter, hyperparameters(++counts_[{tile, parameter}])});
    }
    return updates;
  }

 private:
  std::map<std::pair<int, int>, std::int64_t> counts_;
};

// One run, so that the two ways of training share the order of what they do.
class Run {
 public:
  explicit Run(const TrainingOptions& options) : options_(options) {}
  virtual ~Run() = default;

  void run() {
    const int last = options_.tiles - 1;
    for (int step = 0; step < options_.steps; ++step) {
      begin_step(step);
      for (int tile = 0; tile <= last; ++tile) {
        forward(tile);
        if (options_.update_in_forward) update(tile, counts_.next(tile, {kForwardParameter}));
      }
      for (int tile = last; tile >= 0; --tile) {
        backward(tile, gradient_table(options_, step, tile));
        if (options_.update_in_backward) update(tile, counts_.next(tile, {3, 0, 1}));
      }
      if (options_.update_in_backward) continue;
      for (int tile = 0; tile <= last; ++tile) update(tile, counts_.next(tile, {3, 0, 1}));
    }
  }

 protected:
  virtual void begin_step(int step) = 0;
  virtual void forward(int tile) = 0;
  virtual void backward(int tile, const Bytes& table) = 0;
  virtual void update(int tile, std::vector<ParameterUpdate> updates) = 0;

  // The part of the gradient that is the weights.
  std::size_t own_bytes(int tile) const {
    return static_cast<std::size_t>(layout_of(options_, tile).trainable_elements() / 2) * width(options_);
  }

  const TrainingOptions options_;
  StepCounts counts_;
};

// What both results hold of a tile; gradients are left out, since nothing reads them any more.
constexpr Section kState[] = {Section::kWeights,  Section::kMasterLow,       Section::kExpAvg,
                              Section::kExpAvgSq, Section::kExpAvgExponents, Section::kExpAvgSqExponents};

class SynchronousRun : public Run {
 public:
  explicit SynchronousRun(const TrainingOptions& options) : Run(options) {
    for (int tile = 0; tile < options.tiles; ++tile) {
      const TileLayout layout = layout_of(options, tile);
      tiles_.emplace_back(layout.bytes());
      for (int p = 0; p < layout.parameters(); ++p) load(tile, p, master_of(options, tile, p));
    }
  }

  TrainingResult result() const {
    TrainingResult result;
    result.seen = seen_;
    for (int tile = 0; tile < options_.tiles; ++tile) {
      for (const Section section : kState) {
        const TileLayout::Place place = layout_of(options_, tile).section(section);
        const std::byte* begin = tiles_[static_cast<std::size_t>(tile)].data() + place.offset;
        result.tiles.emplace_back(begin, begin + place.bytes);
      }
    }
    return result;
  }

 private:
  template <class T>
  T* at(int tile, Section section, std::int64_t element) {
    const std::size_t offset = layout_of(options_, tile).section(section).offset;
    return reinterpret_cast<T*>(tiles_[static_cast<std::size_t>(tile)].data() + offset) + element;
  }

  void load(int tile, int parameter, const std::vector<float>& master) {
    const std::int64_t first = layout_of(options_, tile).element_offset(parameter);
    const auto count = static_cast<std::int64_t>(master.size());
    if (options_.format.weights == WeightFormat::kFp32) {
      std::copy(master.begin(), master.end(), at<float>(tile, Section::kWeights, first));
      return;
    }
    std::vector<std::int16_t> low(master.size());
    static_cast<void>(
        split_master(master.data(), at<std::uint16_t>(tile, Section::kWeights, first), low.data(), count));
    if (parameter == kFrozen || options_.format.weights == WeightFormat::kBf16) return;
    std::copy(low.begin(), low.end(), at<std::int16_t>(tile, Section::kMasterLow, first));
  }

  void begin_step(int) override {}

  void forward(int tile) override {
    const std::byte* weights = at<std::byte>(tile, Section::kWeights, 0);
    seen_.emplace_back(weights, weights + layout_of(options_, tile).section(Section::kWeights).bytes);
  }

  void backward(int tile, const Bytes& table) override {
    forward(tile);
    std::byte* gradients = at<std::byte>(tile, Section::kGradients, 0);
    std::copy(table.begin(), table.end(), gradients);
    std::copy_n(at<std::byte>(tile, Section::kWeights, 0), own_bytes(tile), gradients);
  }

  void update(int tile, std::vector<ParameterUpdate> updates) override {
    for (const ParameterUpdate& update : updates) {
      const ElementRange range = layout_of(options_, tile).range(update.parameter);
      const auto section = [&](Section which) { return at<std::byte>(tile, which, 0); };
      static_cast<void>(
          apply_update(Isa::kScalar, update.step, tile_span(options_.format, section, range, 0)));
    }
  }

  std::vector<Bytes> tiles_, seen_;
};

class EngineRun : public Run {
 public:
  EngineRun(std::shared_ptr<Backend> backend, const TrainingOptions& options)
      : Run(options), backend_(std::move(backend)), store_(make_store(backend_, options)) {
    std::size_t seen_bytes = 0;
    for (int tile = 0; tile < options.tiles; ++tile) seen_bytes += 2 * weight_bytes(tile);
    seen_memory_ = store_->allocate(seen_bytes * static_cast<std::size_t>(options.steps));
    const std::size_t largest = weight_bytes(options.tiles - 1);
    table_memory_ = store_->allocate(largest * static_cast<std::size_t>(options.tiles) *
                                     static_cast<std::size_t>(options.steps));
    gradient_ = std::make_unique<DeviceBuffer>(*backend_, largest);
    for (int i = 0; i < options.slots; ++i) {
      slots_.push_back(std::make_unique<DeviceBuffer>(*backend_, largest));
    }
    compute_ = backend_->create_stream("compute");
    engine_ = std::make_unique<Engine>(store_, EngineOptions{.without_wait = options.without_wait});
    for (const auto& slot : slots_) {
      engine_->add_slot(static_cast<std::byte*>(slot->get()), largest, compute_);
    }
  }

  TrainingResult result() {
    TrainingResult result;
    try {
      run();
      engine_->synchronize();
    } catch (const OutsideError& error) {
      result.error = error.what();
    }
    backend_->synchronize(compute_);
    try {
      engine_->close();
    } catch (const OutsideError& error) {
      if (result.error.empty()) result.error = error.what();
    }
    for (const auto& [data, bytes] : seen_) result.seen.emplace_back(data, data + bytes);
    for (int tile = 0; tile < options_.tiles; ++tile) {
      for (const Section section : kState) {
        const TileStore::SectionView view = store_->section(tile, section);
        result.tiles.emplace_back(view.data, view.data + view.bytes);
      }
    }
    return result;
  }

 private:
  static std::shared_ptr<TileStore> make_store(const std::shared_ptr<Backend>& backend,
                                               const TrainingOptions& options) {
    auto store = std::make_shared<TileStore>(
        backend, TileStoreOptions{.threads = 2, .isa = "", .staging_bytes = options.staging_bytes});
    for (int tile = 0; tile < options.tiles; ++tile) {
      const TileLayout layout = layout_of(options, tile);
      store->add(layout);
      for (int p = 0; p < layout.parameters(); ++p) {
        const std::vector<float> master = master_of(options, tile, p);
        static_cast<void>(store->set_master(tile, p, master.data()));
      }
    }
    return store;
  }

  std::size_t weight_bytes(int tile) const {
    return layout_of(options_, tile).section(Section::kWeights).bytes;
  }

  void begin_step(int step) override {
    engine_->begin_step(step);
    if (options_.guess == Guess::kNone) return;
    std::vector<int> order;
    for (int tile = 0; tile < options_.tiles; ++tile) order.push_back(tile);
    for (int tile = options_.tiles - 1; tile >= 0; --tile) order.push_back(tile);
    if (options_.guess == Guess::kWrong) order = {3, 3, 1, 0, 4, 2, 2};
    engine_->expect(order);
  }

  std::byte* read_weights(int tile) {
    const int slot = engine_->acquire(tile, compute_);
    engine_->begin_compute(tile, compute_);
    std::byte* const out = seen_memory_.data() + seen_used_;
    seen_used_ += weight_bytes(tile);
    seen_.emplace_back(out, weight_bytes(tile));
    backend_->copy(out, slots_[static_cast<std::size_t>(slot)]->get(), weight_bytes(tile),
                   CopyKind::kDeviceToHost, compute_);
    engine_->end_compute(compute_);
    engine_->release(slot, compute_);
    return out;
  }

  void forward(int tile) override { read_weights(tile); }

  void backward(int tile, const Bytes& table) override {
    if (ticket_ >= 0) engine_->wait_drain(ticket_, compute_);
    std::byte* const source = table_memory_.data() + tables_used_;
    tables_used_ += table.size();
    std::copy(table.begin(), table.end(), source);
    backend_->copy(gradient_->get(), source, table.size(), CopyKind::kHostToDevice, compute_);
    const std::byte* const weights = read_weights(tile);
    backend_->copy(gradient_->get(), weights, own_bytes(tile), CopyKind::kHostToDevice, compute_);
    SectionCopy copy;
    copy.tile = tile;
    copy.elements = store_->layout(tile).trainable_elements();
    copy.device = static_cast<std::byte*>(gradient_->get());
    ticket_ = engine_->drain(copy, compute_);
  }

  void update(int tile, std::vector<ParameterUpdate> updates) override {
    engine_->update(tile, std::move(updates), kGradientScale, tile);
  }

  std::shared_ptr<Backend> backend_;
  std::shared_ptr<TileStore> store_;
  HostBuffer seen_memory_, table_memory_;
  std::size_t seen_used_ = 0, tables_used_ = 0;
  std::vector<std::pair<std::byte*, std::size_t>> seen_;
  std::unique_ptr<DeviceBuffer> gradient_;
  std::vector<std::unique_ptr<DeviceBuffer>> slots_;
  Stream compute_;
  std::unique_ptr<Engine> engine_;
  std::int64_t ticket_ = -1;
};

}  // namespace

TrainingResult train(std::shared_ptr<Backend> backend, const TrainingOptions& options) {
  return EngineRun(std::move(backend), options).result();
}

TrainingResult train_synchronously(const TrainingOptions& options) {
  SynchronousRun run(options);
  run.run();
  return run.result();
}

}  // namespace megatrain::testing
