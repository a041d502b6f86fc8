#include "probe/contest.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace megatrain {
namespace {

constexpr double kUpBytes = 4, kDownBytes = 2;  // a parameter and step
constexpr std::chrono::milliseconds kUnderWay{5};

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Of the host, a direction: whole copies.
std::size_t side_bytes(std::size_t copy_bytes, std::size_t cache_bytes) {
  return std::max<std::size_t>(1, (cache_bytes + copy_bytes - 1) / copy_bytes) * copy_bytes;
}

// Sleeping threads, and cores that slept with them, take a while.
void wake(ThreadPool& pool) {
  pool.run([](unsigned, unsigned) {});
}

}  // namespace

double Rates::ring() const noexcept { return std::min({up / kUpBytes, down / kDownBytes, updates}); }

Contest::Contest(Backend& backend, ThreadPool& everyone, std::byte* device, std::size_t device_bytes,
                 std::int64_t parameters, std::size_t cache_bytes)
    : copy_bytes_(device_bytes / 2),
      load_(backend, everyone, parameters, UpdateLoad::windows_beyond(cache_bytes, parameters)),
      source_(backend, everyone, side_bytes(copy_bytes_, cache_bytes), true),
      target_(backend, everyone, source_.bytes(), true),
      up_(backend, CopyKind::kHostToDevice, source_.data(), source_.bytes(), device, copy_bytes_),
      down_(backend, CopyKind::kDeviceToHost, target_.data(), target_.bytes(), device + copy_bytes_,
            copy_bytes_) {}

std::size_t Contest::host_bytes(std::size_t device_bytes, std::int64_t parameters, std::size_t cache_bytes) {
  return 2 * side_bytes(device_bytes / 2, cache_bytes) +
         UpdateLoad::windows_beyond(cache_bytes, parameters) * UpdateLoad::bytes(parameters);
}

Rates Contest::copies(bool up, bool down, double seconds) {
  return with_copies(up, down, [&] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    return 0.0;
  });
}

Rates Contest::updates(ThreadPool& pool, double seconds) {
  wake(pool);
  return {.updates = updates_during(pool, seconds)};
}

Rates Contest::both(ThreadPool& pool, double seconds) {
  wake(pool);
  return with_copies(true, true, [&] { return updates_during(pool, seconds); });
}

// Whole passes until the time is over.
double Contest::updates_during(ThreadPool& pool, double seconds) {
  const auto begin = std::chrono::steady_clock::now();
  double passes = 0;
  do {
    load_.update(pool);
    ++passes;
  } while (seconds_since(begin) < seconds);
  return passes * static_cast<double>(load_.parameters()) / seconds_since(begin);
}

Rates Contest::with_copies(bool up, bool down, const std::function<double()>& body) {
  if (up) up_.start();
  if (down) down_.start();
  std::this_thread::sleep_for(kUnderWay);
  const double up_before = up_.copied(), down_before = down_.copied();
  const auto begin = std::chrono::steady_clock::now();
  const double updates = body();
  const double seconds = seconds_since(begin);
  const Rates rates{(up_.copied() - up_before) / seconds, (down_.copied() - down_before) / seconds, updates};
  up_.stop();
  down_.stop();
  return rates;
}

}  // namespace megatrain
