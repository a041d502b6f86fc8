#include "base/thread_pool.h"

#include <pthread.h>
#include <unistd.h>

#include <cassert>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"

namespace megatrain {

struct ThreadPool::State {
  const pid_t process = getpid();
  unsigned workers = 0;
  std::vector<std::thread> threads;

  std::mutex mutex;  // guards all below
  std::condition_variable started, finished;
  const std::function<void(unsigned, unsigned)>* body = nullptr;
  std::uint64_t generation = 0;  // counts runs: a worker that wakes late still sees that it has work
  unsigned running = 0;
  bool stopping = false;
  std::exception_ptr failure;

  void work(unsigned worker) {
    pthread_setname_np(pthread_self(), ("mt-pool-" + std::to_string(worker)).c_str());
    std::uint64_t done = 0;
    std::unique_lock lock(mutex);
    while (true) {
      started.wait(lock, [&] { return stopping || generation != done; });
      if (stopping) return;
      done = generation;
      const auto* current = body;
      lock.unlock();
      std::exception_ptr thrown;
      try {
        (*current)(worker, workers);
      } catch (...) {
        thrown = std::current_exception();
      }
      lock.lock();
      if (thrown && !failure) failure = std::move(thrown);
      if (--running == 0) finished.notify_one();
    }
  }

  void stop() {
    {
      std::lock_guard lock(mutex);
      stopping = true;
    }
    started.notify_all();
    for (std::thread& thread : threads) thread.join();
    threads.clear();
  }
};

ThreadPool::ThreadPool(unsigned workers) : state_(std::make_unique<State>()) {
  if (workers < 1) throw CallerError("a thread pool of 0 workers; at least 1 is needed");
  state_->workers = workers;
  try {
    state_->threads.reserve(workers);
    for (unsigned i = 0; i < workers; ++i) {
      state_->threads.emplace_back([state = state_.get(), i] { state->work(i); });
    }
  } catch (const std::system_error& error) {
    const std::size_t started = state_->threads.size();
    state_->stop();
    throw OutsideError("starting worker thread " + std::to_string(started + 1) + " of " +
                       std::to_string(workers) + " failed: " + error.what());
  }
}

ThreadPool::~ThreadPool() {
  // In a forked child the threads do not exist; joining them would wait for ever, and so would
  // destroying the condition variable they sleep on. The child leaves the state behind.
  if (state_->process != getpid()) {
    static_cast<void>(state_.release());
    return;
  }
  state_->stop();
}

unsigned ThreadPool::workers() const noexcept { return state_->workers; }

void ThreadPool::run(const std::function<void(unsigned worker, unsigned workers)>& body) {
  State& state = *state_;
  if (state.process != getpid()) {
    throw OutsideError("the thread pool was started by process " + std::to_string(state.process) +
                       " and its threads did not follow into process " + std::to_string(getpid()) +
                       "; start it after the fork");
  }
  std::unique_lock lock(state.mutex);
  assert(state.running == 0 && "one call of run at a time");
  state.body = &body;
  state.running = state.workers;
  state.failure = nullptr;
  ++state.generation;
  state.started.notify_all();
  state.finished.wait(lock, [&] { return state.running == 0; });
  state.body = nullptr;
  if (state.failure) std::rethrow_exception(std::exchange(state.failure, nullptr));
}

}  // namespace megatrain
