// The host backend's stream: a worker thread with a queue of tasks, run first in, first out. Any
// thread may queue work. Marks are points in such a queue; events hold the mark recorded last.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace megatrain {

// One point in the order of a stream's work. Shared by the event, the stream's queue and every
// waiter, so that an event may be recorded again or destroyed while the mark is still ahead.
class Mark {
 public:
  void reach();
  void wait();
  bool reached();
  std::int64_t time_ns();  // steady clock when it was reached; waits for it

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::int64_t time_ns_ = 0;
};

class HostStream {
 public:
  // Throws OutsideError when the system gives no thread.
  explicit HostStream(const std::string& name);
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;
  ~HostStream();  // runs what is queued, then joins

  // Queues a task, which must not throw. It ends before any mark queued after it is reached.
  void push(std::function<void()> task);
  std::shared_ptr<Mark> push_mark();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool closing_ = false;
  std::thread thread_;  // last: it uses everything above
};

}  // namespace megatrain
