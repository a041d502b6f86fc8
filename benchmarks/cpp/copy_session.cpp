#include "copy_session.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace megatrain::bench {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

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

void add_row(Table& table, const std::string& label, const Samples& own, const Samples& ceiling) {
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

}  // namespace

CopySizes::CopySizes(bool quick)
    : largest(quick ? 8 * kMiB : 1024 * kMiB), medium(quick ? 4 * kMiB : 256 * kMiB), rounds(quick ? 3 : 9) {}

CopySession::CopySession(Station& station, const CopySizes& sizes)
    : station_(station),
      sizes_(sizes),
      verifier_(station),
      bare_source_(station.runner.gpu().device_index(), sizes.largest),
      bare_target_(station.runner.gpu().device_index(), sizes.largest) {
  std::memcpy(bare_source_.data(), station.source.data(), sizes.largest);
  const std::vector<Piece> whole{{0, sizes.largest}};
  bare_ = {"bare cudaMemcpyAsync", station.up(whole), station.down(whole)};
  bare_.up.host = bare_source_.data();
  bare_.down.host = bare_target_.data();
  bare_.up.bare = bare_.down.bare = true;
  verifier_.check(bare_);
}

Table CopySession::measure(const std::string& title, const char* first_column,
                           const std::vector<Case>& cases) {
  for (const Case& tried : cases) verifier_.check(tried);
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

}  // namespace megatrain::bench
