// What the link to the GPU carries, and whether the runtime's copies reach it. Each case is measured
// as nvbandwidth does (held start, warm-up, events, median), beside a bare loop of cudaMemcpyAsync of
// the largest size in the same round, and its bytes are verified before it is timed.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "copy_runner.h"
#include "device/host_memory.h"
#include "machine.h"
#include "node_memory.h"
#include "program.h"
#include "qwen_layers.h"

namespace megatrain::bench {
namespace {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

struct Sizes {
  explicit Sizes(bool quick)
      : largest(quick ? 8 * kMiB : kGiB), medium(quick ? 4 * kMiB : 256 * kMiB), rounds(quick ? 3 : 9) {}
  std::size_t largest;
  std::size_t medium;
  int rounds;
};

void run_parallel(ThreadPool& pool, std::size_t words,
                  const std::function<void(std::size_t begin, std::size_t end)>& body) {
  pool.run([&](unsigned worker, unsigned workers) {
    body(words * worker / workers, words * (worker + 1) / workers);
  });
}

// No two words are equal, so that a piece that lands in the wrong place shows.
void write_pattern(ThreadPool& pool, std::byte* data, std::size_t bytes) {
  auto* const words = reinterpret_cast<std::uint64_t*>(data);
  run_parallel(pool, bytes / 8, [=](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) words[i] = (i + 1) * 0x9e3779b97f4a7c15u;
  });
}

// A GPU with the buffers that copies go between. Both sources hold the pattern.
struct Station {
  Station(std::shared_ptr<Backend> backend, ThreadPool& pool, std::size_t bytes)
      : bytes(bytes),
        runner(backend),
        source(*backend, pool, bytes, true),
        target(*backend, pool, bytes, true),
        device_target(backend->device_index(), bytes),
        device_source(backend->device_index(), bytes) {
    if (!source.pinned() || !target.pinned()) {
      throw OutsideError("the machine refused to pin " + std::to_string(2 * bytes) + " bytes (ulimit -l)");
    }
    write_pattern(pool, source.data(), bytes);
    Lane fill = up({{0, bytes}});
    fill.device = device_source.data();
    runner.run_as_issued({fill});
  }

  Lane up(std::vector<Piece> pieces) {
    return {CopyKind::kHostToDevice, source.data(), device_target.data(), std::move(pieces)};
  }
  Lane down(std::vector<Piece> pieces) {
    return {CopyKind::kDeviceToHost, target.data(), device_source.data(), std::move(pieces)};
  }

  std::size_t bytes;
  CopyRunner runner;
  HostBuffer source, target;
  DeviceMemory device_target, device_source;
};

// A way of copying, in both directions.
struct Case {
  std::string label;
  Lane up, down;
  bool held = true;  // pageable memory cannot be: its copies block the caller
};

// Runs the lanes on cleared targets and holds what arrived against the pattern.
class Verifier {
 public:
  explicit Verifier(Station& station) : station_(station) {}

  void check(const Case& tried, CopyRunner& runner) {
    const std::size_t end = end_of(tried.up);
    station_.device_target.fill(0, end);
    std::memset(tried.down.host, 0, end_of(tried.down));
    if (tried.held && tried.up.pieces.size() + tried.down.pieces.size() <= kMostHeldCopies) {
      runner.run_held({tried.up, tried.down});
    } else {
      runner.run_as_issued({tried.up, tried.down});
    }
    compare(tried, tried.down.host, tried.down.pieces, "from the device");
    Lane back = station_.down({{0, end}});
    back.device = station_.device_target.data();
    runner.run_as_issued({back});
    compare(tried, back.host, tried.up.pieces, "to the device");
    checked_ += tried.up.pieces.size() + tried.down.pieces.size();
  }

  std::size_t checked() const noexcept { return checked_; }

 private:
  static std::size_t end_of(const Lane& lane) { return lane.pieces.back().offset + lane.pieces.back().bytes; }

  void compare(const Case& tried, const std::byte* arrived, const std::vector<Piece>& pieces,
               const char* direction) {
    for (const Piece& piece : pieces) {
      if (std::memcmp(arrived + piece.offset, station_.source.data() + piece.offset, piece.bytes) == 0)
        continue;
      throw OutsideError("copies " + std::string(direction) + " arrived wrong: " + tried.label + ", " +
                         std::to_string(piece.bytes) + " bytes at " + std::to_string(piece.offset));
    }
  }

