// Layout is arithmetic: everything is checked against the rules, nothing is allocated.
#include <gtest/gtest.h>

#include "base/error.h"
#include "tile_span.h"
#include "tiles/tile_layout.h"

namespace megatrain {
namespace {

constexpr Section kSections[] = {Section::kWeights,          Section::kMasterLow, Section::kGradients,
                                 Section::kExpAvg,           Section::kExpAvgSq,  Section::kExpAvgExponents,
                                 Section::kExpAvgSqExponents};

TEST(TileLayout, PutsTrainableParametersFirstInTheOrderGiven) {
  const TileLayout layout(TileFormat::kBf16Split, {{100, true}, {7, false}, {129, true}, {128, false}});
  EXPECT_EQ(layout.element_offset(0), 0);
  EXPECT_EQ(layout.element_offset(2), 128);
  EXPECT_EQ(layout.trainable_elements(), 128 + 256);
  EXPECT_EQ(layout.element_offset(1), 384);
  EXPECT_EQ(layout.element_offset(3), 512);
  EXPECT_EQ(layout.weight_elements(), 640);
}

TEST(TileLayout, PlacesSectionsOfASplitTile) {
  const TileLayout layout(TileFormat::kBf16Split, {{3000, true}, {100, false}});
  EXPECT_EQ(layout.trainable_elements(), 3072);
  EXPECT_EQ(layout.weight_elements(), 3200);
  EXPECT_EQ(layout.section(Section::kWeights).offset, 0u);
  EXPECT_EQ(layout.section(Section::kWeights).bytes, 6400u);
  EXPECT_EQ(layout.section(Section::kMasterLow).offset, 8192u);
  EXPECT_EQ(layout.section(Section::kMasterLow).bytes, 6144u);
  EXPECT_EQ(layout.section(Section::kGradients).offset, 16384u);
  EXPECT_EQ(layout.section(Section::kGradients).bytes, 6144u);
  EXPECT_EQ(layout.section(Section::kExpAvg).offset, 24576u);
  EXPECT_EQ(layout.section(Section::kExpAvg).bytes, 12288u);
  EXPECT_EQ(layout.section(Section::kExpAvgSq).offset, 36864u);
  EXPECT_EQ(layout.bytes(), 49152u);
  EXPECT_EQ(layout.section(Section::kAccumulator).offset, 0u);
  EXPECT_EQ(layout.section(Section::kAccumulator).bytes, 12288u);
}

TEST(TileLayout, HasNoLowHalfInFp32) {
  const TileLayout layout(TileFormat::kFp32, {{65, true}});
  EXPECT_EQ(layout.trainable_elements(), 128);
  EXPECT_EQ(layout.section(Section::kMasterLow).bytes, 0u);
  EXPECT_EQ(layout.section(Section::kWeights).bytes, 512u);
  EXPECT_EQ(layout.section(Section::kGradients).offset, 4096u);
  EXPECT_EQ(layout.section(Section::kExpAvg).offset, 8192u);
  EXPECT_EQ(layout.section(Section::kExpAvgSq).offset, 12288u);
  EXPECT_EQ(layout.bytes(), 16384u);
}

// What the design promises a parameter costs, gradients included, on a tile without gaps.
TEST(TileLayout, TakesTheBytesOfItsPrecision) {
  constexpr std::int64_t kElements = std::int64_t{1} << 22;
  const auto bytes = [](WeightFormat weights, MomentFormat moments) {
    return TileLayout({weights, moments}, {{kElements, true}}).bytes();
  };
  const std::size_t exponents = 2 * kElements / kMomentBlock;
  const std::size_t n = kElements;
  EXPECT_EQ(bytes(WeightFormat::kBf16Split, MomentFormat::kFp32), 14 * n);
  EXPECT_EQ(bytes(WeightFormat::kBf16, MomentFormat::kFp32), 12 * n);
  EXPECT_EQ(bytes(WeightFormat::kBf16Split, MomentFormat::kBf16), 10 * n);
  EXPECT_EQ(bytes(WeightFormat::kBf16, MomentFormat::kBf16), 8 * n);
  EXPECT_EQ(bytes(WeightFormat::kBf16Split, MomentFormat::kInt8), 8 * n + exponents);
  EXPECT_EQ(bytes(WeightFormat::kBf16, MomentFormat::kInt8), 6 * n + exponents);
  EXPECT_EQ(bytes(WeightFormat::kFp32, MomentFormat::kFp32), 16 * n);
  EXPECT_EQ(bytes(WeightFormat::kFp32, MomentFormat::kBf16), 12 * n);
  EXPECT_EQ(bytes(WeightFormat::kFp32, MomentFormat::kInt8), 10 * n + exponents);
}

TEST(TileLayout, KeepsBlocksOfEightBitMomentsWhole) {
  for (const WeightFormat weights : {WeightFormat::kBf16Split, WeightFormat::kBf16, WeightFormat::kFp32}) {
    const TileFormat format{weights, MomentFormat::kInt8};
    for (const int rank : {0, 1, 2}) {
      const TileLayout layout(format, {{1, true}, {129, true}, {70, true}, {20000, true}}, {rank, 3});
      for (int p = 0; p < layout.parameters(); ++p) EXPECT_EQ(layout.element_offset(p) % kMomentBlock, 0);
      EXPECT_EQ(layout.owned().begin % kMomentBlock, 0);
      EXPECT_EQ(layout.section_elements(Section::kExpAvgExponents) * kMomentBlock,
                layout.trainable_elements());
    }
  }
}

TEST(TileLayout, AlignsEverySectionAndParameter) {
  for (const TileFormat format : testing::all_tile_formats()) {
    const TileLayout layout(format,
                            {{1, true}, {0, true}, {127, true}, {128, true}, {129, false}, {1, true}});
    std::size_t end = 0;
    for (const Section section : kSections) {
      const TileLayout::Place place = layout.section(section);
      EXPECT_EQ(place.offset % 4096, 0u);
      EXPECT_GE(place.offset, end);
      end = place.offset + place.bytes;
    }
    EXPECT_GE(layout.bytes(), end);
    EXPECT_LT(layout.bytes(), end + 4096);
    for (int p = 0; p < layout.parameters(); ++p) {
      const auto bytes =
          static_cast<std::size_t>(layout.element_offset(p)) * element_bytes(format, Section::kWeights);
      EXPECT_EQ(bytes % 256, 0u);
    }
  }
}

TEST(TileLayout, AllowsEmptyParametersAndTiles) {
  const TileLayout nothing(TileFormat::kBf16Split, {});
  EXPECT_EQ(nothing.bytes(), 0u);
  EXPECT_TRUE(nothing.owned().empty());
  const TileLayout empties(TileFormat::kFp32, {{0, true}, {0, false}, {5, true}});
  EXPECT_EQ(empties.element_offset(0), 0);
  EXPECT_EQ(empties.element_offset(2), 0);
  EXPECT_EQ(empties.trainable_elements(), 64);
}

TEST(TileLayout, GivesAFrozenTileWeightsOnly) {
  const TileLayout layout(TileFormat::kBf16Split, {{1000, false}, {24, false}});
  EXPECT_EQ(layout.trainable_elements(), 0);
  EXPECT_EQ(layout.section(Section::kWeights).bytes, 2u * (1024 + 128));
  for (const Section section :
       {Section::kMasterLow, Section::kGradients, Section::kExpAvg, Section::kExpAvgSq}) {
    EXPECT_EQ(layout.section(section).bytes, 0u);
  }
  EXPECT_EQ(layout.bytes(), 4096u);
  EXPECT_TRUE(layout.owned().empty());
}

TEST(TileLayout, CountsInSixtyFourBits) {
  const std::int64_t huge = (std::int64_t{1} << 33) + 1;
  const TileLayout layout(TileFormat::kBf16Split, {{huge, true}, {10, true}, {huge, false}});
  const std::int64_t first = (std::int64_t{1} << 33) + 128;
  EXPECT_EQ(layout.element_offset(1), first);
  EXPECT_EQ(layout.element_offset(2), first + 128);
  EXPECT_EQ(layout.weight_elements(), 2 * first + 128);
  EXPECT_EQ(layout.section(Section::kExpAvg).bytes, static_cast<std::size_t>(4 * (first + 128)));
  EXPECT_GT(layout.bytes(), std::size_t{14} << 33);
}

TEST(TileLayout, ShardsCoverTheTrainablePartExactlyOnce) {
  for (const TileFormat format : testing::all_tile_formats()) {
    for (const std::int64_t elements : {std::int64_t{0}, std::int64_t{1}, std::int64_t{2048},
                                        std::int64_t{100000}, (std::int64_t{1} << 33) + 5}) {
      for (const int ranks : {1, 2, 3, 7, 64}) {
        std::int64_t next = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const TileLayout layout(format, {{elements, true}, {10, false}}, {rank, ranks});
          const ElementRange owned = layout.owned();
          EXPECT_EQ(owned.begin, next);
          EXPECT_GE(owned.size(), 0);
          if (owned.end != layout.trainable_elements()) {
            EXPECT_EQ(static_cast<std::size_t>(owned.end) * element_bytes(format, Section::kWeights) % 4096,
                      0u);
          }
          next = owned.end;
        }
        EXPECT_EQ(next, TileLayout(format, {{elements, true}}).trainable_elements());
      }
    }
  }
}

TEST(TileLayout, RefusesWhatCannotBe) {
  EXPECT_THROW(TileLayout(TileFormat::kFp32, {{-1, true}}), CallerError);
  EXPECT_THROW(TileLayout(TileFormat::kFp32, {{std::int64_t{1} << 62, true}}), CallerError);
  EXPECT_THROW(TileLayout(TileFormat::kFp32, {{std::int64_t{1} << 55, true}, {std::int64_t{1} << 56, false}}),
               CallerError);
  EXPECT_THROW(TileLayout(TileFormat::kFp32, {}, {2, 2}), CallerError);
  EXPECT_THROW(TileLayout(TileFormat::kFp32, {}, {-1, 2}), CallerError);
  EXPECT_THROW(TileLayout(TileFormat::kFp32, {}, {0, 0}), CallerError);
  const TileLayout layout(TileFormat::kFp32, {{1, true}});
  EXPECT_THROW(layout.element_offset(1), CallerError);
  EXPECT_THROW(layout.element_offset(-1), CallerError);
}

TEST(TileLayout, OneMomentWhereTheRuleKeepsOne) {
  for (const MomentFormat moments : {MomentFormat::kFp32, MomentFormat::kBf16, MomentFormat::kInt8}) {
    const std::vector<ParameterShape> parameters = {{5000, true}, {77, false}, {300, true}};
    const TileLayout two({WeightFormat::kBf16Split, moments}, parameters);
    const TileLayout one({WeightFormat::kBf16Split, moments, Rule::kLion}, parameters);
    EXPECT_EQ(one.section(Section::kExpAvg).bytes, two.section(Section::kExpAvg).bytes);
    EXPECT_EQ(one.section(Section::kExpAvg).offset, two.section(Section::kExpAvg).offset);
    EXPECT_EQ(one.section(Section::kExpAvgSq).bytes, 0u);
    EXPECT_EQ(one.section(Section::kExpAvgSqExponents).bytes, 0u);
    EXPECT_EQ(one.section(Section::kExpAvgExponents).bytes, two.section(Section::kExpAvgExponents).bytes);
    EXPECT_LT(one.bytes() + two.section(Section::kExpAvgSq).bytes, two.bytes() + 4096);
  }
}

}  // namespace
}  // namespace megatrain
