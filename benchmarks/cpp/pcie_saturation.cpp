// What the link to the GPU carries, and whether the runtime's copies reach it. Each case is measured
// as nvbandwidth does (held start, warm-up, events, median), beside a bare loop of cudaMemcpyAsync of
// the largest size in the same round, and its bytes are verified before it is timed.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "copy_gpus.h"
#include "copy_session.h"
#include "host_kinds.h"
#include "machine.h"
#include "node_memory.h"
#include "program.h"
#include "qwen_layers.h"

namespace megatrain::bench {
namespace {

constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB, kGiB = 1024 * kMiB;

Table by_size(CopySession& session) {
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

Table by_streams(CopySession& session) {
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

void by_memory(CopySession& session, ThreadPool& pool, Report& report) {
  const std::size_t bytes = session.sizes().medium;
  const HostKinds memory(session.station().runner.gpu(), pool, bytes, session.station().source.data());
  std::vector<Case> cases;
  Table cost("What it costs to have that memory: allocated, touched, pinned",
             {{"memory", "case"}, {"s/GiB", "seconds_per_gib"}});
  for (const HostKind& kind : memory.all()) {
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
Table by_pieces(CopySession& session) {
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
    session.verifier().check(cases.back());
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

void run(const Arguments& arguments, Report& report) {
  const CopySizes sizes(arguments.quick());
  const auto device = static_cast<std::size_t>(arguments.count("--device", 0, kMostDevices));
  const std::vector<std::shared_ptr<Backend>> gpus = require_gpus();
  if (device >= gpus.size())
    throw CallerError("--device " + std::to_string(device) + ": there are " + std::to_string(gpus.size()));
  require_memory((4 + 2 * gpus.size()) * sizes.largest + 8 * sizes.medium, "--quick, which measures less");
  ThreadPool pool(usable_cores());
  // Memory of cudaHostAlloc lies where the caller runs.
  const std::vector<NumaNode> nodes = numa_nodes();
  const int near = gpus[device]->numa_node();
  for (const NumaNode& node : nodes) {
    if (node.index == near) run_on(node.cpus);  // where that is forbidden the note below says what came of it
  }
  {
    Station station(gpus[device], pool, sizes.largest);
    const int found = node_of(station.source.data());
    if (nodes.size() > 1 && near >= 0 && found != near) {
      report.note("The GPU is on NUMA node " + std::to_string(near) + ", the host's memory on " +
                  (found < 0 ? "a node that the kernel does not tell" : "node " + std::to_string(found)) +
                  ": containers may forbid to choose.");
    }
    CopySession session(station, sizes);
    report.add("sizes", by_size(session));
    report.add("pieces", by_pieces(session));
    by_memory(session, pool, report);
    report.add("streams", by_streams(session));
    report.set("copies_verified", session.verifier().checked());
  }
  if (gpus.size() > 1) report.add("gpus", copies_by_gpu(gpus, pool, sizes));
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