  Station& station_;
  std::size_t checked_ = 0;
};

// GB/s of one case, by round.
struct Samples {
  std::vector<double> up, down, both_up, both_down, both;

  void add(CopyRunner& runner, const Case& tried) {
    const double up_bytes = tried.up.bytes() / 1e9, down_bytes = tried.down.bytes() / 1e9;
    if (!tried.held) {
      up.push_back(up_bytes / runner.run_as_issued({tried.up}));
      down.push_back(down_bytes / runner.run_as_issued({tried.down}));
      return;
    }
    up.push_back(up_bytes / runner.run_held({tried.up})[0]);
    down.push_back(down_bytes / runner.run_held({tried.down})[0]);
    const std::vector<double> seconds = runner.run_held({tried.up, tried.down});
    both_up.push_back(up_bytes / seconds[0]);
    both_down.push_back(down_bytes / seconds[1]);
    both.push_back((up_bytes + down_bytes) / std::max(seconds[0], seconds[1]));
  }
};

// The bare loop, and the cases that are held against it.
class Session {
 public:
  Session(Station& station, const Sizes& sizes)
      : station_(station),
        sizes_(sizes),
        verifier_(station),
        bare_source_(device(), sizes.largest),
        bare_target_(device(), sizes.largest) {
    std::memcpy(bare_source_.data(), station.source.data(), sizes.largest);
    const std::vector<Piece> whole{{0, sizes.largest}};
    bare_ = {"bare cudaMemcpyAsync", station.up(whole), station.down(whole)};
    bare_.up.host = bare_source_.data();
    bare_.down.host = bare_target_.data();
    bare_.up.bare = bare_.down.bare = true;
    verifier_.check(bare_, station.runner);
  }

  // Every case and the bare loop in every round.
  Table measure(const std::string& title, const char* first_column, const std::vector<Case>& cases) {
    for (const Case& tried : cases) verifier_.check(tried, station_.runner);
    Samples ceiling;
    std::vector<Samples> samples(cases.size());
    for (int round = 0; round < sizes_.rounds; ++round) {
      ceiling.add(station_.runner, bare_);
      for (std::size_t i = 0; i < cases.size(); ++i) samples[i].add(station_.runner, cases[i]);
    }
    Table table(title, {{first_column, "case"},
                        {"up GB/s", "up"},
                        {"of bare", "up_share"},
                        {"down GB/s", "down"},
                        {"of bare", "down_share"},
                        {"at once: up", "both_up"},
                        {"down", "both_down"},
                        {"sum", "both"},
                        {"of bare", "both_share"}});
    add_row(table, bare_.label + " " + bytes_text(static_cast<double>(sizes_.largest)), ceiling, ceiling);
    for (std::size_t i = 0; i < cases.size(); ++i) add_row(table, cases[i].label, samples[i], ceiling);
    return table;
  }

  Station& station() noexcept { return station_; }
  Verifier& verifier() noexcept { return verifier_; }
  const Sizes& sizes() const noexcept { return sizes_; }
  const Case& bare() const noexcept { return bare_; }

 private:
  int device() const { return station_.runner.gpu().device_index(); }

  static void add_row(Table& table, const std::string& label, const Samples& own, const Samples& ceiling) {
    std::vector<Cell> row{label, spread(spread_of(own.up)), share(median_ratio(own.up, ceiling.up)),
                          spread(spread_of(own.down)), share(median_ratio(own.down, ceiling.down))};
    if (own.both.empty()) {
      row.insert(row.end(), 4, none());
    } else {
      row.push_back(number(spread_of(own.both_up).median));
      row.push_back(number(spread_of(own.both_down).median));
      row.push_back(spread(spread_of(own.both)));
      row.push_back(share(median_ratio(own.both, ceiling.both)));
    }
    table.add(std::move(row));
  }

  Station& station_;
  const Sizes sizes_;
  Verifier verifier_;
  CudaHostMemory bare_source_, bare_target_;
  Case bare_;
};

// `count` pieces of `bytes`, one behind the other.
std::vector<Piece> equal_pieces(std::size_t bytes, std::size_t count) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < count; ++i) pieces.push_back({i * bytes, bytes});
  return pieces;
}

