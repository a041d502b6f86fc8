#include "adam_tile.h"

#include <algorithm>
#include <bit>

#include "optim/adamw.h"
#include "tiles/share.h"

namespace megatrain::bench {
namespace {

constexpr UpdateStep kStep{.lr = 1e-5, .step = 100};
// Exponents of 8-bit moments, a 64th of a byte a parameter each, are left out of the mix.
constexpr Section kSections[] = {Section::kWeights, Section::kMasterLow, Section::kGradients,
                                 Section::kExpAvg, Section::kExpAvgSq};

TileLayout layout_of(TileFormat format, std::int64_t elements) {
  return TileLayout(format, {{elements, true}});
}

constexpr std::int64_t kChunk = 4096;  // whole blocks of 8-bit moments

// In [-0.5, 0.5), never denormal but for one element in millions.
float value_of(std::int64_t element) {
  const std::uint32_t mantissa = static_cast<std::uint32_t>(element) * 2654435761u >> 9;
  return std::bit_cast<float>(0x3f800000u | mantissa) - 1.5f;
}

}  // namespace

std::vector<TileFormat> adam_formats() {
  std::vector<TileFormat> formats;
  for (const WeightFormat weights : {WeightFormat::kBf16Split, WeightFormat::kBf16, WeightFormat::kFp32}) {
    for (const MomentFormat moments : {MomentFormat::kFp32, MomentFormat::kBf16, MomentFormat::kInt8}) {
      formats.push_back({weights, moments});
    }
  }
  return formats;
}

std::size_t AdamTile::bytes(TileFormat format, std::int64_t elements) {
  return layout_of(format, elements).bytes();
}

AdamTile::AdamTile(TileFormat format, std::int64_t elements, const std::vector<int>& nodes, ThreadPool& pool)
    : layout_(layout_of(format, elements)), memory_(layout_.bytes(), nodes) {
  for (const Section section : kSections) {
    const int width = static_cast<int>(element_bytes(format, section));
    if (width > 0) streams_.push_back({at<std::byte>(section, 0), width, section != Section::kGradients});
  }
  memory_.touch(pool);
  reset(pool);
}

template <class T>
T* AdamTile::at(Section section, std::int64_t element) const {
  const std::size_t offset = static_cast<std::size_t>(element) * element_bytes(format(), section);
  return reinterpret_cast<T*>(memory_.data() + layout_.section(section).offset + offset);
}

double AdamTile::bytes_per_parameter() const {
  return static_cast<double>(update_bytes(format().weights, format().moments, elements())) /
         static_cast<double>(elements());
}

void AdamTile::reset(ThreadPool& pool) {
  over_tile(pool, *this, [this](ElementRange range) {
    float values[kChunk], exp_avg[kChunk], exp_avg_sq[kChunk];
    for (std::int64_t begin = range.begin; begin < range.end; begin += kChunk) {
      const std::int64_t count = std::min(kChunk, range.end - begin);
      for (std::int64_t i = 0; i < count; ++i) {
        values[i] = value_of(begin + i);
        exp_avg[i] = 0.005f * values[i];
        exp_avg_sq[i] = 1e-4f * values[i] * values[i] + 1e-8f;
        set_gradient(begin + i, 0.01f * values[i]);
      }
      set_weights(begin, values, count);
      set_moments(Moment::kExpAvg, begin, exp_avg, count);
      set_moments(Moment::kExpAvgSq, begin, exp_avg_sq, count);
    }
  });
}

void AdamTile::set_gradient(std::int64_t element, float value) {
  if (format().weights == WeightFormat::kFp32) {
    *at<float>(Section::kGradients, element) = value;
  } else {
    *at<std::uint16_t>(Section::kGradients, element) =
        static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
  }
}

void AdamTile::set_weights(std::int64_t begin, const float* values, std::int64_t count) {
  if (format().weights == WeightFormat::kFp32) {
    std::copy_n(values, count, at<float>(Section::kWeights, begin));
    return;
  }
  std::int16_t dropped[kChunk];
  const bool split = format().weights == WeightFormat::kBf16Split;
  static_cast<void>(split_master(values, at<std::uint16_t>(Section::kWeights, begin),
                                 split ? at<std::int16_t>(Section::kMasterLow, begin) : dropped, count));
}

void AdamTile::set_moments(Moment moment, std::int64_t begin, const float* values, std::int64_t count) {
  const bool first = moment == Moment::kExpAvg;
  write_moments(
      {.moment = moment,
       .format = format().moments,
       .values = at<void>(first ? Section::kExpAvg : Section::kExpAvgSq, begin),
       .exponents = exponents(first ? Section::kExpAvgExponents : Section::kExpAvgSqExponents, begin),
       .count = count},
      values);
}

std::uint8_t* AdamTile::exponents(Section section, std::int64_t element) const {
  return at<std::uint8_t>(section, 0) + element / kMomentBlock;
}

void AdamTile::update(Isa isa, ElementRange range) {
  const std::int64_t begin = range.begin;
  static_cast<void>(apply_update(isa, kStep,
                                 {.weight_format = format().weights,
                                  .moment_format = format().moments,
                                  .weight = at<void>(Section::kWeights, begin),
                                  .low = at<std::int16_t>(Section::kMasterLow, begin),
                                  .gradient = at<void>(Section::kGradients, begin),
                                  .exp_avg = at<void>(Section::kExpAvg, begin),
                                  .exp_avg_sq = at<void>(Section::kExpAvgSq, begin),
                                  .exp_avg_exponents = exponents(Section::kExpAvgExponents, begin),
                                  .exp_avg_sq_exponents = exponents(Section::kExpAvgSqExponents, begin),
                                  .count = range.size(),
                                  .first = begin}));
}

void AdamTile::mix(ElementRange range) const {
  volatile std::uint32_t used =
      pass_mix(streams_.data(), static_cast<int>(streams_.size()), range.begin, range.end, 0);
  static_cast<void>(used);
}

std::uint64_t AdamTile::digest(ElementRange range) const {
  std::uint64_t digest = 0xcbf29ce484222325u;  // FNV-1a
  const auto add = [&](const std::byte* begin, const std::byte* end) {
    for (const std::byte* byte = begin; byte != end; ++byte) {
      digest = (digest ^ static_cast<std::uint8_t>(*byte)) * 0x100000001b3u;
    }
  };
  for (const MixStream& stream : streams_) {
    add(stream.data + range.begin * stream.element_bytes, stream.data + range.end * stream.element_bytes);
  }
  if (format().moments != MomentFormat::kInt8) return digest;
  for (const Section section : {Section::kExpAvgExponents, Section::kExpAvgSqExponents}) {
    const std::byte* const first = at<std::byte>(section, 0);
    add(first + range.begin / kMomentBlock, first + (range.end + kMomentBlock - 1) / kMomentBlock);
  }
  return digest;
}

void over_tile(ThreadPool& pool, const AdamTile& tile, const std::function<void(ElementRange)>& body) {
  pool.run([&](unsigned worker, unsigned workers) {
    const ElementRange mine = share_of(tile.elements(), page_elements(tile.format()),
                                       static_cast<int>(worker), static_cast<int>(workers));
    if (!mine.empty()) body(mine);
  });
}

}  // namespace megatrain::bench
