// One mutex and one condition variable for the engine's queues, and the failure of a worker thread.
// Everything here is rare (a few changes a layer), so one lock for all is simpler than many and
// cannot be taken in the wrong order: the locks of gate, trace, pool and store are leaves below it.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace megatrain {

class Monitor {
 public:
  using Lock = std::unique_lock<std::mutex>;

  Lock lock() { return Lock(mutex_); }
  // After a change that a waiter may look for, made under another lock.
  void notify();
  // After a change made under this lock, or under none of its own.
  void notify_locked() { changed_.notify_all(); }

  // For the caller's thread: blocks until `done`, and rethrows a worker's failure, now or before.
  template <class Predicate>
  void wait(Lock& lock, Predicate done) {
    bool ready = false;
    changed_.wait(lock, [&] { return failure_ || (ready = done()); });
    if (failure_) rethrow_locked();
  }
  // For worker threads: blocks until `ready`, or returns false when they have to end.
  template <class Predicate>
  bool wait_for_work(Lock& lock, Predicate ready) {
    bool found = false;
    changed_.wait(lock, [&] { return failure_ || stopping_ || (found = ready()); });
    return found;
  }

  void rethrow_failure();  // if there is one; a failed engine stays failed
  bool failure_seen();     // some call has thrown it
  void fail(std::exception_ptr failure);
  void stop();

  // A named thread whose exceptions become the failure.
  std::thread start(const char* name, std::function<void()> body);

 private:
  [[noreturn]] void rethrow_locked() {
    seen_ = true;
    std::rethrow_exception(failure_);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr failure_;
  bool seen_ = false;
  bool stopping_ = false;
};

}  // namespace megatrain
