// How close AdamW comes to the speed of memory: every instruction set and format beside a pass of the
// same streams without its arithmetic. All take turns on the same memory, round by round.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include "adam_formats.h"
#include "base/cpu.h"
#include "base/error.h"
#include "device/host_memory.h"
#include "program.h"
#include "qwen_layers.h"

namespace megatrain::bench {
namespace {

constexpr double kSecondsInAll = 60;

// Parameters whose update is compared between instruction sets; not a multiple of any vector.
constexpr std::int64_t kVerified = 100003;

// One thing that is timed: a format by an instruction set, or its mix.
struct Entry {
  const AdamFormat* format;
  std::string variant;
  std::function<void(ElementRange)> body;
  std::vector<double> rates;  // parameters/s, by round
};

std::vector<Entry> entries(const AdamMemory& memory) {
  std::vector<Entry> all;
  for (const AdamFormat& format : memory.formats()) {
    all.push_back({&format, "mix alone", format.mix, {}});
    for (const Isa isa : supported_isas()) {
      all.push_back({&format, isa_name(isa), [&format, isa](ElementRange r) { format.update(isa, r); }, {}});
    }
  }
  return all;
}

// Every instruction set writes the bits of the scalar one, and the mix changes nothing.
void verify(AdamMemory& memory, ThreadPool& pool) {
  const ElementRange range{0, std::min(kVerified, memory.parameters())};
  for (const AdamFormat& format : memory.formats()) {
    memory.reset(pool);
    const std::uint64_t before = format.digest(range);
    format.mix(range);
    if (format.digest(range) != before)
      throw OutsideError("the mix of " + format.name + " changed its memory");
    format.update(Isa::kScalar, range);
    const std::uint64_t expected = format.digest(range);
    if (expected == before) throw OutsideError("the update of " + format.name + " changed nothing");
    for (const Isa isa : supported_isas()) {
      memory.reset(pool);
      format.update(isa, range);
      if (format.digest(range) == expected) continue;
      throw OutsideError("the update of " + format.name + " by " + isa_name(isa) +
                         " differs from the scalar one");
    }
  }
  memory.reset(pool);
}

void measure(std::vector<Entry>& all, ThreadPool& pool, std::int64_t parameters, int rounds, double seconds) {
  for (Entry& entry : all) over_parameters(pool, parameters, entry.body);
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < rounds; ++round) {
    auto last = std::chrono::steady_clock::now();
    for (Entry& entry : all) {
      over_parameters(pool, parameters, entry.body);
      const auto now = std::chrono::steady_clock::now();
      entry.rates.push_back(static_cast<double>(parameters) /
                            std::chrono::duration<double>(now - std::exchange(last, now)).count());
    }
    if (round >= 2 && std::chrono::duration<double>(last - begin).count() > seconds) break;
  }
}

void run(const Arguments& arguments, Report& report) {
  const bool quick = arguments.quick();
  const std::int64_t parameters = qwen_layer_elements(arguments.text("--layer")) / (quick ? 64 : 1);
  std::vector<std::int64_t> threads = arguments.counts("--threads");
  if (threads.empty()) threads = {static_cast<std::int64_t>(usable_cores())};
  require_host_memory(AdamMemory::bytes(parameters));

  ThreadPool everyone(usable_cores());
  AdamMemory memory(parameters, {}, everyone);
  verify(memory, everyone);
  report.set("verified", true);
  Table table("A layer of " + std::to_string(parameters) + " parameters, in turn on the same memory",
              {{"format", "format"},
               {"B/param", "bytes_per_parameter"},
               {"threads", "threads"},
               {"variant", "variant"},
               {"GB/s", "gb_per_s"},
               {"Mparam/s", "mparam_per_s"},
               {"of mix", "of_mix"}});
  for (const std::int64_t count : threads) {
    ThreadPool pool(static_cast<unsigned>(count));
    std::vector<Entry> all = entries(memory);
    measure(all, pool, parameters, quick ? 3 : 21, kSecondsInAll / static_cast<double>(threads.size()));
    const Entry* mix = nullptr;
    for (const Entry& entry : all) {
      if (!mix || mix->format != entry.format) mix = &entry;
      std::vector<double> bandwidths, rates;
      for (const double rate : entry.rates) {
        bandwidths.push_back(rate * entry.format->bytes_per_parameter / 1e9);
        rates.push_back(rate / 1e6);
      }
      table.add({entry.format->name, number(entry.format->bytes_per_parameter, 0), count, entry.variant,
                 spread(spread_of(bandwidths)), spread(spread_of(rates), 0),
                 share(median_ratio(entry.rates, mix->rates))});
    }
  }
  report.add("adam", table);
  report.note(
      "\"of mix\" is the share of a pass that reads and writes the same streams with hardly any arithmetic. "
      "All "
      "variants wrote the same bits.");
}

}  // namespace
}  // namespace megatrain::bench

int main(int argc, char** argv) {
  return megatrain::bench::run_program(
      argc, argv,
      {"adam",
       "how close AdamW comes to the speed of memory",
       {{"--layer", "MODEL", "1.5b", "updates a layer of Qwen2.5 0.5b, 1.5b, 3b, 7b or 14b"},
        {"--threads", "LIST", "", "numbers of threads, such as 1,4,16 (default: all usable cores)"}},
       megatrain::bench::run});
}
