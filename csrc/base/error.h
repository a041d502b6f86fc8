// The three kinds of failure. A bug of our own is an assert; it never travels as one of these.
// Any thread may throw them; an exception of a worker thread is rethrown by the engine's next call.
#pragma once

#include <stdexcept>
#include <string>

namespace megatrain {

// The caller's mistake: the message says the value and the limit. Python sees a ValueError.
class CallerError : public std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// A failure outside: the driver, the operating system. The message says the call, the code and the
// bytes asked for. Python sees a RuntimeError.
class OutsideError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A request that the machine's memory cannot hold, refused before anything was allocated. Python
// sees a MemoryError.
class MemoryLimitError : public OutsideError {
  using OutsideError::OutsideError;
};

}  // namespace megatrain
