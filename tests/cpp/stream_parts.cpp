// The pieces that the queues share: staging ring, trace, update of one tile, names of waits.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <vector>

#include "base/error.h"
#include "optim_data.h"
#include "stream/staging.h"
#include "stream/tile_update.h"
#include "stream/trace.h"
#include "stream/waits.h"
#include "stream_controlled.h"
#include "tile_span.h"

namespace megatrain {
namespace {

using testing::message_of;

// Lengths around the chunk (1,024 bytes) and the ring (two of them).
TEST(StagingRing, MovesAnyLengthBothWays) {
  TileStore store(make_host_backend({.max_delay_us = 50, .seed = 3, .pin_limit_bytes = 0}), {.threads = 1});
  EventPool events(store.backend());
  StagingRing up(store, events, 2048), down(store, events, 2048);
  const Stream stream = store.backend().create_stream("copies");
  for (const std::size_t bytes : {0u, 1u, 1023u, 1024u, 1025u, 2047u, 2048u, 2049u, 10000u}) {
    std::vector<std::byte> source(bytes), device(bytes + 1), back(bytes + 1);
    for (std::size_t i = 0; i < bytes; ++i) source[i] = static_cast<std::byte>(i * 7 + i / 256);
    const std::vector<std::byte> expected = source;
    up.copy_up(device.data(), source.data(), bytes, stream);
    std::fill(source.begin(), source.end(), std::byte{0xee});  // it has been read
    down.copy_down(back.data(), device.data(), bytes, stream);
    EXPECT_EQ(std::vector<std::byte>(back.begin(), back.begin() + static_cast<std::ptrdiff_t>(bytes)),
              expected);
    EXPECT_EQ(back[bytes], std::byte{0});
  }
}

TEST(Trace, KeepsTheLastSpansSortedByBegin) {
  const std::unique_ptr<Backend> backend = make_host_backend({});
  Trace trace(*backend, 3);
  for (int i = 0; i < 5; ++i) {
    TraceSpan span;
    span.tile = i;
    span.begin_ns = 100 - i;
    span.end_ns = 200;
    trace.add(span);
  }
  const std::vector<TraceSpan> spans = trace.spans();
  ASSERT_EQ(spans.size(), 3u);
  EXPECT_EQ(spans[0].tile, 4);
  EXPECT_EQ(spans[1].tile, 3);
  EXPECT_EQ(spans[2].tile, 2);
  trace.clear();
  EXPECT_TRUE(trace.spans().empty());
}

TEST(Trace, KeepsNothingWithoutCapacity) {
  const std::unique_ptr<Backend> backend = make_host_backend({});
  Trace trace(*backend, 0);
  trace.add({});
  EXPECT_TRUE(trace.spans().empty());
}

TEST(Trace, ReadsDeviceTimesOnceTheyAreThere) {
  const std::unique_ptr<Backend> backend = make_host_backend({.max_delay_us = 2000, .seed = 1});
  EventPool events(*backend);
  Trace trace(*backend, 100);
  const Stream stream = backend->create_stream("work");
  const std::int64_t before = steady_now_ns();
  std::vector<float> from(4, 1.0f), to(4);
  for (int i = 0; i < 10; ++i) {
    const SharedEvent begin = events.record(stream);
    backend->copy(to.data(), from.data(), 16, CopyKind::kHostToDevice, stream);
    trace.add({}, begin, events.record(stream));
  }
  std::int64_t last_end = before;
  const std::vector<TraceSpan> spans = trace.spans();
  ASSERT_EQ(spans.size(), 10u);
  for (const TraceSpan& span : spans) {
    EXPECT_GE(span.begin_ns, last_end);
    EXPECT_GE(span.end_ns, span.begin_ns);
    last_end = span.end_ns;
  }
  EXPECT_LE(last_end, steady_now_ns());
}

TEST(Trace, SumsWaitsAndTheUpdatesBehindThem) {
  const std::unique_ptr<Backend> backend = make_host_backend({});
  EventPool events(*backend);
  Trace trace(*backend, 2);  // fewer than there are waits
  const std::int64_t before = steady_now_ns();
  for (int i = 0; i < 4; ++i) {
    TraceSpan wait;
    wait.kind = SpanKind::kWait;
    wait.gate_ns = i < 2 ? std::numeric_limits<std::int64_t>::max() : 0;
    const SharedEvent begin = events.record({});
    trace.add(wait, begin, events.record({}));
  }
  const WaitTotals totals = trace.wait_totals();
  EXPECT_GT(totals.up_ns, 0);
  EXPECT_LT(totals.up_ns, steady_now_ns() - before);
  EXPECT_GT(totals.update_ns, 0);
  EXPECT_LT(totals.update_ns, totals.up_ns);
}

TEST(Waits, AreKnownByName) {
  EXPECT_EQ(wait_from_name(""), Wait::kNone);
  EXPECT_EQ(wait_from_name("gate_fetch"), Wait::kGateFetch);
  EXPECT_EQ(
      message_of<CallerError>([] { wait_from_name("slot"); }),
      "unknown wait \"slot\"; there are slot_free, slot_arrived, part_arrived, gate_update, gate_fetch, "
      "gradient_ready, gradient_landed, staging_free, kept_ready, kept_landed, kept_arrived, "
      "resident_updated");
}

// One tile, updated by any number of threads, equals the specification parameter by parameter.
class TileUpdate : public ::testing::TestWithParam<TileFormat> {
 protected:
  static constexpr std::int64_t kCounts[] = {1, 5000, 0, 129, 2048, 300};
  static constexpr int kFrozen = 3;

