#include <gtest/gtest.h>

#include "device/backend.h"
#include "tiles/tile_gate.h"

namespace megatrain {
namespace {

class TileGateTest : public ::testing::Test {
 protected:
  SharedEvent event() {
    auto event = std::make_shared<Event>(backend_->create_event("test"));
    backend_->record(*event, {});
    return event;
  }
  std::unique_ptr<Backend> backend_ = make_host_backend({});
  int changes_ = 0;
  TileGate gate_{[this] { ++changes_; }};
};

TEST_F(TileGateTest, CountsUpdatesAndEditsOfEachTile) {
  EXPECT_EQ(gate_.version(3), 0);
  gate_.mark_edited(3);
  gate_.queue_update(3);
  EXPECT_EQ(gate_.version(3), 2);
  EXPECT_EQ(gate_.version(0), 0);
}

TEST_F(TileGateTest, IsClosedToReadsFromTheCallThatQueuesAnUpdateUntilItsEnd) {
  EXPECT_TRUE(gate_.open(0));
  gate_.queue_update(0);
  gate_.queue_update(0);
  EXPECT_FALSE(gate_.open(0));
  EXPECT_FALSE(gate_.begin_read(0).has_value());
  EXPECT_TRUE(gate_.open(1));
  gate_.update_ended(0);
  EXPECT_FALSE(gate_.begin_read(0).has_value());
  gate_.update_ended(0);
  EXPECT_EQ(gate_.begin_read(0), 2);
  EXPECT_EQ(changes_, 2);
}

TEST_F(TileGateTest, LetsATestReadPastAPendingUpdate) {
  gate_.queue_update(0);
  EXPECT_EQ(gate_.begin_read(0, true), 1);
}

TEST_F(TileGateTest, AHoldIsAReadUntilItsRelease) {
  EXPECT_FALSE(gate_.any_held());
  gate_.hold(0);
  gate_.hold(0);
  EXPECT_FALSE(gate_.reads_queued(0));
  EXPECT_TRUE(gate_.reads_queued(1));
  EXPECT_TRUE(gate_.begin_read(0));  // others may read, too
  gate_.read_queued(0, ReadLane::kWeights, event());
  gate_.release(0);
  EXPECT_FALSE(gate_.reads_queued(0));
  EXPECT_TRUE(gate_.any_held());
  gate_.release(0);
  EXPECT_TRUE(gate_.reads_queued(0));
  EXPECT_FALSE(gate_.any_held());
  EXPECT_EQ(changes_, 3);
}

TEST_F(TileGateTest, CountsTheTimeInWhichUpdatesWaitForAHold) {
  gate_.hold(0);
  gate_.hold(1);
  EXPECT_EQ(gate_.held_up_ns(), 0);
  gate_.release(0);
  EXPECT_EQ(gate_.held_up_ns(), 0);  // nobody waited
  gate_.queue_update(1);
  gate_.queue_update(1);
  const std::int64_t at_first = gate_.held_up_ns();
  while (gate_.held_up_ns() == at_first) {
  }
  gate_.release(1);
  const std::int64_t total = gate_.held_up_ns();
  EXPECT_GT(total, 0);
  gate_.update_ended(1);
  EXPECT_EQ(gate_.held_up_ns(), total);
}

TEST_F(TileGateTest, KnowsTheLastReadOfEachLane) {
  EXPECT_TRUE(gate_.reads_queued(0));
  EXPECT_TRUE(gate_.last_reads(0).empty());
  ASSERT_TRUE(gate_.begin_read(0));
  EXPECT_FALSE(gate_.reads_queued(0));
  EXPECT_TRUE(gate_.reads_queued(1));
  const SharedEvent weights = event(), later = event(), fetch = event();
  gate_.read_queued(0, ReadLane::kWeights, weights);
  EXPECT_TRUE(gate_.reads_queued(0));
  ASSERT_TRUE(gate_.begin_read(0));
  ASSERT_TRUE(gate_.begin_read(0));
  gate_.read_queued(0, ReadLane::kFetch, fetch);
  EXPECT_FALSE(gate_.reads_queued(0));
  gate_.read_queued(0, ReadLane::kWeights, later);
  EXPECT_EQ(gate_.last_reads(0), (std::vector<SharedEvent>{later, fetch}));
  EXPECT_EQ(changes_, 3);
}

// Drain, update, drain, update: each waits for what was queued before it, and for nothing after.
TEST_F(TileGateTest, OrdersDrainsAndUpdatesAsTheyWereQueued) {
  const std::int64_t before_drain1 = gate_.queue_drain(0);
  const std::int64_t before_update1 = gate_.queue_update(0);
  const std::int64_t before_drain2 = gate_.queue_drain(0);
  const std::int64_t before_update2 = gate_.queue_update(0);
  EXPECT_TRUE(gate_.may_drain(0, before_drain1));
  EXPECT_FALSE(gate_.may_update(0, before_update1));
  const SharedEvent first = event(), second = event();
  gate_.drain_queued(0, first);
  EXPECT_EQ(gate_.last_drain(0), first);
  EXPECT_FALSE(gate_.drains_queued(0));
  EXPECT_TRUE(gate_.may_update(0, before_update1));
  EXPECT_FALSE(gate_.may_drain(0, before_drain2));
  EXPECT_FALSE(gate_.may_update(0, before_update2));
  gate_.update_ended(0);
  EXPECT_TRUE(gate_.may_drain(0, before_drain2));
  EXPECT_FALSE(gate_.may_update(0, before_update2));
  gate_.drain_queued(0, second);
  EXPECT_TRUE(gate_.drains_queued(0));
  EXPECT_EQ(gate_.last_drain(0), second);
  EXPECT_TRUE(gate_.may_update(0, before_update2));
  EXPECT_FALSE(gate_.open(0));
  gate_.update_ended(0);
  EXPECT_TRUE(gate_.open(0));
}

}  // namespace
}  // namespace megatrain
