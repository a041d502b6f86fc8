#include "stream/monitor.h"

#include <pthread.h>

#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace megatrain {

void Monitor::notify() {
  // Taking the lock puts this after the check of a waiter that has not gone to sleep yet.
  std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void Monitor::rethrow_failure() {
  std::lock_guard lock(mutex_);
  if (failure_) rethrow_locked();
}

bool Monitor::failure_seen() {
  std::lock_guard lock(mutex_);
  return seen_;
}

void Monitor::fail(std::exception_ptr failure) {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = std::move(failure);
  changed_.notify_all();
}

void Monitor::stop() {
  std::lock_guard lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
}

std::thread Monitor::start(const char* name, std::function<void()> body) {
  try {
    std::thread thread([this, body = std::move(body)] {
      try {
        body();
      } catch (...) {
        fail(std::current_exception());
      }
    });
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    throw OutsideError("starting the thread '" + std::string(name) + "' failed: code " +
                       std::to_string(error.code().value()) + ", " + error.what());
  }
}

}  // namespace megatrain
