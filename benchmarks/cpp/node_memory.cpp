#include "node_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"

namespace megatrain::bench {
namespace {

constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;
constexpr int kMostNodes = 1024;

}  // namespace

NodeMemory::NodeMemory(std::size_t bytes, const std::vector<int>& nodes, Pages pages)
    : bytes_((bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes) {
  // One huge page more, so that a range that begins on a huge page can be cut out.
  void* const mapped =
      mmap(nullptr, bytes_ + kHugePageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw OutsideError("mmap of " + std::to_string(bytes_) + " bytes failed: " + std::strerror(errno));
  }
  const std::size_t head = kHugePageBytes - reinterpret_cast<std::uintptr_t>(mapped) % kHugePageBytes;
  munmap(mapped, head);
  data_ = static_cast<std::byte*>(mapped) + head;
  madvise(data_, bytes_, pages == Pages::kHuge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long mask[kMostNodes / kBits] = {};
  bool any = false;
  for (const int node : nodes) {
    if (node < 0 || node >= kMostNodes) continue;
    mask[node / kBits] |= 1UL << (node % kBits);
    any = true;
  }
  if (any) {
    const int policy = nodes.size() > 1 ? MPOL_INTERLEAVE : MPOL_PREFERRED;
    syscall(SYS_mbind, data_, bytes_, policy, mask, kMostNodes + 1UL, 0U);  // the kernel takes one off
  }
}

NodeMemory::~NodeMemory() { munmap(data_, bytes_); }

void NodeMemory::touch(ThreadPool& pool) {
  const std::size_t pages = bytes_ / 4096;
  pool.run([=, this](unsigned worker, unsigned workers) {
    for (std::size_t page = pages * worker / workers; page < pages * (worker + 1) / workers; ++page) {
      *static_cast<volatile std::byte*>(data_ + page * 4096) = std::byte{0};
    }
  });
}

int node_of(const std::byte* page) {
  int node = -1;
  return syscall(SYS_get_mempolicy, &node, nullptr, 0UL, page, MPOL_F_NODE | MPOL_F_ADDR) == 0 ? node : -1;
}

}  // namespace megatrain::bench