Table by_size(Session& session) {
  Station& station = session.station();
  std::vector<Case> cases;
  for (std::size_t bytes = 64 * kKiB; bytes <= session.sizes().largest; bytes *= 4) {
    // Enough of the small ones that the ends of the measurement do not matter; half of what a latch
    // holds, since both directions are held by one.
    const std::size_t total = std::min(session.sizes().largest, 64 * kMiB);
    const std::size_t count = std::clamp<std::size_t>(total / bytes, 1, kMostHeldCopies / 2);
    const std::vector<Piece> pieces = equal_pieces(bytes, count);
    cases.push_back(
        {bytes_text(static_cast<double>(bytes)) + (count > 1 ? " x " + std::to_string(count) : ""),
         station.up(pieces), station.down(pieces)});
  }
  return session.measure("Copies by size: registered memory with huge pages, one stream", "size", cases);
}

Table by_streams(Session& session) {
  Station& station = session.station();
  std::vector<Case> cases;
  for (const int streams : {1, 2, kMostStreams}) {
    const std::vector<Piece> pieces = equal_pieces(session.sizes().medium / 16, 16);
    Case tried{std::to_string(streams) + (streams == 1 ? " stream" : " streams"), station.up(pieces),
               station.down(pieces)};
    tried.up.streams = tried.down.streams = streams;
    cases.push_back(std::move(tried));
  }
  return session.measure("Copies by number of streams a direction: 16 copies of " +
                             bytes_text(static_cast<double>(session.sizes().medium / 16)),
                         "streams", cases);
}

// The kinds of host memory. Each brings memory up from `source` and down to `target`.
struct HostKind {
  std::string label;
  bool held;
  std::byte* source;
  std::byte* target;
  double seconds;  // to allocate, touch and pin both
};

class HostKinds {
 public:
  HostKinds(Session& session, ThreadPool& pool)
      : gpu_(session.station().runner.gpu()), bytes_(session.sizes().medium) {
    const auto timed = [&](const char* label, bool held, auto make) {
      const auto begin = std::chrono::steady_clock::now();
      const std::pair<std::byte*, std::byte*> memory = make();
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
      std::memcpy(memory.first, session.station().source.data(), bytes_);
      kinds_.push_back({label, held, memory.first, memory.second, took.count()});
    };
    timed("registered, huge pages", true, [&] { return std::pair(map(pool, true), map(pool, true)); });
    timed("registered, 4 KiB pages", true, [&] { return std::pair(small(pool), small(pool)); });
    timed("cudaHostAlloc", true, [&] { return std::pair(allocated(), allocated()); });
    timed("pageable", false, [&] { return std::pair(map(pool, false), map(pool, false)); });
  }
  ~HostKinds() {
    for (const auto& memory : small_) gpu_.unpin(memory->data(), memory->bytes());
  }

  const std::vector<HostKind>& kinds() const noexcept { return kinds_; }

 private:
  std::byte* map(ThreadPool& pool, bool pin) {
    return mapped_.emplace_back(std::make_unique<HostBuffer>(gpu_, pool, bytes_, pin))->data();
  }
  std::byte* small(ThreadPool& pool) {
    auto memory = std::make_unique<NodeMemory>(bytes_, std::vector{gpu_.numa_node()}, Pages::kSmall);
    memory->touch(pool);
    if (!gpu_.pin(memory->data(), memory->bytes())) {
      throw OutsideError("the machine refused to pin " + std::to_string(bytes_) + " bytes");
    }
    return small_.emplace_back(std::move(memory))->data();
  }
  std::byte* allocated() {
    return allocated_.emplace_back(std::make_unique<CudaHostMemory>(gpu_.device_index(), bytes_))->data();
  }

  Backend& gpu_;
  const std::size_t bytes_;
  std::vector<std::unique_ptr<HostBuffer>> mapped_;
  std::vector<std::unique_ptr<NodeMemory>> small_;
  std::vector<std::unique_ptr<CudaHostMemory>> allocated_;
  std::vector<HostKind> kinds_;
};

