#include "base/cpu.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace megatrain {
namespace {

constexpr Isa kAllIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512, Isa::kNeon};

#if defined(__x86_64__)

// The register halves that the operating system saves at a context switch. A CPU may have wide
// registers that its system does not keep: using them would then corrupt other threads.
std::uint64_t saved_register_state() {
  std::uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (std::uint64_t{high} << 32) | low;
}

bool has_bits(std::uint64_t value, std::uint64_t bits) { return (value & bits) == bits; }

bool detect(Isa isa) {
  if (isa == Isa::kNeon) return false;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kFma = 1u << 12, kOsXsave = 1u << 27, kAvx = 1u << 28;
  if (!has_bits(ecx, kFma | kOsXsave | kAvx)) return false;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAvx2 = 1u << 5;
  constexpr std::uint64_t kSseAvxState = 0x6, kAvx512State = 0xe6;
  const std::uint64_t saved = saved_register_state();
  if (!has_bits(ebx, kAvx2) || !has_bits(saved, kSseAvxState)) return false;
  if (isa == Isa::kAvx2) return true;
  constexpr unsigned kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;
  return has_bits(ebx, kF | kDq | kBw | kVl) && has_bits(saved, kAvx512State);
}

#elif defined(__aarch64__)

bool detect(Isa isa) { return isa == Isa::kNeon; }  // part of every 64-bit ARM

#else

bool detect(Isa) { return false; }

#endif

// Asked once: under a hypervisor each CPUID instruction costs microseconds, and every update asks.
bool cpu_supports(Isa isa) {
  static const bool avx2 = detect(Isa::kAvx2);
  static const bool avx512 = detect(Isa::kAvx512);
  static const bool neon = detect(Isa::kNeon);
  switch (isa) {
    case Isa::kScalar:
      return true;
    case Isa::kAvx2:
      return avx2;
    case Isa::kAvx512:
      return avx512;
    case Isa::kNeon:
      return neon;
  }
  return false;
}

unsigned affinity_cores() {
  // Sized for any machine: sched_getaffinity refuses a set smaller than the kernel's.
  for (int capacity = 1024; capacity <= (1 << 20); capacity *= 2) {
    cpu_set_t* set = CPU_ALLOC(capacity);
    if (!set) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(capacity);
    const bool ok = sched_getaffinity(0, bytes, set) == 0;
    const int count = ok ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (ok) return static_cast<unsigned>(std::max(1, count));
  }
  return static_cast<unsigned>(std::max(1L, sysconf(_SC_NPROCESSORS_ONLN)));
}

std::optional<double> read_v2_quota(const std::string& directory) {
  std::ifstream file(directory + "/cpu.max");  // "max 100000" or "150000 100000"
  double quota = 0, period = 0;
  if (file >> quota >> period && quota > 0 && period > 0) return quota / period;
  return std::nullopt;
}

std::optional<double> read_v1_quota(const std::string& directory) {
  std::ifstream quota_file(directory + "/cpu.cfs_quota_us"), period_file(directory + "/cpu.cfs_period_us");
  double quota = 0, period = 0;  // a quota of -1 means none
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0) return quota / period;
  return std::nullopt;
}

// The tightest quota of this process's cgroup and its ancestors, in cores. The root is read too:
// inside a container the path may be the host's, while the mount shows the container's own group.
std::optional<double> cgroup_cores() {
  std::optional<double> tightest;
  const auto take = [&](std::optional<double> cores) {
    if (cores && (!tightest || *cores < *tightest)) tightest = cores;
  };
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "hierarchy:controllers:/path"
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",cpu,") == std::string::npos) continue;
    for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
      if (path == "/") path.clear();
      if (v2) {
        take(read_v2_quota("/sys/fs/cgroup" + path));
      } else {
        take(read_v1_quota("/sys/fs/cgroup/" + controllers + path));
        take(read_v1_quota("/sys/fs/cgroup/cpu" + path));
      }
      if (path.rfind('/') == std::string::npos) break;
    }
  }
  return tightest;
}

}  // namespace

const char* isa_name(Isa isa) noexcept {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    case Isa::kNeon:
      return "neon";
    case Isa::kScalar:
      break;
  }
  return "scalar";
}

std::vector<Isa> supported_isas() {
  std::vector<Isa> supported;
  for (const Isa isa : kAllIsas) {
    if (cpu_supports(isa)) supported.push_back(isa);
  }
  return supported;
}

Isa select_isa(std::string_view name) {
  if (name.empty()) return supported_isas().back();
  std::string known;
  for (const Isa isa : kAllIsas) {
    if (name == isa_name(isa)) {
      if (cpu_supports(isa)) return isa;
      throw CallerError("this CPU (" + cpu_model() + ") lacks the instruction set \"" + std::string(name) +
                        "\"");
    }
    known += std::string(known.empty() ? "" : ", ") + isa_name(isa);
  }
  throw CallerError("unknown instruction set \"" + std::string(name) + "\"; known: " + known);
}

std::string cpu_model() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const std::size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
    if (start != std::string::npos) return line.substr(start);
  }
  return "unknown CPU";
}

unsigned usable_cores() {
  const unsigned cores = affinity_cores();
  const std::optional<double> quota = cgroup_cores();
  // Rounded down: one thread too many uses the quota up early, and then the kernel stops the whole
  // process until the next period, the thread that feeds the GPU included.
  if (quota && *quota < cores) return std::max(1u, static_cast<unsigned>(*quota));
  return cores;
}

}  // namespace megatrain
