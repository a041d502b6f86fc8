#include "copy_gpus.h"

#include <algorithm>
#include <string>
#include <utility>

namespace megatrain::bench {

Table copies_by_gpu(const std::vector<std::shared_ptr<Backend>>& gpus, ThreadPool& pool,
                    const CopySizes& sizes) {
  std::vector<std::unique_ptr<Station>> stations;
  for (const auto& gpu : gpus) {
    stations.push_back(std::make_unique<Station>(gpu, pool, sizes.largest));
    Station& station = *stations.back();
    const std::vector<Piece> whole{{0, sizes.largest}};
    Verifier(station).check(
        {"GPU " + std::to_string(gpu->device_index()), station.up(whole), station.down(whole)});
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

}  // namespace megatrain::bench
