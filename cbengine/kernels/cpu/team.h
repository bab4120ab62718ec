// Threads that work through one step together.
//
// They are ours, and not OpenMP's: a step is a few hundred short regions, and how its threads wait between them decides
// what it costs. Ours spin for some microseconds, then offer their core to others, then sleep; OpenMP's do one of these for
// ever, chosen by environment variables for the whole process.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cb {

// A number that only grows, and that threads wait for.
class Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }
  void advance();
  // Returns once the value is no longer `seen`.
  void wait(uint32_t seen, int spin_us);

 private:
  std::atomic<uint32_t> value_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

class Team;

// What a member of the team knows while it works.
struct Member {
  Team* team;
  int index;
  char* scratch;  // the member's own, as large as `run` was asked for, aligned to 64 bytes
};

class Team {
 public:
  explicit Team(int size);  // may throw std::system_error; `size` threads, of which the caller of `run` is one
  ~Team();         // not in a child of the process that made it, see `foreign`
  int size() const { return size_; }
  // True in a forked child, where the helpers do not exist: it computes alone, and must not destroy the team.
  bool foreign() const;

  // All members call `work(context, member)`. One run at a time; other callers wait. False: no memory for the scratch.
  bool run(void (*work)(void*, Member&), void* context, size_t scratch);

  // Within a run. Hands out 0 … count - 1, each once, in order; false when there are none left.
  bool take(long count, long* task) { return (*task = next_.fetch_add(1, std::memory_order_relaxed)) < count; }
  // Within a run. Waits for every member, and starts the tasks anew.
  void barrier();

 private:
  void help(int index);
  void stop();

  const int size_;
  const int pid_;
  int active_;     // members of the present run
  std::mutex one_run_;
  Gate start_, passed_;
  std::atomic<int> arrived_{0};
  std::atomic<long> next_{0};
  bool ending_ = false;
  void (*work_)(void*, Member&) = nullptr;
  void* context_ = nullptr;
  size_t scratch_size_ = 0;
  std::vector<char*> scratch_;
  std::vector<std::thread> helpers_;
};

}  // namespace cb
