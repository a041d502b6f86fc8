// The whole ring without torch: how close a step comes to the longest of its parts, which is what
// perfect overlap would take. Parts are measured alone, right after each run.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "machine.h"
#include "program.h"
#include "qwen_layers.h"
#include "ring.h"

namespace megatrain::bench {
namespace {

// Backward recomputes forward and takes twice as long itself.
constexpr double kForwardShare = 0.25;

constexpr std::int64_t kMostLayers = 10000;

struct Parts {
  double compute = 0, up = 0, down = 0, updates = 0;  // seconds a step
  double longest() const { return std::max({compute, up, down, updates}); }
};

// What no order of work can beat when updates wait for the end of backward: forward of layer l waits
// for the updates of layers 0 ... l, backward overlaps none, and each has its own copies.
double floor_after_backward(const Parts& parts, int layers) {
  const double forward = parts.compute * kForwardShare, backward = parts.compute - forward;
  const double behind_updates = std::max(parts.updates + forward / layers, parts.updates / layers + forward);
  return std::max(behind_updates, parts.up / 2) + std::max({backward, parts.up / 2, parts.down});
}

struct Level {
  const char* name;
  double of_longest;  // computation, as a multiple of the longest other part
};

void run(const Arguments& arguments, Report& report) {
  const bool quick = arguments.quick();
  const std::string backend_name = arguments.text("--backend");
  if (backend_name != "auto" && backend_name != "cuda" && backend_name != "host") {
    throw CallerError("--backend is \"" + backend_name + "\"; it must be auto, cuda or host");
  }
  RingShape shape;
  shape.parameters = qwen_layer(arguments.text("--layer"));
  for (std::int64_t& elements : shape.parameters)
    elements = std::max<std::int64_t>(elements / (quick ? 256 : 1), 1);
  shape.layers = static_cast<int>(arguments.count("--layers", 1, kMostLayers));
  if (quick && !arguments.given("--layers")) shape.layers = 4;
  shape.slots = static_cast<int>(arguments.count("--slots", 2, kMostLayers));
  shape.threads = static_cast<unsigned>(arguments.count("--threads", 0, kMostThreads));
  std::shared_ptr<Backend> backend;
  if (backend_name == "host" || (backend_name == "auto" && cuda_device_count() == 0)) {
    backend = make_host_backend({});
  } else {
    backend = require_gpus().front();
  }
  std::int64_t parameters = 0;
  for (const std::int64_t elements : shape.parameters) parameters += elements;
  require_memory(static_cast<std::size_t>(parameters) * 16 * static_cast<std::size_t>(shape.layers),
                 "fewer --layers, or a smaller --layer");

  Ring ring(backend, shape);
  const int steps = quick ? 2 : 6;
  const double section_bytes = 2 * static_cast<double>(parameters) * shape.layers;
  const int alone_rounds = quick ? 1 : 3;
  const auto parts_alone = [&](double up_bytes, double down_bytes) {
    std::vector<double> up, down, updates;
    for (int round = 0; round < alone_rounds; ++round) {
      up.push_back(ring.up_alone(up_bytes));
      down.push_back(ring.down_alone(down_bytes));
      updates.push_back(ring.updates_alone());
    }
    return Parts{0, spread_of(up).median, spread_of(down).median, spread_of(updates).median};
  };
  parts_alone(section_bytes, section_bytes);  // warm-up
  const Parts first = parts_alone(2 * section_bytes, section_bytes);

  Table table(std::to_string(shape.layers) + " layers of " + std::to_string(parameters) + " parameters, " +
                  std::to_string(shape.slots) + " slots, " + std::to_string(ring.store().threads()) +
                  " update threads, on the " + backend->name() + " backend; seconds a step",
              {{"updates", "updates"},
               {"compute is", "level"},
               {"compute", "compute"},
               {"up alone", "up"},
               {"down alone", "down"},
               {"updates alone", "update"},
               {"longest", "longest"},
               {"step", "step"},
               {"longest/step", "longest_share"},
               {"floor/step", "floor_share"},
               {"waiting", "waiting"},
               {"overlap", "updates_in_compute"}});
  const Level levels[] = {{"nothing", 0}, {"the longest", 1}, {"twice that", 2}};
  std::int64_t disorder = 0;
  for (const UpdateTime when : {UpdateTime::kAfterBackward, UpdateTime::kAsGradientsLand}) {
    for (const Level& level : levels) {
      const double compute = level.of_longest * std::max({first.up, first.down, first.updates});
      RingRun plan;
      plan.updates = when;
      plan.forward_ns = static_cast<std::int64_t>(compute * kForwardShare / shape.layers * 1e9);
      plan.backward_ns = static_cast<std::int64_t>(compute * (1 - kForwardShare) / shape.layers * 1e9);
      plan.steps = steps;
      const RingResult result = ring.run(plan);
      // Right after, since memory may have changed its speed.
      Parts parts = parts_alone(result.up_bytes, result.down_bytes);
      parts.compute = compute;
      const bool after = when == UpdateTime::kAfterBackward;
      const double floor = after ? floor_after_backward(parts, shape.layers) : parts.longest();
      const Spread step = spread_of(result.step_seconds);
      disorder += result.disorder;
      table.add({after ? "after backward" : "as gradients land", level.name, number(parts.compute, 4),
                 number(parts.up, 4), number(parts.down, 4), number(parts.updates, 4),
                 number(parts.longest(), 4), spread(step, 4), share(parts.longest() / step.median),
                 share(floor / step.median), number(result.wait_seconds, 4),
                 share(result.updates_in_compute)});
    }
  }
  ring.verify();
  if (disorder > 0)
    throw OutsideError(std::to_string(disorder) + " spans began before what they depend on had ended");
  report.add("pipeline", table);
  report.set("verified", true);
  report.set("backend", backend->name());
  report.set("update_threads", ring.store().threads());
  report.note(
      "\"longest\" is the longest part alone; a step cannot be shorter. \"floor\" also counts what the order "
      "of work "
      "forbids: with updates after backward (gradient clipping needs that) they overlap the next forward "
      "only. "
      "\"overlap\" is the share of updates that ran beside a computation. All weights were verified.");
}

}  // namespace
}  // namespace megatrain::bench

int main(int argc, char** argv) {
  return megatrain::bench::run_program(
      argc, argv,
      {"pipeline",
       "how close the whole ring comes to the longest of its parts",
       {{"--backend", "NAME", "auto", "cuda, host, or auto: cuda where there is a GPU"},
        {"--layer", "MODEL", "1.5b", "layers of Qwen2.5 0.5b, 1.5b, 3b, 7b or 14b"},
        {"--layers", "N", "8", "how many; with --quick 4, if not given"},
        {"--slots", "N", "2", "buffers for weights on the device"},
        {"--threads", "N", "0", "of the update; 0: all usable cores but one"}},
       megatrain::bench::run});
}
