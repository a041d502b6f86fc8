// Copies and updates share the host's memory. Copies go both ways all the time while AdamW runs with
// more and more threads: who loses how much, and how many threads serve the ring best.
//
// A step of training with bf16 weights moves, for each parameter, 4 bytes up (forward and backward), 2
// down, and updates it once. The slowest of the three decides what the ring can do; its rate is
// min(up / 4, down / 2, updates). Recommended is the fewest threads that come within 2 % of the best.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "adam_tile.h"
#include "base/cpu.h"
#include "base/error.h"
#include "copy_flow.h"
#include "cuda_tools.h"
#include "device/host_memory.h"
#include "program.h"
#include "qwen_layers.h"

namespace megatrain::bench {
namespace {

constexpr double kUpBytes = 4, kDownBytes = 2;  // a parameter and step
constexpr double kGoodEnough = 0.98;
constexpr double kKept = 0.8;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Rates {
  double up = 0, down = 0;  // GB/s
  double updates = 0;       // Gparam/s

  double ring() const { return std::min({up / kUpBytes, down / kDownBytes, updates}); }
};

class Contest {
 public:
  Contest(Backend& gpu, AdamTile& adam, ThreadPool& pool, std::size_t bytes, double seconds)
      : adam_(adam),
        seconds_(seconds),
        source_(gpu, pool, bytes, true),
        target_(gpu, pool, bytes, true),
        device_source_(gpu.device_index(), bytes),
        device_target_(gpu.device_index(), bytes),
        up_(gpu, CopyKind::kHostToDevice, source_.data(), device_target_.data(), bytes),
        down_(gpu, CopyKind::kDeviceToHost, target_.data(), device_source_.data(), bytes) {
    if (!source_.pinned() || !target_.pinned()) {
      throw OutsideError("the machine refused to pin " + std::to_string(2 * bytes) + " bytes (ulimit -l)");
    }
  }

  Rates copies_alone() {
    return with_copies([&] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds_)); });
  }
  Rates updates_alone(ThreadPool& pool) {
    Rates rates;
    update(pool);
    rates.updates = updates(pool);
    return rates;
  }
  Rates both(ThreadPool& pool) {
    double rate = 0;
    update(pool);
    Rates rates = with_copies([&] { rate = updates(pool); });
    rates.updates = rate;
    return rates;
  }

 private:
  void update(ThreadPool& pool) {
    const Isa isa = select_isa("");
    over_tile(pool, adam_, [&](ElementRange range) { adam_.update(isa, range); });
  }

  // Whole passes until the time is over.
  double updates(ThreadPool& pool) {
    const auto begin = std::chrono::steady_clock::now();
    double passes = 0;
    do {
      update(pool);
      ++passes;
    } while (seconds_since(begin) < seconds_);
    return passes * static_cast<double>(adam_.elements()) / seconds_since(begin) / 1e9;
  }

  template <class Body>
  Rates with_copies(Body body) {
    up_.start();
    down_.start();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const double up = up_.copied(), down = down_.copied();
    const auto begin = std::chrono::steady_clock::now();
    body();
    const double seconds = seconds_since(begin);
    const Rates rates{(up_.copied() - up) / seconds / 1e9, (down_.copied() - down) / seconds / 1e9, 0};
    up_.stop();
    down_.stop();
    return rates;
  }

  AdamTile& adam_;
  const double seconds_;
  HostBuffer source_, target_;
  DeviceMemory device_source_, device_target_;
  CopyFlow up_, down_;
};

// 1, 2, 3, 4, 6, 8, 12, ... and the last two.
std::vector<unsigned> thread_steps(unsigned most) {
  std::vector<unsigned> steps{most};
  if (most > 1) steps.push_back(most - 1);
  for (unsigned power = 1; power < most; power *= 2) {
    steps.push_back(power);
    if (power > 1 && power / 2 * 3 < most) steps.push_back(power / 2 * 3);
  }
  std::sort(steps.begin(), steps.end());
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
  return steps;
}

struct Samples {
  std::vector<double> up, down, updates, ring;
  void add(const Rates& rates) {
    up.push_back(rates.up);
    down.push_back(rates.down);
    updates.push_back(rates.updates);
    ring.push_back(rates.ring());
  }
};

void run(const Arguments& arguments, Report& report) {
  const std::vector<std::shared_ptr<Backend>> gpus = require_gpus();
  const bool quick = arguments.quick();
  const auto device = static_cast<std::size_t>(arguments.count("--device", 0));
  if (device >= gpus.size()) {
    throw CallerError("--device " + std::to_string(device) + ": there are " + std::to_string(gpus.size()));
  }
  Backend& gpu = *gpus[device];
  const std::int64_t parameters = qwen_layer_elements(arguments.text("--layer")) / (quick ? 64 : 1);
  const std::size_t copy_bytes = std::size_t{quick ? 4u : 64u} << 20;
  require_host_memory(AdamTile::bytes(TileFormat::kBf16Split, parameters) + 2 * copy_bytes);

  ThreadPool everyone(usable_cores());
  AdamTile adam(TileFormat::kBf16Split, parameters, {gpu.numa_node()}, everyone);
  Contest contest(gpu, adam, everyone, copy_bytes, quick ? 0.02 : 0.4);
  const std::vector<unsigned> steps = thread_steps(usable_cores());
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (const unsigned threads : steps) pools.push_back(std::make_unique<ThreadPool>(threads));
  Samples copies;
  std::vector<Samples> alone(steps.size()), both(steps.size());
  const int rounds = quick ? 2 : 3;
  contest.copies_alone();
  for (int round = 0; round < rounds; ++round) {
    copies.add(contest.copies_alone());
    for (std::size_t i = 0; i < steps.size(); ++i) {
      alone[i].add(contest.updates_alone(*pools[i]));
      both[i].add(contest.both(*pools[i]));
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
  double best = 0;
  for (const Samples& samples : both) best = std::max(best, spread_of(samples.ring).median);
  unsigned recommended = 0, gentle = 0;
  double kept_there = 0;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const double up_kept = median_ratio(both[i].up, copies.up),
                 down_kept = median_ratio(both[i].down, copies.down);
    const double ring = spread_of(both[i].ring).median;
    if (recommended == 0 && ring >= kGoodEnough * best) {
      recommended = steps[i];
      kept_there = std::min(up_kept, down_kept);
    }
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
