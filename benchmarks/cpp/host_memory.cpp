// What the host's memory can do, by kind of pass, number of threads and NUMA node: the passes of
// STREAM, and one with the streams of AdamW. All passes work on the same memory, in turn, since
// memory of virtual machines changes its speed from one second to the next. Unless it was asked for less,
// caches hold no more than a sixth of it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "machine.h"
#include "memory_passes.h"
#include "node_memory.h"
#include "probe/cache_size.h"
#include "program.h"
#include "tiles/share.h"

namespace megatrain::bench {
namespace {

constexpr std::int64_t kLeastMib = 512, kMostMib = 1 << 24;
constexpr std::int64_t kPageElements = 2048;  // a 4 KiB page of the narrowest section
constexpr double kSecondsInAll = 90;
constexpr float kScalar = 3;
constexpr std::int64_t kChecked = 100'002;  // elements of the mix, an even number and no whole block
// Between STREAM's arrays: at distances of a power of two their elements would share banks of memory
// and sets of the caches, and the triad would take twice as long.
constexpr std::int64_t kGap = 333 * 1024 + 336;

// One memory, seen as STREAM's three arrays and as the sections of a tile.
struct Streams {
  // The sections take 14 bytes a parameter, the arrays 12 an element.
  Streams(std::byte* memory, std::int64_t elements)
      : elements(elements), parameters(elements * 12 / 14 / kPageElements * kPageElements) {
    a = reinterpret_cast<float*>(memory);
    b = a + elements + kGap;
    c = b + elements + kGap;
    std::byte* section = memory;
    for (const int width : {2, 2, 2, 4, 4}) {
      mix.push_back({section, width, mix.size() != kGradients});
      section += parameters * width;
    }
  }

