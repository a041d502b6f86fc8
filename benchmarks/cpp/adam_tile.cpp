#include "adam_tile.h"

#include <bit>

#include "optim/adamw.h"
#include "tiles/share.h"

namespace megatrain::bench {
namespace {

constexpr AdamWStep kStep{.lr = 1e-5, .step = 100};
constexpr Section kSections[] = {Section::kWeights, Section::kMasterLow, Section::kGradients,
                                 Section::kExpAvg, Section::kExpAvgSq};

TileLayout layout_of(TileFormat format, std::int64_t elements) {
  return TileLayout(format, {{elements, true}});
}

// In [-0.5, 0.5), never denormal but for one element in millions.
float value_of(std::int64_t element) {
  const std::uint32_t mantissa = static_cast<std::uint32_t>(element) * 2654435761u >> 9;
  return std::bit_cast<float>(0x3f800000u | mantissa) - 1.5f;
}

}  // namespace

std::vector<TileFormat> adam_formats() { return {TileFormat::kBf16Split, TileFormat::kFp32}; }

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
  double bytes = 0;
  for (const MixStream& stream : streams_) bytes += stream.element_bytes * (stream.written ? 2 : 1);
  return bytes;
}

void AdamTile::reset(ThreadPool& pool) {
  over_tile(pool, *this, [this](ElementRange range) {
    for (std::int64_t i = range.begin; i < range.end; ++i) {
      const float value = value_of(i), gradient = 0.01f * value;
      *at<float>(Section::kExpAvg, i) = 0.005f * value;
      *at<float>(Section::kExpAvgSq, i) = 1e-4f * value * value + 1e-8f;
      if (format() == TileFormat::kFp32) {
        *at<float>(Section::kWeights, i) = value;
        *at<float>(Section::kGradients, i) = gradient;
      } else {
        static_cast<void>(split_master(&value, at<std::uint16_t>(Section::kWeights, i),
                                       at<std::int16_t>(Section::kMasterLow, i), 1));
        *at<std::uint16_t>(Section::kGradients, i) =
            static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(gradient) >> 16);
      }
    }
  });
}

void AdamTile::update(Isa isa, ElementRange range) {
  const std::int64_t i = range.begin;
  float* const exp_avg = at<float>(Section::kExpAvg, i);
  float* const exp_avg_sq = at<float>(Section::kExpAvgSq, i);
  if (format() == TileFormat::kFp32) {
    static_cast<void>(adamw(isa, kStep,
                            AdamWFloatSpan{at<float>(Section::kWeights, i), at<float>(Section::kGradients, i),
                                           exp_avg, exp_avg_sq, range.size()}));
  } else {
    static_cast<void>(adamw(
        isa, kStep,
        AdamWSplitSpan{at<std::uint16_t>(Section::kWeights, i), at<std::int16_t>(Section::kMasterLow, i),
                       at<std::uint16_t>(Section::kGradients, i), exp_avg, exp_avg_sq, range.size()}));
  }
}

void AdamTile::mix(ElementRange range) const {
  volatile std::uint32_t used =
      pass_mix(streams_.data(), static_cast<int>(streams_.size()), range.begin, range.end, 0);
  static_cast<void>(used);
}

std::uint64_t AdamTile::digest(ElementRange range) const {
  std::uint64_t digest = 0xcbf29ce484222325u;  // FNV-1a
  for (const MixStream& stream : streams_) {
    const std::byte* const begin = stream.data + range.begin * stream.element_bytes;
    const std::byte* const end = stream.data + range.end * stream.element_bytes;
    for (const std::byte* byte = begin; byte != end; ++byte) {
      digest = (digest ^ static_cast<std::uint8_t>(*byte)) * 0x100000001b3u;
    }
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
