#include "team.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>

#if defined(__linux__)
#include <pthread.h>
#endif

namespace cb {

// Within a step the others arrive in microseconds, unless one lost its core. Between steps the host needs some tenths of
// a millisecond; sleeping through that costs one wake-up a step.
constexpr int BARRIER_SPIN_US = 100, START_SPIN_US = 50, PAUSES_US = 10;

static inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void Gate::advance() {
  value_.fetch_add(1, std::memory_order_seq_cst);
  // A sleeper counts itself before it looks at the value a last time, so one of the two sees the other.
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
}

void Gate::wait(uint32_t seen, int spin_us) {
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 64; ++i) {
    if (value() != seen) return;
    pause_cpu();
  }
  const auto begin = Clock::now();
  for (;;) {
    for (int i = 0; i < 32; ++i) {
      if (value() != seen) return;
      pause_cpu();
    }
    const auto spent = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count();
    if (spent > spin_us) break;
    if (spent > PAUSES_US) std::this_thread::yield();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  changed_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != seen; });
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

Team::Team(int size) : size_(size), pid_(getpid()), active_(size), scratch_(size, nullptr) {
  try {
    for (int i = 1; i < size; ++i) helpers_.emplace_back([this, i] { help(i); });
  } catch (...) {
    stop();
    throw;
  }
}

Team::~Team() {
  stop();
  for (char* scratch : scratch_) free(scratch);
}

bool Team::foreign() const { return getpid() != pid_; }

void Team::stop() {
  ending_ = true;
  start_.advance();
  for (auto& helper : helpers_) helper.join();
  helpers_.clear();
}

bool Team::run(void (*work)(void*, Member&), void* context, size_t scratch) {
  std::lock_guard<std::mutex> lock(one_run_);
  if (scratch > scratch_size_) {
    for (char*& part : scratch_) {
      void* memory = nullptr;
      if (posix_memalign(&memory, 64, scratch)) return false;
      free(part);
      part = static_cast<char*>(memory);
    }
    scratch_size_ = scratch;
  }
  work_ = work;
  context_ = context;
  active_ = foreign() ? 1 : size_;
  next_.store(0, std::memory_order_relaxed);
  if (active_ > 1) start_.advance();
  Member member{this, 0, scratch_[0]};
  work(context, member);
  barrier();
  return true;
}

void Team::barrier() {
  if (active_ == 1) {
    next_.store(0, std::memory_order_relaxed);
    return;
  }
  const uint32_t seen = passed_.value();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == active_) {
    arrived_.store(0, std::memory_order_relaxed);
    next_.store(0, std::memory_order_relaxed);
    passed_.advance();
  } else {
    passed_.wait(seen, BARRIER_SPIN_US);
  }
}

void Team::help(int index) {
#if defined(__linux__)
  pthread_setname_np(pthread_self(), "cbengine-kernel");
#endif
  for (uint32_t seen = 0;; ++seen) {
    start_.wait(seen, START_SPIN_US);
    if (ending_) return;
    Member member{this, index, scratch_[index]};
    work_(context_, member);
    barrier();
  }
}

}  // namespace cb
