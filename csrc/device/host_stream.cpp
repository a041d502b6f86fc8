#include "device/host_stream.h"

#include <pthread.h>

#include <chrono>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace megatrain {

void Mark::reach() {
  std::lock_guard lock(mutex_);
  time_ns_ = std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
  reached_ = true;
  changed_.notify_all();
}

void Mark::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
}

bool Mark::reached() {
  std::lock_guard lock(mutex_);
  return reached_;
}

std::int64_t Mark::time_ns() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return reached_; });
  return time_ns_;
}

HostStream::HostStream(const std::string& name) {
  try {
    thread_ = std::thread(&HostStream::work, this);
  } catch (const std::system_error& error) {
    throw OutsideError("starting the thread of stream '" + name + "' failed: code " +
                       std::to_string(error.code().value()) + ", " + error.what());
  }
  // The kernel takes 15 characters and refuses longer names.
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());
}

HostStream::~HostStream() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void HostStream::push(std::function<void()> task) {
  {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

std::shared_ptr<Mark> HostStream::push_mark() {
  auto mark = std::make_shared<Mark>();
  push([mark] { mark->reach(); });
  return mark;
}

void HostStream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
}

}  // namespace megatrain
