// What the figures were measured on: processor, caches, memory, NUMA nodes, GPUs.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "json.h"

namespace megatrain::bench {

struct NumaNode {
  int index = 0;
  std::vector<int> cpus;  // those that this process may use; never empty
};

std::vector<NumaNode> numa_nodes();  // with CPUs for this process; at least one
// Lets the calling thread run on these CPUs only; false where that is forbidden.
bool run_on(const std::vector<int>& cpus);
// Throws OutsideError with both figures, and what to ask for instead, where the host has less than `bytes`
// left.
void require_memory(std::size_t bytes, const std::string& instead);
// 1, 2, 4, ... and `most` itself.
std::vector<unsigned> thread_counts(unsigned most);

Json machine_facts();
std::string machine_text();  // the same in a few lines

}  // namespace megatrain::bench
