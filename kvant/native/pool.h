// Threads that run one function together, and the barriers between its phases.
//
// The caller is thread 0. A step of a small model takes 2-3 ms and has some 200 barriers, so waiting is spinning: a barrier
// costs about 0.3 us. Who waits for longer than 10 us gives way again and again (yield), since somebody else may hold the core
// that the awaited thread needs. Between steps all but the caller spin for a moment (the next step is usually near) and then
// sleep.
//
// A neighbour that takes 5, 10 or 30 % of one of two cores, in bursts every 20 ms, leaves 92, 88 and 74 % of the speed at one
// row; one that takes all it can leaves 30 % (spins counted instead of timed: 68 and 11 % in the last two). Sleeping at
// barriers, so that the system moves the awaited thread to the free core, was tried with 50, 200 and 1000 us, and is worse:
// 85, 75 and 55 %.
//
// What may go wrong. (1) The system gives fewer threads than asked for (limits of users and containers): the pool is then
// smaller, and `size` says so. (2) A process that forks has the memory of its parent's threads, and none of them: the first
// run in the child starts new ones. (3) A thread's work throws: every barrier of that run throws, and so does `run`.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvant {

static inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // some 10 ns, like x86's pause; "yield" does nothing on most cores
#endif
}

// The threads of one process and what they share.
class Crew {
 public:
  explicit Crew(int size) {
    try {
      for (int id = 1; id < size; ++id) threads_.emplace_back([this, id] { serve(id); });
    } catch (const std::system_error&) {  // the ones that came up are enough
    }
    size_ = 1 + (int)threads_.size();
  }

  ~Crew() {
    stop_.store(true);
    next_epoch();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  void run(void (*work)(void*, int), void* context) {
    work_ = work;
    context_ = context;
    broken_.store(false, std::memory_order_relaxed);
    arrived_.store(0, std::memory_order_relaxed);
    running_.store(size_ - 1, std::memory_order_relaxed);
    next_epoch();
    perform(0);
    await([this] { return running_.load(std::memory_order_acquire) == 0; });
    if (broken_.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

  void barrier() {
    if (size_ == 1) return;
    const unsigned turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    await([this, turn] { return turn_.load(std::memory_order_acquire) != turn || broken_.load(std::memory_order_relaxed); });
    if (broken_.load(std::memory_order_relaxed)) throw std::bad_alloc();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto SPIN = std::chrono::microseconds(10), IDLE_SPIN = std::chrono::microseconds(400);
  static constexpr int SPINS_PER_LOOK = 16;  // at the clock

  // Spins until `ready`, for `most` at most; returns whether it is.
  template <class Ready>
  static bool spin(Ready ready, Clock::duration most) {
    for (auto end = Clock::time_point::max();;) {
      for (int i = 0; i < SPINS_PER_LOOK; ++i) {
        if (ready()) return true;
        pause_cpu();
      }
      const auto now = Clock::now();
      if (end == Clock::time_point::max()) end = now + most;
      if (now >= end) return false;
    }
  }

  template <class Ready>
  static void await(Ready ready) {
    if (spin(ready, SPIN)) return;
    while (!ready()) std::this_thread::yield();
  }

  // For a new epoch: spinning, then asleep. Either the sleeper sees the epoch before it sleeps, or `next_epoch` sees the sleeper:
  // both sides write first and read then, in one total order.
  void await_epoch(unsigned seen) {
    const auto ready = [this, seen] { return epoch_.load() != seen; };
    if (spin(ready, IDLE_SPIN)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1);
    bell_.wait(lock, ready);
    sleeping_.fetch_sub(1);
  }

  void next_epoch() {
    epoch_.fetch_add(1);
    if (sleeping_.load() == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    bell_.notify_all();
  }

  void perform(int id) {
    try {
      work_(context_, id);
    } catch (...) {
      broken_.store(true, std::memory_order_relaxed);
    }
  }

  void serve(int id) {
    for (unsigned seen = 0;; ++seen) {
      await_epoch(seen);
      if (stop_.load()) return;
      perform(id);
      running_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  int size_ = 1;
  std::vector<std::thread> threads_;
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> turn_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false}, broken_{false};
  std::mutex mutex_;
  std::condition_variable bell_;
};

class Pool {
 public:
  explicit Pool(int size) : crew_(new Crew(size)), size_(crew_->size()), process_(getpid()) {}

  ~Pool() {
    if (getpid() != process_) (void)crew_.release();  // nobody is there to be waited for
  }

  // Threads that came up, the caller included.
  int size() const { return size_; }

  // Runs work(context, id) on every thread and returns when all are through. Throws where one of them threw, and in a forked
  // process that cannot have as many threads as its parent had.
  void run(void (*work)(void*, int), void* context) {
    if (getpid() != process_) renew();
    crew_->run(work, context);
  }

  // Every thread of the pool arrives before any leaves. Throws where one of them will never arrive.
  void barrier() { crew_->barrier(); }

 private:
  void renew() {
    auto crew = std::make_unique<Crew>(size_);
    if (crew->size() != size_) throw std::bad_alloc();
    (void)crew_.release();
    crew_ = std::move(crew);
    process_ = getpid();
  }

  std::unique_ptr<Crew> crew_;
  int size_;
  pid_t process_;
};

}  // namespace kvant
