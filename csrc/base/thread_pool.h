// A fixed set of sleeping worker threads for data-parallel passes over memory. Owned by whoever
// starts it (the engine, a benchmark), which is also the only one to call `run`, one call at a time.
#pragma once

#include <functional>
#include <memory>

namespace megatrain {

class ThreadPool {
 public:
  // Starts `workers` threads (at least 1). They are named "mt-pool-<n>" for profilers.
  explicit ThreadPool(unsigned workers);
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  ~ThreadPool();  // joins

  unsigned workers() const noexcept;

  // Calls body(worker, workers) once in each worker and returns when all have returned. The first
  // exception of a worker is rethrown here. Throws OutsideError in a process forked after the pool
  // was started, since the threads did not follow.
  void run(const std::function<void(unsigned worker, unsigned workers)>& body);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace megatrain
