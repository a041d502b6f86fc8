#include "stream/engine.h"

#include <utility>

#include "base/error.h"

namespace megatrain {

Engine::Engine(std::shared_ptr<TileStore> store, const EngineOptions& options)
    : store_(std::move(store)),
      backend_(store_->backend()),
      events_(backend_),
      gate_([this] { monitor_.notify(); }),
      trace_(backend_, options.trace_capacity),
      staging_up_(*store_, events_, store_->staging_bytes() / 2),
      staging_down_(*store_, events_, store_->staging_bytes() / 2),
      parts_{*store_,           gate_,  monitor_,
             events_,           trace_, staging_up_,
             staging_down_,     step_,  wait_from_name(options.without_wait),
             copy_by_parameter_},
      kept_(parts_),
      resident_(parts_) {
  try {
    prefetcher_ = std::make_unique<Prefetcher>(parts_);
    drain_ = std::make_unique<GradientDrain>(parts_);
    updates_ = std::make_unique<UpdateQueue>(parts_);
  } catch (...) {
    monitor_.stop();  // so that the destructors of those that were started can join
    throw;
  }
}

Engine::~Engine() { finish(); }

void Engine::check() {
  monitor_.rethrow_failure();
  if (closed_) throw CallerError("the engine is closed");
}

int Engine::add_slot(std::byte* device, std::size_t bytes, StreamView stream, int only_tile) {
  check();
  return prefetcher_->add_slot(device, bytes, stream, only_tile);
}

void Engine::expect(const std::vector<int>& tiles) {
  check();
  prefetcher_->expect(tiles);
}

int Engine::acquire(int tile, StreamView stream) {
  check();
  return prefetcher_->acquire(tile, stream);
}

void Engine::release(int slot, StreamView stream) {
  check();
  prefetcher_->release(slot, stream);
}

void Engine::split(int tile, std::vector<std::vector<ElementRange>> parts) {
  check();
  prefetcher_->split(tile, std::move(parts));
}

void Engine::want(int tile, const std::vector<int>& parts) {
  check();
  prefetcher_->want(tile, parts);
}

void Engine::bring(int slot, const std::vector<int>& parts, StreamView stream) {
  check();
  prefetcher_->bring(slot, parts, stream);
}

std::int64_t Engine::version(int tile) {
  check();
  store_->layout(tile);
  return gate_.version(tile);
}

void Engine::mark_edited(int tile) {
  check();
  store_->layout(tile);
  gate_.mark_edited(tile);
  monitor_.notify();  // slots with the tile are stale: what is expected has to come up again
}

std::int64_t Engine::drain(const SectionCopy& copy, StreamView stream) {
  check();
  return drain_->drain(copy, stream);
}

void Engine::wait_drain(std::int64_t ticket, StreamView stream) {
  check();
  drain_->wait_drain(ticket, stream);
}

void Engine::fetch(const SectionCopy& copy, StreamView stream) {
  check();
  drain_->fetch(copy, stream);
}

void Engine::clear_device() {
  synchronize();
  prefetcher_->remove_slots();
  resident_.clear();
  kept_.free_unused();
}

void Engine::copy_by_parameter(bool on) {
  check();
  copy_by_parameter_ = on;
}

void Engine::add_resident(int tile, std::byte* device, int* non_finite) {
  check();
  resident_.add(tile, device, non_finite);
}

void Engine::use_resident(int tile, StreamView stream) {
  check();
  resident_.use(tile, stream);
}

KeptStore& Engine::kept() {
  check();
  return kept_;
}

void Engine::update(int tile, std::vector<ParameterUpdate> updates, float gradient_scale,
                    std::int64_t priority, StreamView stream) {
  check();
  for (ParameterUpdate& update : updates) update.step.gradient_scale = gradient_scale;
  if (resident_.has(tile)) {
    resident_.update(tile, updates, stream);
  } else {
    updates_->push(tile, std::move(updates), priority);
  }
}

void Engine::wait_updates() {
  check();
  updates_->wait_idle();
  {
    Monitor::Lock lock = monitor_.lock();
    monitor_.wait(lock, [&] { return !gate_.any_held(); });
  }
  resident_.write_back();
}

void Engine::hold(const std::vector<int>& tiles) {
  for (const int tile : tiles) store_->layout(tile);  // throws for a tile that is not there
  wait_updates();
  for (const int tile : tiles) gate_.hold(tile);
}

void Engine::release_all(StreamView stream) {
  check();
  prefetcher_->release_all(stream);
  compute_.begin = nullptr;
}

bool Engine::updates_pending() {
  check();
  return !updates_->idle();
}

void Engine::synchronize() {
  check();
  updates_->wait_idle();
  drain_->wait_queued();
  drain_->synchronize();
  prefetcher_->synchronize();
  kept_.synchronize();
}

void Engine::begin_step(std::int64_t step) {
  check();
  step_ = step;
}

void Engine::begin_compute(int tile, StreamView stream) {
  check();
  compute_ = {tile, step_, events_.record(stream)};
}

void Engine::end_compute(StreamView stream) {
  check();
  if (!compute_.begin) throw CallerError("end_compute without begin_compute");
  TraceSpan span;
  span.kind = SpanKind::kCompute;
  span.tile = compute_.tile;
  span.step = compute_.step;
  trace_.add(span, std::exchange(compute_.begin, nullptr), events_.record(stream));
}

std::vector<TraceSpan> Engine::trace() {
  synchronize();
  return trace_.spans();
}

void Engine::clear_trace() {
  check();
  trace_.clear();
}

WaitTotals Engine::wait_totals() {
  check();
  return trace_.wait_totals();
}

void Engine::close() {
  if (const std::exception_ptr failure = finish()) std::rethrow_exception(failure);
}

std::exception_ptr Engine::finish() noexcept {
  std::exception_ptr unseen;
  if (std::exchange(closed_, true)) return unseen;
  const bool seen = monitor_.failure_seen();
  try {
    updates_->wait_idle();
    drain_->wait_queued();
  } catch (...) {
    if (!seen) unseen = std::current_exception();  // a worker failed: what is queued stays undone
  }
  monitor_.stop();
  prefetcher_->join();
  drain_->join();
  updates_->join();
  // The caller may free slots and buffers now.
  try {
    prefetcher_->synchronize();
    drain_->synchronize();
    kept_.synchronize();
    resident_.synchronize();
  } catch (...) {
    if (!seen && !unseen) unseen = std::current_exception();
  }
  return unseen;
}

}  // namespace megatrain
