// How close AdamW comes to the speed of memory: every instruction set and format beside a pass of the
// same bytes without its arithmetic, on the same memory. All take turns, round by round.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "adam_tile.h"
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
  AdamTile* tile;
  std::string variant;
  std::function<void(ElementRange)> body;
  std::vector<double> rates;  // parameters/s, by round
};

using Tiles = std::vector<std::unique_ptr<AdamTile>>;

// The mix first in each format.
std::vector<Entry> entries(const Tiles& tiles) {
  std::vector<Entry> all;
  for (const auto& owned : tiles) {
    AdamTile* const tile = owned.get();
    all.push_back({tile, "mix alone", [tile](ElementRange range) { tile->mix(range); }, {}});
    for (const Isa isa : supported_isas()) {
      all.push_back({tile, isa_name(isa), [tile, isa](ElementRange range) { tile->update(isa, range); }, {}});
    }
  }
  return all;
}

// Every instruction set writes the bits of the scalar one, and the mix changes nothing.
void verify(AdamTile& tile, ThreadPool& pool) {
  const ElementRange range{0, std::min(kVerified, tile.elements())};
  const std::string name = format_name(tile.format());
  const std::uint64_t before = tile.digest(range);
  tile.mix(range);
  if (tile.digest(range) != before) throw OutsideError("the mix of " + name + " changed its memory");
  tile.update(Isa::kScalar, range);
  const std::uint64_t expected = tile.digest(range);
  if (expected == before) throw OutsideError("the update of " + name + " changed nothing");
  for (const Isa isa : supported_isas()) {
    tile.reset(pool);
    tile.update(isa, range);
    if (tile.digest(range) == expected) continue;
    throw OutsideError("the update of " + name + " by " + isa_name(isa) + " differs from the scalar one");
  }
  tile.reset(pool);
}

void measure(std::vector<Entry>& all, ThreadPool& pool, int rounds, double seconds) {
  for (Entry& entry : all) over_tile(pool, *entry.tile, entry.body);
  const auto begin = std::chrono::steady_clock::now();
  for (int round = 0; round < rounds; ++round) {
    auto last = std::chrono::steady_clock::now();
    for (Entry& entry : all) {
      over_tile(pool, *entry.tile, entry.body);
      const auto now = std::chrono::steady_clock::now();
      entry.rates.push_back(static_cast<double>(entry.tile->elements()) /
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
  std::size_t bytes = 0;
  for (const TileFormat format : adam_formats()) bytes += AdamTile::bytes(format, parameters);
  require_host_memory(bytes);

  ThreadPool everyone(usable_cores());
  Tiles tiles;
  for (const TileFormat format : adam_formats()) {
    tiles.push_back(std::make_unique<AdamTile>(format, parameters, std::vector<int>{}, everyone));
    verify(*tiles.back(), everyone);
  }
  report.set("verified", true);
  Table table("A layer of " + std::to_string(parameters) + " parameters, all in turn",
              {{"format", "format"},
               {"B/param", "bytes_per_parameter"},
               {"threads", "threads"},
               {"variant", "variant"},
               {"GB/s", "gb_per_s"},
               {"Mparam/s", "mparam_per_s"},
               {"of mix", "of_mix"}});
  for (const std::int64_t count : threads) {
    ThreadPool pool(static_cast<unsigned>(count));
    std::vector<Entry> all = entries(tiles);
    measure(all, pool, quick ? 3 : 21, kSecondsInAll / static_cast<double>(threads.size()));
    const Entry* mix = nullptr;
    for (const Entry& entry : all) {
      if (!mix || mix->tile != entry.tile) mix = &entry;
      const double bytes_each = entry.tile->bytes_per_parameter();
      std::vector<double> bandwidths, rates;
      for (const double rate : entry.rates) {
        bandwidths.push_back(rate * bytes_each / 1e9);
        rates.push_back(rate / 1e6);
      }
      table.add({format_name(entry.tile->format()), number(bytes_each, 0), count, entry.variant,
                 spread(spread_of(bandwidths)), spread(spread_of(rates), 0),
                 share(median_ratio(entry.rates, mix->rates))});
    }
  }
  report.add("adam", table);
  report.note(
      "\"of mix\" is the share of a pass that reads and writes the same streams without any arithmetic. "
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
