// Copies and updates share the host's memory. Copies go both ways all the time while AdamW runs with
// more and more threads: who loses how much, and how many threads serve the ring best. Both work in memory
// that caches do not hold.
//
// What "ring" and the recommended number are: csrc/probe/contest.h and machine_speed.h, which the
// scheduler measures by too, in less time.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "cuda_tools.h"
#include "machine.h"
#include "probe/cache_size.h"
#include "probe/contest.h"
#include "probe/machine_speed.h"
#include "program.h"
#include "qwen_layers.h"

namespace megatrain::bench {
namespace {

constexpr double kKept = 0.8;

// In GB/s and Gparam/s.
struct Samples {
  std::vector<double> up, down, updates, ring;
  void add(const Rates& rates) {
    up.push_back(rates.up / 1e9);
    down.push_back(rates.down / 1e9);
    updates.push_back(rates.updates / 1e9);
    ring.push_back(rates.ring() / 1e9);
  }
};

void run(const Arguments& arguments, Report& report) {
  const bool quick = arguments.quick();
  const auto device = static_cast<std::size_t>(arguments.count("--device", 0, kMostDevices));
  const std::int64_t parameters = qwen_layer_elements(arguments.text("--layer")) / (quick ? 64 : 1);
  const std::vector<std::shared_ptr<Backend>> gpus = require_gpus();
  if (device >= gpus.size()) {
    throw CallerError("--device " + std::to_string(device) + ": there are " + std::to_string(gpus.size()));
  }
  Backend& gpu = *gpus[device];
  const std::size_t copy_bytes = std::size_t{quick ? 4u : 64u} << 20;
  const std::size_t cache_bytes = quick ? 0 : last_level_cache_bytes();
  require_memory(Contest::host_bytes(2 * copy_bytes, parameters, cache_bytes), "a smaller --layer");

  ThreadPool everyone(usable_cores());
  DeviceMemory device_memory(gpu.device_index(), 2 * copy_bytes);
  Contest contest(gpu, everyone, device_memory.data(), 2 * copy_bytes, parameters, cache_bytes);
  if (!contest.pinned()) {
    throw OutsideError("the machine refused to pin memory for copies (ulimit -l)");
  }
  const double seconds = quick ? 0.02 : 0.4;
  const std::vector<unsigned> steps = thread_steps(1, usable_cores());
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (const unsigned threads : steps) pools.push_back(std::make_unique<ThreadPool>(threads));
  Samples copies;
  std::vector<Samples> alone(steps.size()), both(steps.size());
  const int rounds = quick ? 2 : 3;
  contest.copies(true, true, seconds);
  for (int round = 0; round < rounds; ++round) {
    copies.add(contest.copies(true, true, seconds));
    for (std::size_t i = 0; i < steps.size(); ++i) {
      alone[i].add(contest.updates(*pools[i], seconds));
      both[i].add(contest.both(*pools[i], seconds));
    }
  }

  Table table("Copies both ways without a pause, AdamW with more and more threads",
              {{"threads", "threads"},
               {"AdamW alone Gparam/s", "updates_alone"},
               {"with copies", "updates"},
               {"kept", "updates_kept"},
               {"up GB/s", "up"},
               {"kept", "up_kept"},
               {"down GB/s", "down"},
               {"kept", "down_kept"},
               {"ring Gparam/s", "ring"}});
  table.add({"none", none(), none(), none(), spread(spread_of(copies.up)), share(1),
             spread(spread_of(copies.down)), share(1), none()});
  std::vector<double> rings;
  for (const Samples& samples : both) rings.push_back(spread_of(samples.ring).median);
  const unsigned recommended = recommended_threads(steps, rings);
  unsigned gentle = 0;
  double kept_there = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const double up_kept = median_ratio(both[i].up, copies.up),
                 down_kept = median_ratio(both[i].down, copies.down);
    if (steps[i] == recommended) kept_there = std::min(up_kept, down_kept);
    if (std::min(up_kept, down_kept) >= kKept) gentle = steps[i];
    table.add({std::to_string(steps[i]), spread(spread_of(alone[i].updates), 2),
               spread(spread_of(both[i].updates), 2), share(median_ratio(both[i].updates, alone[i].updates)),
               spread(spread_of(both[i].up)), share(up_kept), spread(spread_of(both[i].down)),
               share(down_kept), spread(spread_of(both[i].ring), 2)});
  }
  report.add("contention", table);
  report.set("recommended_threads", recommended);
  report.set("most_threads_that_leave_copies_80_percent", gentle);
  char text[640];
  std::snprintf(
      text, sizeof text,
      "Recommended: %u threads for the update (%u cores). Ring is min(up / 4 B, down / 2 B, updates), what a "
      "step without computation could do; this is the fewest threads within 2 %% of the best. Copies keep "
      "%.0f %% of their own speed there; %s",
      recommended, usable_cores(), 100 * kept_there,
      gentle > 0
          ? ("they keep 80 % with up to " + std::to_string(gentle) + ", if copies are what binds.").c_str()
          : "they keep less than 80 % with any.");
  report.note(text);
}

}  // namespace
}  // namespace megatrain::bench

int main(int argc, char** argv) {
  return megatrain::bench::run_program(
      argc, argv,
      {"contention",
       "what copies and updates take from each other, and how many update threads serve both",
       {{"--device", "N", "0", "the GPU"},
        {"--layer", "MODEL", "1.5b", "updates a layer of Qwen2.5 0.5b, 1.5b, 3b, 7b or 14b"}},
       megatrain::bench::run});
}