void by_memory(Session& session, ThreadPool& pool, Report& report) {
  const HostKinds memory(session, pool);
  const std::size_t bytes = session.sizes().medium;
  std::vector<Case> cases;
  Table cost("What it costs to have that memory: allocated, touched, pinned",
             {{"memory", "case"}, {"s/GiB", "seconds_per_gib"}});
  for (const HostKind& kind : memory.kinds()) {
    Case tried{kind.label, session.station().up({{0, bytes}}), session.station().down({{0, bytes}}),
               kind.held};
    tried.up.host = kind.source;
    tried.down.host = kind.target;
    cases.push_back(std::move(tried));
    cost.add(
        {kind.label, number(kind.seconds / (2 * static_cast<double>(bytes)) * static_cast<double>(kGiB), 3)});
  }
  report.add("memory", session.measure("Copies by kind of host memory: one copy of " +
                                           bytes_text(static_cast<double>(bytes)) + " (pageable: as issued)",
                                       "memory", cases));
  report.add("memory_cost", cost);
}

// The weights of a layer as one burst, and cut up. Cut small, queueing costs more than copying, so
// both are shown: what the device does when all is queued, and what a caller gets.
Table by_pieces(Session& session) {
  Station& station = session.station();
  std::vector<std::int64_t> parameters = qwen_layer("7b");
  std::size_t layer_bytes = 0;
  std::vector<Piece> by_parameter;
  for (std::int64_t elements : parameters) {
    if (session.sizes().largest < kGiB) elements = std::max<std::int64_t>(elements / 256, 8);
    by_parameter.push_back({layer_bytes, static_cast<std::size_t>(elements) * 2});
    layer_bytes += (by_parameter.back().bytes + 255) / 256 * 256;
  }
  const auto cut = [&](std::size_t bytes) { return equal_pieces(bytes, layer_bytes / bytes); };
  const std::vector<std::pair<std::string, std::vector<Piece>>> ways = {
      {"one burst", {{0, layer_bytes}}},
      {"a copy a parameter", by_parameter},
      {"64 KiB copies", cut(64 * kKiB)},
      {"4 KiB copies", cut(4 * kKiB)},
  };
  std::vector<Case> cases;
  for (const auto& [label, pieces] : ways) {
    cases.push_back({label, station.up(pieces), station.down(pieces)});
    session.verifier().check(cases.back(), station.runner);
  }
  struct Issued {
    std::vector<double> up, down, held_up;
  };
  std::vector<Issued> samples(cases.size());
  Issued bare;
  const auto add = [&](Issued& to, const Case& tried) {
    to.up.push_back(tried.up.bytes() / 1e9 / station.runner.run_as_issued({tried.up}));
    to.down.push_back(tried.down.bytes() / 1e9 / station.runner.run_as_issued({tried.down}));
    Lane first = tried.up;
    first.pieces.resize(std::min<std::size_t>(first.pieces.size(), kMostHeldCopies));
    to.held_up.push_back(first.bytes() / 1e9 / station.runner.run_held({first})[0]);
  };
  for (int round = 0; round < session.sizes().rounds; ++round) {
    add(bare, session.bare());
    for (std::size_t i = 0; i < cases.size(); ++i) add(samples[i], cases[i]);
  }
  Table table("A layer of Qwen2.5-7B, " + bytes_text(static_cast<double>(layer_bytes)) +
                  " of bf16 weights, as issued (and up from a held start, at most " +
                  std::to_string(kMostHeldCopies) + " copies)",
              {{"cut into", "case"},
               {"copies", "copies"},
               {"up GB/s", "up"},
               {"of bare", "up_share"},
               {"down GB/s", "down"},
               {"of bare", "down_share"},
               {"held, up", "held_up"}});
  for (std::size_t i = 0; i < cases.size(); ++i) {
    table.add({cases[i].label, cases[i].up.pieces.size(), spread(spread_of(samples[i].up)),
               share(median_ratio(samples[i].up, bare.up)), spread(spread_of(samples[i].down)),
               share(median_ratio(samples[i].down, bare.down)), spread(spread_of(samples[i].held_up))});
  }
  return table;
}