  std::shared_ptr<TileStore> store(unsigned threads, Shard shard = {}, const char* isa = "scalar") {
    auto store =
        std::make_shared<TileStore>(make_host_backend({}), TileStoreOptions{.threads = threads, .isa = isa});
    std::vector<ParameterShape> shapes;
    for (const std::int64_t count : kCounts) shapes.push_back({count, shapes.size() != kFrozen});
    store->add(TileLayout(GetParam(), shapes, shard));
    fill(*store);
    return store;
  }

  // All of the tile, gaps included, so that what an update must not touch is seen.
  static void fill(TileStore& store) {
    testing::Values values(17);
    for (const Section section : kSections) {
      const TileStore::SectionView view = store.section(0, section);
      const std::size_t width = element_bytes(GetParam(), section);
      for (std::size_t at = 0; at < view.bytes; at += width) {
        const bool positive = section == Section::kExpAvgSq || width == 1;
        const float value = positive ? std::abs(values.normal(1.0f)) : values.normal(1.0f);
        const std::uint16_t narrow = testing::to_bf16(value);
        const auto code = static_cast<std::uint8_t>(100 + 20 * value);  // or an exponent
        const void* const of_width[] = {nullptr, &code, &narrow, nullptr, &value};
        std::memcpy(view.data + at, of_width[width], width);
      }
    }
  }

  static std::vector<std::byte> bytes(const TileStore& store, Section section) {
    const TileStore::SectionView view = store.section(0, section);
    return {view.data, view.data + view.bytes};
  }

  static std::vector<ParameterUpdate> updates() {
    std::vector<ParameterUpdate> result;
    for (const int parameter : {4, 0, 1, 2}) {  // 5 is trainable and left out
      UpdateStep step{.lr = 0.01 * (parameter + 1), .step = parameter + 1};
      step.gradient_scale = 0.25f;
      step.seed = 100 + static_cast<std::uint64_t>(parameter);
      result.push_back({parameter, step});
    }
    return result;
  }

  static void update_by_hand(TileStore& store, const ParameterUpdate& update, ElementRange range) {
    const std::int64_t first = range.begin - store.layout(0).element_offset(update.parameter);
    const auto section = [&](Section which) { return store.section(0, which).data; };
    EXPECT_TRUE(
        apply_update(Isa::kScalar, update.step, testing::tile_span(GetParam(), section, range, first)));
  }

