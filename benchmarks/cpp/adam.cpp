// How close AdamW comes to the speed of memory: every instruction set and format beside a pass of the
// same bytes without its arithmetic, on the same memory. All take turns, round by round, and never the
// same memory twice in a row, since some of the tiles would stay in large caches.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "adam_tile.h"
#include "base/cpu.h"
#include "base/error.h"
#include "machine.h"
#include "program.h"
#include "qwen_layers.h"

namespace megatrain::bench {
namespace {

constexpr double kSecondsInAll = 60;

// Parameters whose update is compared between instruction sets; not a multiple of any vector.
constexpr std::int64_t kVerified = 100003;

// Parameters of each thread that its own cache holds in any format, and how often they are updated.
constexpr std::int64_t kCached = 8192;
constexpr int kCachedPasses = 256;

// A format by an instruction set, timed in the same turn as its mix: what is compared are neighbours in time.
struct Entry {
  AdamTile* tile;
  Isa isa;
  std::vector<double> mix, update, cached;  // parameters/s, by round
};

using Tiles = std::vector<std::unique_ptr<AdamTile>>;

// All formats by one instruction set.
using Turn = std::vector<Entry>;

std::vector<Turn> turns(const Tiles& tiles) {
  std::vector<Turn> all;
  for (const Isa isa : supported_isas()) {
    Turn& turn = all.emplace_back();
    for (const auto& tile : tiles) turn.push_back({tile.get(), isa, {}, {}, {}});
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

// Parameters/s of one pass.
double rate(ThreadPool& pool, const AdamTile& tile, const std::function<void(ElementRange)>& body) {
  const auto begin = std::chrono::steady_clock::now();
  over_tile(pool, tile, body);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return static_cast<double>(tile.elements()) / took.count();
}

// Parameters/s where memory does not take part.
double cached_rate(ThreadPool& pool, AdamTile& tile, Isa isa) {
  std::atomic<std::int64_t> updated = 0;
  const auto begin = std::chrono::steady_clock::now();
  over_tile(pool, tile, [&](ElementRange range) {
    // Shares are whole pages: the last ones may have less than others, or nothing.
    const std::int64_t count = std::min(kCached, range.size());
    for (int pass = 0; pass < kCachedPasses; ++pass) tile.update(isa, {range.begin, range.begin + count});
    updated += count * kCachedPasses;
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  return static_cast<double>(updated) / took.count();
}

// Between two passes over a tile lie passes over all others.
void measure(Turn& turn, ThreadPool& pool) {
  for (Entry& entry : turn) {
    entry.mix.push_back(rate(pool, *entry.tile, [&](ElementRange range) { entry.tile->mix(range); }));
  }
  for (Entry& entry : turn) {
    entry.update.push_back(
        rate(pool, *entry.tile, [&](ElementRange range) { entry.tile->update(entry.isa, range); }));
  }
  for (Entry& entry : turn) entry.cached.push_back(cached_rate(pool, *entry.tile, entry.isa));
}

std::vector<Turn> measure(const Tiles& tiles, ThreadPool& pool, int rounds, double seconds) {
  std::vector<Turn> warm_up = turns(tiles), all = turns(tiles);
  const auto begin = std::chrono::steady_clock::now();
  for (Turn& turn : warm_up) measure(turn, pool);
  for (int round = 0; round < rounds; ++round) {
    for (Turn& turn : all) measure(turn, pool);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (round >= 2 && took.count() > seconds) break;
  }
  return all;
}

// cached: none for what computes nothing.
void add_row(Table& table, const AdamTile& tile, std::int64_t threads, const char* variant,
             const std::vector<double>& rates, double of_mix, std::vector<double> cached) {
  const double bytes_each = tile.bytes_per_parameter();
  std::vector<double> gigabytes, millions;
  for (const double rate : rates) {
    gigabytes.push_back(rate * bytes_each / 1e9);
    millions.push_back(rate / 1e6);
  }
  for (double& rate : cached) rate /= 1e6;
  const Cell in_cache = cached.empty() ? none() : spread(spread_of(cached), 0);
  table.add({format_name(tile.format()), number(bytes_each, 0), threads, variant,
             spread(spread_of(gigabytes)), spread(spread_of(millions), 0), share(of_mix), in_cache});
}

void run(const Arguments& arguments, Report& report) {
  const bool quick = arguments.quick();
  // A round of a large layer takes half a minute on one core.
  const std::string asked = arguments.text("--layer");
  const std::string layer = !asked.empty() ? asked : usable_cores() < 4 ? "0.5b" : "1.5b";
  const std::int64_t parameters = qwen_layer_elements(layer) / (quick ? 64 : 1);
  std::vector<std::int64_t> threads = arguments.counts("--threads", 1, kMostThreads);
  if (threads.empty()) threads = {static_cast<std::int64_t>(usable_cores())};
  std::size_t bytes = 0;
  for (const TileFormat format : adam_formats()) bytes += AdamTile::bytes(format, parameters);
  require_memory(bytes, "a smaller --layer");

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
               {"of mix", "of_mix"},
               {"in cache", "cached_mparam_per_s"}});
  for (const std::int64_t count : threads) {
    ThreadPool pool(static_cast<unsigned>(count));
    const std::vector<Turn> all =
        measure(tiles, pool, quick ? 3 : 21, kSecondsInAll / static_cast<double>(threads.size()));
    for (std::size_t i = 0; i < tiles.size(); ++i) {
      std::vector<double> mix;
      for (const Turn& turn : all) mix.insert(mix.end(), turn[i].mix.begin(), turn[i].mix.end());
      add_row(table, *tiles[i], count, "mix alone", mix, 1, {});
      for (const Turn& turn : all) {
        const Entry& entry = turn[i];
        add_row(table, *tiles[i], count, isa_name(entry.isa), entry.update,
                median_ratio(entry.update, entry.mix), entry.cached);
      }
    }
  }
  report.add("adam", table);
  report.note(
      "\"of mix\" is the share of a pass that reads and writes the same streams without any arithmetic; "
      "\"in cache\" the Mparam/s of the arithmetic alone, on parameters that stay in each core's cache: "
      "where "
      "it is not well above Mparam/s, arithmetic binds and not memory. All variants wrote the same bits.");
}

}  // namespace
}  // namespace megatrain::bench

int main(int argc, char** argv) {
  return megatrain::bench::run_program(
      argc, argv,
      {"adam",
       "how close AdamW comes to the speed of memory",
       {{"--layer", "MODEL", "",
         "updates a layer of Qwen2.5 0.5b, 1.5b, 3b, 7b or 14b (default: 1.5b, on fewer than 4 cores 0.5b)"},
        {"--threads", "LIST", "", "numbers of threads, such as 1,4,16 (default: all usable cores)"}},
       megatrain::bench::run});
}