// Every GPU alone, then all at once. GPUs may share a switch or a socket's link.
Table by_gpu(const std::vector<std::shared_ptr<Backend>>& gpus, ThreadPool& pool, const Sizes& sizes) {
  std::vector<std::unique_ptr<Station>> stations;
  for (const auto& gpu : gpus) {
    stations.push_back(std::make_unique<Station>(gpu, pool, sizes.largest));
    Station& station = *stations.back();
    const std::vector<Piece> whole{{0, sizes.largest}};
    Verifier(station).check(
        {"GPU " + std::to_string(gpu->device_index()), station.up(whole), station.down(whole)},
        station.runner);
  }
  const double gigabytes = static_cast<double>(sizes.largest) / 1e9;
  const std::vector<Piece> whole{{0, sizes.largest}};
  // GB/s of each GPU, of both directions together where there are two.
  const auto run = [&](const std::vector<Station*>& together, bool up, bool down) {
    for (Station* station : together) {
      std::vector<Lane> lanes;
      if (up) lanes.push_back(station->up(whole));
      if (down) lanes.push_back(station->down(whole));
      station->runner.queue(lanes);
    }
    for (Station* station : together) station->runner.release();
    std::vector<double> rates;
    for (Station* station : together) {
      const std::vector<double> seconds = station->runner.finish();
      rates.push_back(gigabytes * static_cast<double>(seconds.size()) /
                      *std::max_element(seconds.begin(), seconds.end()));
    }
    return rates;
  };
  struct Mode {
    bool up, down;
    std::vector<std::vector<double>> alone, together;  // by GPU
    std::vector<double> sum;
  };
  std::vector<Mode> modes{{true, false, {}, {}, {}}, {false, true, {}, {}, {}}, {true, true, {}, {}, {}}};
  std::vector<Station*> all;
  for (const auto& station : stations) all.push_back(station.get());
  for (Mode& mode : modes) {
    mode.alone.resize(all.size());
    mode.together.resize(all.size());
    for (int round = 0; round < sizes.rounds; ++round) {
      for (std::size_t i = 0; i < all.size(); ++i) {
        mode.alone[i].push_back(run({all[i]}, mode.up, mode.down)[0]);
      }
      const std::vector<double> rates = run(all, mode.up, mode.down);
      double sum = 0;
      for (std::size_t i = 0; i < all.size(); ++i) {
        mode.together[i].push_back(rates[i]);
        sum += rates[i];
      }
      mode.sum.push_back(sum);
    }
  }
  Table table("GPUs alone and all at once, GB/s (the sum of both directions where they run at once)",
              {{"GPU", "gpu"},
               {"up, alone", "up_alone"},
               {"all", "up_all"},
               {"down, alone", "down_alone"},
               {"all", "down_all"},
               {"at once, alone", "both_alone"},
               {"all", "both_all"}});
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::vector<Cell> row{std::to_string(i)};
    for (const Mode& mode : modes) {
      row.push_back(spread(spread_of(mode.alone[i])));
      row.push_back(spread(spread_of(mode.together[i])));
    }
    table.add(std::move(row));
  }
  std::vector<Cell> row{"sum"};
  for (const Mode& mode : modes) {
    row.push_back(none());
    row.push_back(spread(spread_of(mode.sum)));
  }
  table.add(std::move(row));
  return table;
}

void run(const Arguments& arguments, Report& report) {
  const std::vector<std::shared_ptr<Backend>> gpus = require_gpus();
  const Sizes sizes(arguments.quick());
  const auto device = static_cast<std::size_t>(arguments.count("--device", 0));
  if (device >= gpus.size())
    throw CallerError("--device " + std::to_string(device) + ": there are " + std::to_string(gpus.size()));
  require_host_memory((4 + 2 * gpus.size()) * sizes.largest + 8 * sizes.medium);
  ThreadPool pool(usable_cores());
  // Memory of cudaHostAlloc lies where the caller runs.
  for (const NumaNode& node : numa_nodes()) {
    if (node.index == gpus[device]->numa_node()) run_on(node.cpus);
  }
  {
    Station station(gpus[device], pool, sizes.largest);
    Session session(station, sizes);
    report.add("sizes", by_size(session));
    report.add("pieces", by_pieces(session));
    by_memory(session, pool, report);
    report.add("streams", by_streams(session));
    report.set("copies_verified", session.verifier().checked());
  }
  if (gpus.size() > 1) report.add("gpus", by_gpu(gpus, pool, sizes));
  report.set("verified", true);
  report.note(
      "\"of bare\" is the share of a loop of cudaMemcpyAsync on memory of cudaHostAlloc, of the "
      "largest size, in the same rounds. All copies were verified.");
}

}  // namespace
}  // namespace megatrain::bench

int main(int argc, char** argv) {
  return megatrain::bench::run_program(
      argc, argv,
      {"pcie_saturation",
       "what the link to the GPU carries, and whether the runtime's copies reach it",
       {{"--device", "N", "0", "the GPU of all tables but the last"}},
       megatrain::bench::run});
}