  static constexpr Section kSections[] = {
      Section::kWeights,  Section::kMasterLow,       Section::kGradients,        Section::kExpAvg,
      Section::kExpAvgSq, Section::kExpAvgExponents, Section::kExpAvgSqExponents};
};

TEST_P(TileUpdate, EqualsTheSpecificationOnAnyNumberOfThreads) {
  const auto expected = store(1);
  for (const ParameterUpdate& update : updates()) {
    update_by_hand(*expected, update, expected->layout(0).range(update.parameter));
  }
  for (const unsigned threads : {1u, 2u, 5u}) {
    const auto updated = store(threads);
    const std::int64_t moved = update_tile(*updated, 0, updates());
    std::int64_t bytes_moved = 0;
    for (const std::int64_t count : {1, 5000, 2048}) {
      bytes_moved += update_bytes(GetParam().weights, GetParam().moments, count);
    }
    EXPECT_EQ(moved, bytes_moved);
    for (const Section section : kSections) {
      EXPECT_EQ(bytes(*updated, section), bytes(*expected, section))
          << section_name(section) << ", " << threads;
    }
  }
}

TEST_P(TileUpdate, EqualsItInEveryInstructionSet) {
  const auto expected = store(1);
  update_tile(*expected, 0, updates());
  for (const Isa isa : supported_isas()) {
    const auto updated = store(2, {}, isa_name(isa));
    update_tile(*updated, 0, updates());
    for (const Section section : kSections) EXPECT_EQ(bytes(*updated, section), bytes(*expected, section));
  }
}

TEST_P(TileUpdate, TouchesOnlyWhatAShardOwns) {
  for (int rank = 0; rank < 3; ++rank) {
    const auto expected = store(1, {rank, 3});
    const TileLayout& layout = expected->layout(0);
    for (const ParameterUpdate& update : updates()) {
      const ElementRange range = layout.range(update.parameter);
      const ElementRange mine{std::max(range.begin, layout.owned().begin),
                              std::min(range.end, layout.owned().end)};
      if (!mine.empty()) update_by_hand(*expected, update, mine);
    }
    const auto updated = store(2, {rank, 3});
    update_tile(*updated, 0, updates());
    for (const Section section : kSections)
      EXPECT_EQ(bytes(*updated, section), bytes(*expected, section)) << rank;
  }
}

TEST_P(TileUpdate, NamesTheParameterThatBecameInfinite) {
  const auto updated = store(2);
  const std::size_t width = element_bytes(GetParam(), Section::kGradients);
  const float infinity = std::numeric_limits<float>::infinity();
  const std::uint16_t narrow = testing::to_bf16(infinity);
  std::memcpy(updated->section(0, Section::kGradients).data +
                  static_cast<std::size_t>(updated->layout(0).element_offset(4) + 2047) * width,
              width == 4 ? static_cast<const void*>(&infinity) : &narrow, width);
  EXPECT_EQ(message_of<OutsideError>([&] { update_tile(*updated, 0, updates()); }),
            "the update made a weight infinite or NaN: parameter 4 of tile 0, step 5");
}

TEST_P(TileUpdate, RefusesUpdatesThatMakeNoSense) {
  const auto checked = store(1);
  const TileLayout& layout = checked->layout(0);
  const auto refused = [&](ParameterUpdate update) {
    return message_of<CallerError>([&] { check_updates(layout, 2, {update}); });
  };
  EXPECT_EQ(refused({kFrozen, {}}), "parameter 3 of tile 2 is frozen");
  EXPECT_EQ(refused({6, {}}), "parameter 6 of a tile with 6 parameters");
  EXPECT_EQ(refused({0, {.step = 0}}), "step is 0 for parameter 0 of tile 2; steps count from 1");
  EXPECT_NE(refused({0, {.beta1 = 1.0}}).find("beta1 is 1.0"), std::string::npos);
  EXPECT_NE(refused({0, {.beta2 = -0.5}}).find("beta2 is -0.5"), std::string::npos);
  EXPECT_EQ(message_of<CallerError>([&] { check_updates(layout, 2, {{0, {}}, {0, {}}}); }),
            "parameter 0 of tile 2 is listed twice in one update");
}

TEST_P(TileUpdate, OfSomeElementsTouchesNoOthers) {
  // Three parts of one parameter with a step of their own, one of them left out; blocks of 8-bit moments stay
  // whole.
  const auto parts = [] {
    std::vector<ParameterUpdate> result;
    for (const auto& [begin, end] :
         std::vector<std::pair<std::int64_t, std::int64_t>>{{0, 1280}, {3840, -1}}) {
      ParameterUpdate update = updates()[2];  // parameter 1, of 5000 elements
      update.elements = {begin, end};
      update.step.step += begin;
      result.push_back(update);
    }
    return result;
  };
  const auto expected = store(1);
  const std::int64_t offset = expected->layout(0).element_offset(parts()[0].parameter);
  for (const ParameterUpdate& update : parts()) {
    const std::int64_t end = update.elements.end == -1 ? 5000 : update.elements.end;
    update_by_hand(*expected, update, {offset + update.elements.begin, offset + end});
  }
  for (const unsigned threads : {1u, 3u}) {
    const auto updated = store(threads);
    update_tile(*updated, 0, parts());
    for (const Section section : kSections) {
      EXPECT_EQ(bytes(*updated, section), bytes(*expected, section))
          << section_name(section) << ", " << threads;
    }
  }
}

TEST_P(TileUpdate, RefusesElementsThatMakeNoSense) {
  const auto checked = store(1);
  const TileLayout& layout = checked->layout(0);
  const auto refused = [&](std::vector<ElementRange> elements) {
    std::vector<ParameterUpdate> asked;
    for (const ElementRange& range : elements) asked.push_back({1, {}, range});
    return message_of<CallerError>([&] { check_updates(layout, 2, asked); });
  };
  const std::string fine = "nothing of that kind was thrown";
  EXPECT_EQ(refused({{0, 128}, {128, 256}, {512, 5000}}), fine);
  EXPECT_EQ(refused({{0, 5001}}), "elements 0 to 5001 of parameter 1 of tile 2, which has 5000");
  EXPECT_EQ(refused({{-1, 128}}), "elements -1 to 128 of parameter 1 of tile 2, which has 5000");
  EXPECT_EQ(refused({{256, 128}}), "elements 256 to 128 of parameter 1 of tile 2, which has 5000");
  EXPECT_EQ(refused({{128, 384}, {0, 256}}), "parameter 1 of tile 2 is listed twice in one update");
  EXPECT_EQ(refused({{0, 256}, {128, 384}}), "parameter 1 of tile 2 is listed twice in one update");
  const bool blocks = GetParam().moments == MomentFormat::kInt8;
  EXPECT_EQ(refused({{64, 128}}), !blocks
                                      ? fine
                                      : "elements 64 to 128 of parameter 1 of tile 2, whose 8-bit moments "
                                        "are in blocks of 128");
}

INSTANTIATE_TEST_SUITE_P(Formats, TileUpdate, ::testing::ValuesIn(testing::all_tile_formats()),
                         [](const auto& info) { return std::string(format_name(info.param)); });

}  // namespace
}  // namespace megatrain
