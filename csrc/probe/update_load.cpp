#include "probe/update_load.h"

#include "optim/adamw.h"
#include "tiles/share.h"

namespace megatrain {
namespace {

constexpr TileFormat kFormat = TileFormat::kBf16Split;
constexpr UpdateStep kStep{.lr = 1e-5, .step = 100};

TileLayout layout_of(std::int64_t parameters) { return TileLayout(kFormat, {{parameters, true}}); }

ElementRange share_of_worker(std::int64_t elements, unsigned worker, unsigned workers) {
  return share_of(elements, page_elements(kFormat), static_cast<int>(worker), static_cast<int>(workers));
}

}  // namespace

UpdateLoad::UpdateLoad(Backend& backend, ThreadPool& pool, std::int64_t parameters)
    : layout_(layout_of(parameters)), memory_(backend, pool, layout_.bytes(), false), isa_(select_isa("")) {
  pool.run([this](unsigned worker, unsigned workers) {
    fill(share_of_worker(layout_.trainable_elements(), worker, workers));
  });
}

std::size_t UpdateLoad::bytes(std::int64_t parameters) { return layout_of(parameters).bytes(); }

template <class T>
T* UpdateLoad::at(Section section, std::int64_t element) const {
  const std::size_t offset = static_cast<std::size_t>(element) * element_bytes(kFormat, section);
  return reinterpret_cast<T*>(memory_.data() + layout_.section(section).offset + offset);
}

// Arithmetic on zeros may be faster.
void UpdateLoad::fill(ElementRange range) {
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    const auto mantissa = static_cast<std::uint16_t>(static_cast<std::uint32_t>(i) * 2654435761u >> 25);
    *at<std::uint16_t>(Section::kWeights, i) = static_cast<std::uint16_t>(0x3c00 | mantissa);    // 1/128
    *at<std::uint16_t>(Section::kGradients, i) = static_cast<std::uint16_t>(0x3a00 | mantissa);  // 1/2048
  }
}

void UpdateLoad::update(ThreadPool& pool) {
  pool.run([this](unsigned worker, unsigned workers) {
    update(share_of_worker(layout_.trainable_elements(), worker, workers));
  });
}

void UpdateLoad::update(ElementRange range) {
  // Its values stay finite: they move by less than lr a step.
  static_cast<void>(
      apply_update(isa_, kStep,
                   AdamWSplitSpan{.high = at<std::uint16_t>(Section::kWeights, range.begin),
                                  .low = at<std::int16_t>(Section::kMasterLow, range.begin),
                                  .gradient = at<std::uint16_t>(Section::kGradients, range.begin),
                                  .exp_avg = at<float>(Section::kExpAvg, range.begin),
                                  .exp_avg_sq = at<float>(Section::kExpAvgSq, range.begin),
                                  .count = range.size()}));
}

}  // namespace megatrain
