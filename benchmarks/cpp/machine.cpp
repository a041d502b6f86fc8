#include "machine.h"

#include <sched.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <sstream>

#include "base/cpu.h"
#include "base/error.h"
#include "cuda_tools.h"
#include "device/host_memory.h"
#include "probe/cache_size.h"

namespace megatrain::bench {
namespace {

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// "0-3,8,10-11"
std::vector<int> parse_cpus(const std::string& list) {
  std::vector<int> cpus;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0, last = 0;
    std::istringstream range(part);
    if (!(range >> first)) continue;
    last = first;
    if (range.get() == '-') range >> last;
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

// More than any kernel is built for.
constexpr int kMostCpus = 1 << 16;

// A cpu_set_t of the usual size has room for 1024.
struct CpuSet {
  std::vector<unsigned long> words = std::vector<unsigned long>(kMostCpus / (8 * sizeof(unsigned long)));
  cpu_set_t* set() { return reinterpret_cast<cpu_set_t*>(words.data()); }
  std::size_t bytes() const { return words.size() * sizeof(unsigned long); }
};

bool allowed(int cpu) {
  static CpuSet mine = [] {
    CpuSet found;
    sched_getaffinity(0, found.bytes(), found.set());
    return found;
  }();
  return cpu < kMostCpus && CPU_ISSET_S(cpu, mine.bytes(), mine.set());
}

double cache_mib() { return static_cast<double>(last_level_cache_bytes()) / (1 << 20); }

double memory_gib() {
  return static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE)) /
         (1 << 30);
}

bool virtual_machine() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("flags", 0) == 0) return (line + " ").find(" hypervisor ") != std::string::npos;
  }
  return false;
}

std::string huge_pages() {
  const std::string choices = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  const std::size_t open = choices.find('['), close = choices.find(']');
  return open == std::string::npos || close < open ? "none" : choices.substr(open + 1, close - open - 1);
}

std::string today() {
  const std::time_t now = std::time(nullptr);
  char text[16];
  std::strftime(text, sizeof text, "%Y-%m-%d", std::gmtime(&now));
  return text;
}

std::string kernel_release() {
  utsname names{};
  return uname(&names) == 0 ? names.release : "unknown";
}

}  // namespace

std::vector<NumaNode> numa_nodes() {
  std::vector<NumaNode> nodes;
  for (const int index : parse_cpus(first_line("/sys/devices/system/node/online"))) {
    NumaNode node{index, {}};
    const std::string path = "/sys/devices/system/node/node" + std::to_string(index) + "/cpulist";
    for (const int cpu : parse_cpus(first_line(path))) {
      if (allowed(cpu)) node.cpus.push_back(cpu);
    }
    if (!node.cpus.empty()) nodes.push_back(std::move(node));
  }
  if (nodes.empty()) {  // a kernel without NUMA
    NumaNode all;
    for (int cpu = 0; cpu < kMostCpus; ++cpu) {
      if (allowed(cpu)) all.cpus.push_back(cpu);
    }
    nodes.push_back(std::move(all));
  }
  return nodes;
}

bool run_on(const std::vector<int>& cpus) {
  CpuSet wanted;
  for (const int cpu : cpus) {
    if (cpu < kMostCpus) CPU_SET_S(cpu, wanted.bytes(), wanted.set());
  }
  return sched_setaffinity(0, wanted.bytes(), wanted.set()) == 0;
}

void require_memory(std::size_t bytes, const std::string& instead) {
  const MemoryLimit limit = host_memory_limit();
  if (bytes <= limit.available_bytes) return;
  std::ostringstream text;
  text.precision(3);
  text << static_cast<double>(bytes) / (1 << 30) << " GiB of host memory are needed, "
       << static_cast<double>(limit.available_bytes) / (1 << 30) << " are available according to "
       << limit.source << "; ask for " << instead;
  throw OutsideError(text.str());
}

std::vector<unsigned> thread_counts(unsigned most) {
  std::vector<unsigned> counts;
  for (unsigned count = 1; count < most; count *= 2) counts.push_back(count);
  counts.push_back(most);
  return counts;
}

Json machine_facts() {
  Json facts = Json::object();
  facts.set("cpu", cpu_model()).set("usable_cores", usable_cores());
  facts.set("isa", isa_name(select_isa(""))).set("virtual_machine", virtual_machine());
  facts.set("last_level_cache_mib", cache_mib());
  facts.set("memory_gib", memory_gib()).set("huge_pages", huge_pages());
  facts.set("kernel", kernel_release()).set("date", today());
  Json nodes = Json::array();
  for (const NumaNode& node : numa_nodes()) {
    nodes.push(Json::object().set("node", node.index).set("cpus", node.cpus.size()));
  }
  facts.set("numa_nodes", std::move(nodes));
  Json gpus = Json::array();
  for (const GpuFacts& gpu : gpu_facts()) {
    Json entry = Json::object();
    entry.set("name", gpu.name).set("memory_gib", gpu.memory_gib).set("numa_node", gpu.numa_node);
    gpus.push(std::move(entry.set("copy_engines", gpu.copy_engines).set("pcie", gpu.pcie)));
  }
  facts.set("gpus", std::move(gpus)).set("cuda", cuda_versions());
  return facts;
}

std::string machine_text() {
  std::ostringstream text;
  text.precision(4);
  text << cpu_model() << ", " << usable_cores() << " usable cores, " << isa_name(select_isa("")) << ", "
       << numa_nodes().size() << " NUMA node(s), " << cache_mib() << " MiB of last-level cache, "
       << memory_gib() << " GiB, huge pages: " << huge_pages()
       << (virtual_machine() ? ", virtual machine\n" : "\n");
  const std::vector<GpuFacts> gpus = gpu_facts();
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    text << "GPU " << i << ": " << gpus[i].name << ", " << gpus[i].memory_gib << " GiB, "
         << (gpus[i].pcie.empty() ? "PCIe link not shown" : gpus[i].pcie);
    if (gpus[i].numa_node >= 0) text << ", node " << gpus[i].numa_node;
    text << '\n';
  }
  text << cuda_versions() << '\n';
  return text.str();
}

}  // namespace megatrain::bench
