// The kinds of host memory that copies may use, with what it takes to have them.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "cuda_tools.h"
#include "device/host_memory.h"
#include "node_memory.h"

namespace megatrain::bench {

struct HostKind {
  std::string label;
  bool held = true;  // see Case
  std::byte* source = nullptr;
  std::byte* target = nullptr;
  double seconds = 0;  // to allocate, touch and pin both
};

class HostKinds {
 public:
  // `bytes` for each source and target; sources begin as a copy of `pattern`.
  HostKinds(Backend& gpu, ThreadPool& pool, std::size_t bytes, const std::byte* pattern);
  HostKinds(const HostKinds&) = delete;
  HostKinds& operator=(const HostKinds&) = delete;
  ~HostKinds();

  const std::vector<HostKind>& all() const noexcept { return kinds_; }

 private:
  std::byte* mapped(ThreadPool& pool, bool pin);
  std::byte* with_small_pages(ThreadPool& pool);
  std::byte* allocated();

  Backend& gpu_;
  const std::size_t bytes_;
  std::vector<std::unique_ptr<HostBuffer>> mapped_;
  std::vector<std::unique_ptr<NodeMemory>> small_;
  std::vector<std::unique_ptr<CudaHostMemory>> allocated_;
  std::vector<HostKind> kinds_;
};

}  // namespace megatrain::bench
