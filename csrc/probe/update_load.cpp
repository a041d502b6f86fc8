#include "probe/update_load.h"

#include <algorithm>
#include <bit>

#include "optim/adamw.h"
#include "tiles/share.h"

namespace megatrain {
namespace {

constexpr TileFormat kFormat = TileFormat::kBf16Split;
constexpr std::size_t kCaches = 6;
constexpr UpdateStep kStep{.lr = 1e-5, .step = 100};

TileLayout layout_of(std::int64_t parameters) { return TileLayout(kFormat, {{parameters, true}}); }

ElementRange share_of_worker(std::int64_t elements, unsigned worker, unsigned workers) {
  return share_of(elements, page_elements(kFormat), static_cast<int>(worker), static_cast<int>(workers));
}

}  // namespace

UpdateLoad::UpdateLoad(Backend& backend, ThreadPool& pool, std::int64_t parameters, std::size_t windows)
    : layout_(layout_of(parameters)),
      windows_(windows),
      memory_(backend, pool, windows * layout_.bytes(), false),
      isa_(select_isa("")) {
  pool.run([this](unsigned worker, unsigned workers) {
    for (std::size_t window = 0; window < windows_; ++window) {
      fill(window, share_of_worker(layout_.trainable_elements(), worker, workers));
    }
  });
}

std::size_t UpdateLoad::windows_beyond(std::size_t cache_bytes, std::int64_t parameters) {
  const std::size_t total = kCaches * cache_bytes, each = bytes(parameters);
  return std::max<std::size_t>(1, (total + each - 1) / each);
}

std::size_t UpdateLoad::bytes(std::int64_t parameters) { return layout_of(parameters).bytes(); }

template <class T>
T* UpdateLoad::at(std::size_t window, Section section, std::int64_t element) const {
  const std::size_t offset = static_cast<std::size_t>(element) * element_bytes(kFormat, section);
  return reinterpret_cast<T*>(this->window(window) + layout_.section(section).offset + offset);
}

// Arithmetic on zeros may be faster.
void UpdateLoad::fill(std::size_t window, ElementRange range) {
  auto* const weights = at<std::uint16_t>(window, Section::kWeights, 0);
  auto* const gradients = at<std::uint16_t>(window, Section::kGradients, 0);
  auto* const exp_avg = at<float>(window, Section::kExpAvg, 0);
  auto* const exp_avg_sq = at<float>(window, Section::kExpAvgSq, 0);
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    const auto mantissa = static_cast<std::uint16_t>(static_cast<std::uint32_t>(i) * 2654435761u >> 25);
    weights[i] = static_cast<std::uint16_t>(0x3c00 | mantissa);    // 1/128
    gradients[i] = static_cast<std::uint16_t>(0x3a00 | mantissa);  // 1/2048
    exp_avg[i] = std::bit_cast<float>(std::uint32_t{gradients[i]} << 16);
    exp_avg_sq[i] = exp_avg[i] * exp_avg[i];
  }
}

void UpdateLoad::update(ThreadPool& pool) {
  pool.run([this](unsigned worker, unsigned workers) {
    update(next_, share_of_worker(layout_.trainable_elements(), worker, workers));
  });
  next_ = (next_ + 1) % windows_;
}

void UpdateLoad::update(std::size_t window, ElementRange range) {
  // Its values stay finite: they move by less than lr a step.
  static_cast<void>(
      apply_update(isa_, kStep,
                   AdamWSplitSpan{.high = at<std::uint16_t>(window, Section::kWeights, range.begin),
                                  .low = at<std::int16_t>(window, Section::kMasterLow, range.begin),
                                  .gradient = at<std::uint16_t>(window, Section::kGradients, range.begin),
                                  .exp_avg = at<float>(window, Section::kExpAvg, range.begin),
                                  .exp_avg_sq = at<float>(window, Section::kExpAvgSq, range.begin),
                                  .count = range.size()}));
}

}  // namespace megatrain
