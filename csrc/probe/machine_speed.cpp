#include "probe/machine_speed.h"

#include <algorithm>
#include <memory>

#include "base/cpu.h"
#include "base/error.h"
#include "device/host_memory.h"
#include "probe/cache_size.h"

namespace megatrain {
namespace {

constexpr double kGoodEnough = 0.98;
constexpr std::size_t kMostCacheBytes = std::size_t{512} << 20;
constexpr double kMostSeconds = 60;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Of each rate by itself.
Rates median(const std::vector<Rates>& rates) {
  const auto of = [&](double Rates::* rate) {
    std::vector<double> values;
    for (const Rates& one : rates) values.push_back(one.*rate);
    return median(std::move(values));
  };
  return {of(&Rates::up), of(&Rates::down), of(&Rates::updates)};
}

// All that take turns.
struct Samples {
  std::vector<Rates> up, down, together;
  std::vector<std::vector<Rates>> alone, beside;
};

}  // namespace

std::vector<unsigned> thread_steps(unsigned least, unsigned most) {
  std::vector<unsigned> steps{most};
  if (most > 1) steps.push_back(most - 1);
  for (unsigned power = 1; power < most; power *= 2) {
    steps.push_back(power);
    if (power > 1 && power / 2 * 3 < most) steps.push_back(power / 2 * 3);
  }
  std::erase_if(steps, [&](unsigned step) { return step < least; });
  std::sort(steps.begin(), steps.end());
  steps.erase(std::unique(steps.begin(), steps.end()), steps.end());
  return steps;
}

std::int64_t probe_parameters() {
  return std::clamp(std::int64_t{usable_cores()} << 21, std::int64_t{8} << 20, std::int64_t{32} << 20);
}

std::size_t probe_cache_bytes(std::size_t cache_bytes, std::size_t available_bytes) {
  return std::min({cache_bytes, kMostCacheBytes, available_bytes / 16});
}

unsigned recommended_threads(const std::vector<unsigned>& threads, const std::vector<double>& rings) {
  if (threads.empty()) return 0;
  const double best = *std::max_element(rings.begin(), rings.end());
  std::size_t first = 0;
  while (rings[first] < kGoodEnough * best) ++first;
  return threads[first];
}

MachineSpeed measure_machine(Backend& backend, std::byte* device, std::size_t device_bytes,
                             const ProbeSettings& settings) {
  if (!(settings.seconds > 0 && settings.seconds <= kMostSeconds)) {
    throw CallerError("a probe of " + std::to_string(settings.seconds) +
                      " seconds a measurement; it takes more than 0 and at most " +
                      std::to_string(kMostSeconds));
  }
  if (device_bytes < 2 || settings.parameters < 1 || settings.rounds < 1) {
    throw CallerError("a probe of " + std::to_string(settings.parameters) + " parameters in " +
                      std::to_string(settings.rounds) + " rounds with " + std::to_string(device_bytes) +
                      " bytes on the device; it needs at least 1, 1 and 2");
  }
  const std::size_t cache_bytes =
      probe_cache_bytes(settings.cache_bytes ? *settings.cache_bytes : last_level_cache_bytes(),
                        host_memory_limit().available_bytes);
  require_host_memory(Contest::host_bytes(device_bytes, settings.parameters, cache_bytes));
  const unsigned cores = usable_cores();
  // Fewer than a quarter of the cores nowhere came near to the best.
  const std::vector<unsigned> steps = thread_steps((cores + 3) / 4, cores);
  std::vector<std::unique_ptr<ThreadPool>> pools;
  for (const unsigned threads : steps) pools.push_back(std::make_unique<ThreadPool>(threads));
  Contest contest(backend, *pools.back(), device, device_bytes, settings.parameters, cache_bytes);
  Samples samples;
  samples.alone.resize(steps.size());
  samples.beside.resize(steps.size());
  contest.copies(true, true, settings.seconds);  // warms up
  for (int round = 0; round < settings.rounds; ++round) {
    samples.up.push_back(contest.copies(true, false, settings.seconds));
    samples.down.push_back(contest.copies(false, true, settings.seconds));
    samples.together.push_back(contest.copies(true, true, settings.seconds));
    for (std::size_t i = 0; i < steps.size(); ++i) {
      samples.alone[i].push_back(contest.updates(*pools[i], settings.seconds));
      samples.beside[i].push_back(contest.both(*pools[i], settings.seconds));
    }
  }
  const Rates together = median(samples.together);
  MachineSpeed speed{.up = median(samples.up).up,
                     .down = median(samples.down).down,
                     .up_together = together.up,
                     .down_together = together.down,
                     .by_threads = {},
                     .recommended_threads = 0};
  std::vector<double> rings;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    speed.by_threads.push_back({steps[i], median(samples.alone[i]).updates, median(samples.beside[i])});
    rings.push_back(speed.by_threads.back().beside_copies.ring());
  }
  speed.recommended_threads = recommended_threads(steps, rings);
  return speed;
}

}  // namespace megatrain
