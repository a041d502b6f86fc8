// The formats of AdamW that the runtime has, each with the memory it works on and with a pass of the
// same streams and hardly any arithmetic: what it would take if only bytes counted. A new precision
// mode is one more entry in adam_formats().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/span.h"
#include "node_memory.h"

namespace megatrain::bench {

struct AdamFormat {
  std::string name;
  double bytes_per_parameter = 0;
  std::function<void(Isa, ElementRange)> update;  // by one thread
  std::function<void(ElementRange)> mix;          // leaves the memory as it was
  // A number that changes with every bit that the update writes.
  std::function<std::uint64_t(ElementRange)> digest;
};

// All formats over one memory, moments shared: what is compared has the same pages.
class AdamMemory {
 public:
  AdamMemory(std::int64_t parameters, const std::vector<int>& nodes, ThreadPool& pool);
  std::int64_t parameters() const noexcept { return parameters_; }
  const std::vector<AdamFormat>& formats() const noexcept { return formats_; }
  void reset(ThreadPool& pool);  // the same ordinary values each time

  static std::size_t bytes(std::int64_t parameters);

 private:
  std::int64_t parameters_;
  NodeMemory memory_;
  std::uint16_t *high_, *gradient_;
  std::int16_t* low_;
  float *weight_, *float_gradient_, *exp_avg_, *exp_avg_sq_;
  std::vector<AdamFormat> formats_;
};

// Calls body(range) in every worker, on pages of the narrowest section.
void over_parameters(ThreadPool& pool, std::int64_t parameters,
                     const std::function<void(ElementRange)>& body);

}  // namespace megatrain::bench
