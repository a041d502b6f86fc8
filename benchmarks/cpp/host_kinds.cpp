#include "host_kinds.h"

#include <chrono>
#include <cstring>

#include "base/error.h"

namespace megatrain::bench {

HostKinds::HostKinds(Backend& gpu, ThreadPool& pool, std::size_t bytes, const std::byte* pattern)
    : gpu_(gpu), bytes_(bytes) {
  const auto timed = [&](const char* label, bool held, auto make) {
    const auto begin = std::chrono::steady_clock::now();
    std::byte* const source = make();
    std::byte* const target = make();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::memcpy(source, pattern, bytes_);
    kinds_.push_back({label, held, source, target, took.count()});
  };
  timed("registered, huge pages", true, [&] { return mapped(pool, true); });
  timed("registered, 4 KiB pages", true, [&] { return with_small_pages(pool); });
  timed("cudaHostAlloc", true, [&] { return allocated(); });
  timed("pageable", false, [&] { return mapped(pool, false); });
}

HostKinds::~HostKinds() {
  for (const auto& memory : small_) gpu_.unpin(memory->data(), memory->bytes());
}

std::byte* HostKinds::mapped(ThreadPool& pool, bool pin) {
  return mapped_.emplace_back(std::make_unique<HostBuffer>(gpu_, pool, bytes_, pin))->data();
}

std::byte* HostKinds::with_small_pages(ThreadPool& pool) {
  auto memory = std::make_unique<NodeMemory>(bytes_, std::vector{gpu_.numa_node()}, Pages::kSmall);
  memory->touch(pool);
  if (!gpu_.pin(memory->data(), memory->bytes())) {
    throw OutsideError("the machine refused to pin " + std::to_string(bytes_) + " bytes (ulimit -l)");
  }
  return small_.emplace_back(std::move(memory))->data();
}

std::byte* HostKinds::allocated() {
  return allocated_.emplace_back(std::make_unique<CudaHostMemory>(gpu_.device_index(), bytes_))->data();
}

}  // namespace megatrain::bench
