#include "device/host_memory.h"

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "base/error.h"

namespace megatrain {
namespace {

constexpr std::size_t kPageBytes = 4096;
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

std::size_t round_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::byte* map(std::size_t bytes, std::size_t asked_bytes) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) {
    const int code = errno;
    throw OutsideError("mmap failed: code " + std::to_string(code) + " (" + std::strerror(code) + "), " +
                       std::to_string(asked_bytes) + " bytes asked for");
  }
  return static_cast<std::byte*>(address);
}

// Only ranges that begin on a huge page can be backed by huge pages from their first byte on, so
// map more and give the ends back; they were never touched.
std::byte* map_aligned(std::size_t bytes) {
  if (bytes < kHugePageBytes) return map(bytes, bytes);
  std::byte* const mapped = map(bytes + kHugePageBytes, bytes);
  const std::size_t start = reinterpret_cast<std::uintptr_t>(mapped);
  const std::size_t head = round_up(start, kHugePageBytes) - start;
  if (head > 0) munmap(mapped, head);
  munmap(mapped + head + bytes, kHugePageBytes - head);
  return mapped + head;
}

// By the raw call, to need no libnuma. A preference only: kernels without NUMA and containers that
// forbid the call leave the memory where it is touched.
void prefer_node(std::byte* data, std::size_t bytes, int node) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  unsigned long nodes[1024 / kBits] = {};
  if (node < 0 || node >= 1024) return;
  nodes[node / kBits] = 1UL << (node % kBits);
  syscall(SYS_mbind, data, bytes, MPOL_PREFERRED, nodes, 1025UL, 0U);  // the kernel takes one off
}

// The kernel zeroes pages as they are first touched; that is most of the time of an allocation, and
// each worker does a contiguous share of whole huge pages.
void touch(ThreadPool& pool, std::byte* data, std::size_t bytes) {
  const std::size_t huge_pages = round_up(bytes, kHugePageBytes) / kHugePageBytes;
  pool.run([=](unsigned worker, unsigned workers) {
    const std::size_t begin = huge_pages * worker / workers * kHugePageBytes;
    const std::size_t end = std::min(bytes, huge_pages * (worker + 1) / workers * kHugePageBytes);
    for (std::size_t offset = begin; offset < end; offset += kPageBytes) {
      *static_cast<volatile std::byte*>(data + offset) = std::byte{0};
    }
  });
}

}  // namespace

HostBuffer::HostBuffer(Backend& backend, ThreadPool& pool, std::size_t bytes, bool pin) : backend_(&backend) {
  if (bytes == 0) return;
  if (bytes > SIZE_MAX - 2 * kHugePageBytes) {
    throw OutsideError("no address space for " + std::to_string(bytes) + " bytes");
  }
  bytes_ = round_up(bytes, kPageBytes);
  data_ = map_aligned(bytes_);
  owner_ = getpid();
  try {
    madvise(data_, bytes_, MADV_HUGEPAGE);  // refused by kernels without them; slower, not wrong
    if (madvise(data_, bytes_, MADV_DONTFORK) != 0) {
      const int code = errno;
      throw OutsideError("madvise(MADV_DONTFORK) failed: code " + std::to_string(code) + " (" +
                         std::strerror(code) + "), " + std::to_string(bytes_) + " bytes");
    }
    prefer_node(data_, bytes_, backend.numa_node());
    touch(pool, data_, bytes_);
    pinned_ = pin && backend.pin(data_, bytes_);
  } catch (...) {
    release();
    throw;
  }
}

HostBuffer::HostBuffer(HostBuffer&& other) noexcept { *this = std::move(other); }

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  if (this == &other) return *this;
  release();
  backend_ = std::exchange(other.backend_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  bytes_ = std::exchange(other.bytes_, 0);
  pinned_ = std::exchange(other.pinned_, false);
  owner_ = std::exchange(other.owner_, 0);
  return *this;
}

HostBuffer::~HostBuffer() { release(); }

void HostBuffer::release() noexcept {
  // A forked child has no such mapping; something of its own may lie at the address by now.
  if (data_ && owner_ == getpid()) {
    if (pinned_) backend_->unpin(data_, bytes_);
    munmap(data_, bytes_);
  }
  data_ = nullptr;
  bytes_ = 0;
  pinned_ = false;
}

}  // namespace megatrain
