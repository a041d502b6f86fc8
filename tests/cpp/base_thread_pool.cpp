#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"

namespace megatrain {
namespace {

TEST(ThreadPool, RunsTheBodyOnceInEachNamedWorker) {
  for (const unsigned workers : {1u, 2u, 5u}) {
    ThreadPool pool(workers);
    EXPECT_EQ(pool.workers(), workers);
    std::vector<int> calls(workers, 0);
    std::vector<unsigned> seen_workers(workers, 0);
    std::vector<std::thread::id> threads(workers);
    std::vector<std::string> names(workers);
    pool.run([&](unsigned worker, unsigned count) {
      ++calls[worker];
      seen_workers[worker] = count;
      threads[worker] = std::this_thread::get_id();
      char name[16] = {};
      pthread_getname_np(pthread_self(), name, sizeof name);
      names[worker] = name;
    });
    for (unsigned i = 0; i < workers; ++i) {
      EXPECT_EQ(calls[i], 1);
      EXPECT_EQ(seen_workers[i], workers);
      EXPECT_EQ(names[i], "mt-pool-" + std::to_string(i));
      EXPECT_NE(threads[i], std::this_thread::get_id());
    }
    EXPECT_EQ(std::set<std::thread::id>(threads.begin(), threads.end()).size(), workers);
  }
}

TEST(ThreadPool, WorkersRunAtTheSameTime) {
  ThreadPool pool(3);
  std::atomic<unsigned> inside{0};
  // Each worker waits for the others: run in turn, they would never return.
  pool.run([&](unsigned, unsigned workers) {
    ++inside;
    while (inside < workers) std::this_thread::yield();
  });
  EXPECT_EQ(inside, 3u);
}

TEST(ThreadPool, ManyRunsOneAfterTheOther) {
  ThreadPool pool(4);
  std::vector<std::int64_t> sums(4, 0);  // plain memory: run orders the accesses
  for (int run = 1; run <= 3000; ++run) {
    pool.run([&](unsigned worker, unsigned) { sums[worker] += run + worker; });
  }
  for (unsigned i = 0; i < 4; ++i) EXPECT_EQ(sums[i], 3000LL * 3001 / 2 + 3000LL * i);
}

TEST(ThreadPool, AnExceptionIsRethrownAfterAllHaveReturnedAndThePoolStaysUsable) {
  ThreadPool pool(3);
  std::atomic<int> calls{0};
  const auto failing = [&](unsigned worker, unsigned) {
    ++calls;
    if (worker == 1) throw std::runtime_error("worker 1 failed");
  };
  for (int repeat = 0; repeat < 3; ++repeat) {
    calls = 0;
    try {
      pool.run(failing);
      FAIL() << "the exception was lost";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "worker 1 failed");
    }
    EXPECT_EQ(calls, 3);
  }
  calls = 0;
  pool.run([&](unsigned, unsigned) { ++calls; });  // and the old exception does not come back
  EXPECT_EQ(calls, 3);
}

TEST(ThreadPool, ExceptionsOfAllWorkersGiveOne) {
  ThreadPool pool(4);
  EXPECT_THROW(pool.run([](unsigned, unsigned) { throw CallerError("all"); }), CallerError);
}

TEST(ThreadPool, NoWorkersAreRefused) { EXPECT_THROW(ThreadPool(0), CallerError); }

TEST(ThreadPool, ThrowsInAForkedProcessAndCanBeDestroyedThere) {
  auto pool = std::make_unique<ThreadPool>(2);
  pool->run([](unsigned, unsigned) {});
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a destructor that waits for threads that do not exist must not hang the test
    int status = 1;
    try {
      pool->run([](unsigned, unsigned) {});
    } catch (const OutsideError&) {
      status = 0;
    }
    pool.reset();
    _exit(status);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), 0);
  std::atomic<int> calls{0};
  pool->run([&](unsigned, unsigned) { ++calls; });  // the parent's pool is untouched
  EXPECT_EQ(calls, 2);
}

}  // namespace
}  // namespace megatrain
