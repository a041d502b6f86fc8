#include <gtest/gtest.h>

#include "stream/slots.h"

namespace megatrain {
namespace {

class SlotRingTest : public ::testing::Test {
 protected:
  int add(std::size_t bytes, int only_tile = -1) { return slots_.add(nullptr, bytes, only_tile); }
  void hold(int slot, int tile, std::int64_t version = 0) {
    slots_[slot].tile = tile;
    slots_[slot].version = version;
    slots_[slot].touched = ++clock_;
  }
  int guess(int tile, std::size_t position, std::size_t bytes = 10) {
    return slots_.victim({tile, bytes, false, position}, next_use_, claimed_, version_, false);
  }
  int demand(int tile, std::size_t bytes = 10) {
    return slots_.victim({tile, bytes, true, 0}, next_use_, claimed_, version_, false);
  }

  SlotRing slots_;
  NextUse next_use_;
  std::vector<int> claimed_;
  std::function<std::int64_t(int)> version_ = [](int) { return 0; };
  std::uint64_t clock_ = 0;
};

TEST_F(SlotRingTest, FindsATileByItsVersion) {
  add(10);
  add(10);
  hold(1, 7, 3);
  EXPECT_EQ(slots_.find(7, 3), 1);
  EXPECT_EQ(slots_.find(7, 4), -1);
  EXPECT_EQ(slots_.find(8, 3), -1);
}

TEST_F(SlotRingTest, ReplacesWhatIsNeededLast) {
  for (int i = 0; i < 3; ++i) add(10);
  hold(0, 0);
  hold(1, 1);
  hold(2, 2);
  next_use_ = {{0, 4}, {1, 9}, {2, 5}, {3, 2}};
  EXPECT_EQ(guess(3, 2), 1);
  next_use_.erase(2);  // never needed again
  EXPECT_EQ(guess(3, 2), 2);
}

TEST_F(SlotRingTest, NeverReplacesForAGuessWhatIsNeededBefore) {
  add(10);
  add(10);
  hold(0, 0);
  hold(1, 1);
  next_use_ = {{0, 0}, {1, 1}, {2, 2}};
  EXPECT_EQ(guess(2, 2), -1);
  EXPECT_EQ(demand(2), 1);  // the caller is waiting: something has to go
}

TEST_F(SlotRingTest, PrefersEmptyAndStaleSlots) {
  for (int i = 0; i < 3; ++i) add(10);
  hold(0, 0);
  hold(1, 1);
  EXPECT_EQ(guess(5, 0), 2);
  hold(2, 2);
  version_ = [](int tile) { return tile == 1 ? 1 : 0; };
  EXPECT_EQ(guess(5, 0), 1);
}

TEST_F(SlotRingTest, TakesTheOneIdleLongestAmongEquals) {
  for (int i = 0; i < 3; ++i) add(10);
  hold(1, 1);
  hold(2, 2);
  hold(0, 0);
  EXPECT_EQ(guess(5, 0), 1);
}

TEST_F(SlotRingTest, LeavesAloneWhatIsInUseFillingOrClaimed) {
  for (int i = 0; i < 4; ++i) add(10);
  slots_[0].uses = 1;
  slots_[1].filling = true;
  claimed_ = {2};
  EXPECT_EQ(demand(5), 3);
  claimed_ = {2, 3};
  EXPECT_EQ(demand(5), -1);
  EXPECT_EQ(slots_.victim({5, 10, true, 0}, next_use_, claimed_, version_, true), 0);
}

TEST_F(SlotRingTest, KeepsOneTilesSlotForIt) {
  add(10);
  add(20, 4);
  EXPECT_EQ(demand(4), 1);
  EXPECT_EQ(demand(5), 0);
  slots_[0].uses = 1;
  EXPECT_EQ(demand(5), -1);
  slots_[1].uses = 1;
  slots_[0].uses = 0;
  EXPECT_EQ(demand(4), -1);  // its own is held: no other will do, since its users know its memory
}

TEST_F(SlotRingTest, KnowsSizes) {
  add(10);
  add(20);
  add(30, 4);
  EXPECT_EQ(demand(5, 15), 1);
  EXPECT_EQ(demand(5, 21), -1);
  EXPECT_EQ(demand(4, 30), 2);
  EXPECT_EQ(slots_.largest_for(5), 20u);
  EXPECT_EQ(slots_.largest_for(4), 30u);
  EXPECT_EQ(SlotRing().largest_for(0), 0u);
}

}  // namespace
}  // namespace megatrain