  static constexpr std::size_t kGradients = 2;
  std::int64_t elements;
  std::int64_t parameters;
  float *a, *b, *c;
  std::vector<MixStream> mix;  // high, low, gradients, m, v, as in a tile with bf16 weights
};

std::uint32_t run_mix(const Streams& streams, ElementRange range, std::uint32_t mask) {
  return pass_mix(streams.mix.data(), static_cast<int>(streams.mix.size()), range.begin, range.end, mask);
}

struct Pass {
  const char* title;
  const char* key;
  double bytes;  // an element, as STREAM counts
  bool adam;     // elements are parameters
  void (*body)(const Streams& streams, ElementRange range);
};

// In this order; the last one only where there are such stores.
enum PassIndex : std::size_t { kRead, kWrite, kCopy, kTriad, kMix, kStreamingTriad };

std::vector<Pass> passes() {
  std::vector<Pass> all = {
      {"read", "read", 4, false,
       [](const Streams& s, ElementRange r) {
         volatile std::uint64_t sum = pass_read(s.a + r.begin, r.size());
         static_cast<void>(sum);
       }},
      {"write", "write", 4, false,
       [](const Streams& s, ElementRange r) { pass_write(s.c + r.begin, 2, r.size()); }},
      {"copy", "copy", 8, false,
       [](const Streams& s, ElementRange r) { pass_copy(s.b + r.begin, s.c + r.begin, r.size()); }},
      {"triad", "triad", 12, false,
       [](const Streams& s, ElementRange r) {
         pass_triad(s.a + r.begin, s.b + r.begin, s.c + r.begin, kScalar, r.size());
       }},
      {"Adam mix", "adam_mix", 26, true,
       [](const Streams& s, ElementRange r) {
         volatile std::uint32_t sum = run_mix(s, r, 0);
         static_cast<void>(sum);
       }},
  };
  if (kHasStreamingStores) {
    all.push_back(
        {"triad, streaming stores", "streaming_triad", 12, false, [](const Streams& s, ElementRange r) {
           pass_triad_streaming(s.a + r.begin, s.b + r.begin, s.c + r.begin, kScalar, r.size());
         }});
  }
  return all;
}

// GB/s as counted.
double rate(const Pass& pass, const Streams& streams, ThreadPool& pool) {
  const std::int64_t elements = pass.adam ? streams.parameters : streams.elements;
  const auto begin = std::chrono::steady_clock::now();
  pool.run([&](unsigned worker, unsigned workers) {
    const ElementRange mine =
        share_of(elements, kPageElements, static_cast<int>(worker), static_cast<int>(workers));
    if (!mine.empty()) pass.body(streams, mine);
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return pass.bytes * static_cast<double>(elements) / took.count() / 1e9;
}

void require(bool right, const std::string& what) {
  if (!right) throw OutsideError("the pass \"" + what + "\" wrote wrong values");
}

// Of the first kChecked elements of each section, one section behind the other.
std::vector<std::uint32_t> words_of(const Streams& streams) {
  std::vector<std::uint32_t> words;
  for (const MixStream& stream : streams.mix) {
    const std::size_t bytes = static_cast<std::size_t>(kChecked * stream.element_bytes);
    words.resize(words.size() + bytes / 4);
    std::memcpy(words.data() + words.size() - bytes / 4, stream.data, bytes);
  }
  return words;
}

// Each pass against what it should write, over all elements, before any is timed.
void verify(const Streams& s, ThreadPool& pool) {
  const auto whole = [&](auto body) {
    pool.run([&](unsigned worker, unsigned workers) {
      body(share_of(s.elements, kPageElements, static_cast<int>(worker), static_cast<int>(workers)));
    });
  };
  whole([&](ElementRange r) {
    pass_write(s.c + r.begin, 2.0f, r.size());
    pass_copy(s.b + r.begin, s.c + r.begin, r.size());
    pass_triad(s.a + r.begin, s.b + r.begin, s.c + r.begin, kScalar, r.size());
    for (std::int64_t i = r.begin; i < r.end; ++i) {
      require(s.c[i] == 2, "write");
      require(s.b[i] == 2, "copy");
      require(s.a[i] == 2 + kScalar * 2, "triad");
    }
    pass_triad_streaming(s.a + r.begin, s.b + r.begin, s.c + r.begin, kScalar + 1, r.size());
    for (std::int64_t i = r.begin; i < r.end; ++i) require(s.a[i] == 4 + kScalar * 2, "streaming triad");
  });
  // The whole memory holds words of 2.0f and 8.0f here.
  constexpr std::uint32_t kMask = 0x00050005;
  const std::vector<std::uint32_t> before = words_of(s);
  const std::uint32_t sum = run_mix(s, {0, kChecked}, kMask);
  const std::vector<std::uint32_t> after = words_of(s);
  std::uint32_t expected_sum = 0;
  for (std::size_t i = 0, section = 0; section < s.mix.size(); ++section) {
    for (std::int64_t word = 0; word < kChecked * s.mix[section].element_bytes / 4; ++word, ++i) {
      if (!s.mix[section].written) expected_sum += before[i];
      require(after[i] == (s.mix[section].written ? before[i] ^ kMask : before[i]), "Adam mix");
    }
  }
  require(sum == expected_sum, "Adam mix");
  run_mix(s, {0, kChecked}, kMask);  // as it was
}

// Where threads run and where the memory is.
struct Place {
  std::string label;
  std::vector<int> cpus;
  std::vector<int> memory_nodes;
  bool crossing = false;
};

std::vector<Place> places(const std::vector<NumaNode>& nodes) {
  std::vector<Place> all;
  Place everywhere{"all, interleaved", {}, {}};
  for (const NumaNode& node : nodes) {
    const std::string label = "node " + std::to_string(node.index);
    all.push_back({label, node.cpus, {node.index}});
    everywhere.cpus.insert(everywhere.cpus.end(), node.cpus.begin(), node.cpus.end());
    everywhere.memory_nodes.push_back(node.index);
    for (const NumaNode& memory : nodes) {
      if (memory.index == node.index) continue;
      all.push_back({label + " to " + std::to_string(memory.index), node.cpus, {memory.index}, true});
    }
  }
  if (nodes.size() > 1) all.push_back(std::move(everywhere));
  return all;
}

// Threads run and memory lies where each place says.
bool can_choose(const std::vector<Place>& all) {
  return std::all_of(all.begin(), all.end(), [](const Place& place) {
    std::atomic<bool> there = true;
    ThreadPool pool(2);
    pool.run([&](unsigned, unsigned) {
      if (!run_on(place.cpus)) there = false;
    });
    NodeMemory memory(std::size_t{2} << 20, place.memory_nodes);
    memory.touch(pool);
    const int node = node_of(memory.data());
    const auto& nodes = place.memory_nodes;
    return there && std::find(nodes.begin(), nodes.end(), node) != nodes.end();
  });
}

// GB/s by pass and round.
using Rates = std::vector<std::vector<double>>;

Rates measure(const std::vector<Pass>& all, const Streams& streams, ThreadPool& pool, int rounds,
              double seconds) {
  Rates rates(all.size());
  for (const Pass& pass : all) rate(pass, streams, pool);
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < all.size(); ++i) rates[i].push_back(rate(all[i], streams, pool));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (round >= 2 && took.count() > seconds) break;
  }
  return rates;
}

// Of the place and the number of threads at which the Adam mix is fastest.
struct Best {
  std::string place;
  unsigned threads = 0;
  double mix = 0, of_triad = 0, of_streaming_triad = 0;
};

std::string verdict(const Best& best) {
  char text[512];
  std::snprintf(
      text, sizeof text,
      "The Adam mix moves %.1f GB/s at best (%s, %u threads): %.1f %% of STREAM's triad as STREAM counts, "
      "%.1f %% as memory sees it, which also reads each line that the triad writes%s.",
      best.mix, best.place.c_str(), best.threads, 100 * best.of_triad, 100 * best.of_triad * 12 / 16,
      best.of_streaming_triad == 0
          ? ""
          : (", and " + number(100 * best.of_streaming_triad).shown + " % of the triad with streaming stores")
                .c_str());
  return text;
}

// Of each array, so that all three are six times the caches.
std::int64_t mib_beyond_caches() {
  return std::max(kLeastMib, static_cast<std::int64_t>(2 * last_level_cache_bytes() >> 20));
}

void run(const Arguments& arguments, Report& report) {
  const bool quick = arguments.quick();
  const std::int64_t asked = arguments.count("--mib", 0, kMostMib);
  const std::int64_t mib = asked > 0 ? asked : quick ? 8 : mib_beyond_caches();
  const std::int64_t elements = mib * (1 << 20) / 4;
  const std::size_t bytes = static_cast<std::size_t>(3 * elements + 2 * kGap) * sizeof(float);
  require_memory(bytes, "a smaller --mib");
  const std::vector<Pass> all = passes();
  std::vector<Place> where = places(numa_nodes());
  if (where.size() > 1 && !can_choose(where)) {
    where = {{"anywhere", where.back().cpus, {}}};
    report.note(
        "This process may not choose NUMA nodes (containers often forbid it): the figures are of threads and "
        "memory wherever the kernel puts them.");
  }

  std::vector<Column> columns{{"where", "place"}, {"threads", "threads"}};
  for (const Pass& pass : all) columns.push_back({pass.title, pass.key});
  columns.push_back({"Adam/triad", "adam_mix_of_triad"});
  Table table("GB/s as STREAM counts them, three arrays of " + std::to_string(mib) + " MiB", columns);
  Best best;
  for (const Place& place : where) {
    const unsigned most = std::min(usable_cores(), static_cast<unsigned>(place.cpus.size()));
    const std::vector<unsigned> counts = place.crossing ? std::vector{most} : thread_counts(most);
    NodeMemory memory(bytes, place.memory_nodes);
    const Streams streams(memory.data(), elements);
    ThreadPool everyone(most);
    everyone.run([&](unsigned, unsigned) { run_on(place.cpus); });
    memory.touch(everyone);
    verify(streams, everyone);
    for (const unsigned threads : counts) {
      ThreadPool pool(threads);
      pool.run([&](unsigned, unsigned) { run_on(place.cpus); });
      const Rates rates = measure(all, streams, pool, quick ? 3 : 9,
                                  kSecondsInAll / static_cast<double>(where.size() * counts.size()));
      std::vector<Cell> row{place.label, threads};
      for (const std::vector<double>& samples : rates) row.push_back(spread(spread_of(samples)));
      const double of_triad = median_ratio(rates[kMix], rates[kTriad]);
      row.push_back(share(of_triad));
      table.add(std::move(row));
      const double mix = spread_of(rates[kMix]).median;
      if (mix <= best.mix) continue;
      best = {place.label, threads, mix, of_triad,
              all.size() > kStreamingTriad ? median_ratio(rates[kMix], rates[kStreamingTriad]) : 0};
    }
  }
  report.add("passes", table);
  report.set("verified", true);
  report.set("adam_mix_gb_per_s", best.mix);
  report.set("adam_mix_of_triad", best.of_triad);
  report.set("adam_mix_of_streaming_triad", best.of_streaming_triad);
  report.note(verdict(best));
}

}  // namespace
}  // namespace megatrain::bench

int main(int argc, char** argv) {
  return megatrain::bench::run_program(
      argc, argv,
      {"host_memory",
       "what the host's memory can do, by pass, threads and NUMA node",
       {{"--mib", "N", "0",
         "size of each of the three arrays; 0: twice the last-level caches, at least 512"}},
       megatrain::bench::run});
}
