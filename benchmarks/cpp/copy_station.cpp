#include "copy_station.h"

#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace megatrain::bench {
namespace {

void write_pattern(ThreadPool& pool, std::byte* data, std::size_t bytes) {
  auto* const words = reinterpret_cast<std::uint64_t*>(data);
  pool.run([=](unsigned worker, unsigned workers) {
    const std::size_t count = bytes / 8, end = count * (worker + 1) / workers;
    for (std::size_t i = count * worker / workers; i < end; ++i) words[i] = (i + 1) * 0x9e3779b97f4a7c15u;
  });
}

std::size_t end_of(const Lane& lane) { return lane.pieces.back().offset + lane.pieces.back().bytes; }

}  // namespace

Station::Station(std::shared_ptr<Backend> gpu, ThreadPool& pool, std::size_t bytes)
    : runner(gpu),
      source(*gpu, pool, bytes, true),
      target(*gpu, pool, bytes, true),
      device_target(gpu->device_index(), bytes),
      device_source(gpu->device_index(), bytes) {
  if (!source.pinned() || !target.pinned()) {
    throw OutsideError("the machine refused to pin " + std::to_string(2 * bytes) + " bytes (ulimit -l)");
  }
  write_pattern(pool, source.data(), bytes);
  Lane fill = up({{0, bytes}});
  fill.device = device_source.data();
  runner.run_as_issued({fill});
}

// `count` pieces of `bytes`, one behind the other.
std::vector<Piece> equal_pieces(std::size_t bytes, std::size_t count) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < count; ++i) pieces.push_back({i * bytes, bytes});
  return pieces;
}

void Verifier::check(const Case& tried) {
  CopyRunner& runner = station_.runner;
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

void Verifier::compare(const Case& tried, const std::byte* arrived, const std::vector<Piece>& pieces,
                       const char* direction) const {
  for (const Piece& piece : pieces) {
    if (std::memcmp(arrived + piece.offset, station_.source.data() + piece.offset, piece.bytes) == 0)
      continue;
    throw OutsideError("copies " + std::string(direction) + " arrived wrong: " + tried.label + ", " +
                       std::to_string(piece.bytes) + " bytes at " + std::to_string(piece.offset));
  }
}

}  // namespace megatrain::bench
