// Instruction sets: what this CPU has, what a name means.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace megatrain {

enum class Isa { kScalar, kAvx2, kAvx512, kNeon };

const char* isa_name(Isa isa) noexcept;  // "scalar", "avx2", "avx512", "neon"
std::vector<Isa> supported_isas();       // on this CPU and in this build, slowest first
// Name to Isa; throws CallerError for an unknown one (listing the names) and for one that this CPU
// lacks. An empty name gives the fastest supported one.
Isa select_isa(std::string_view name);
std::string cpu_model();  // from /proc/cpuinfo
unsigned usable_cores();  // by affinity and cgroup quota, at least 1

}  // namespace megatrain
