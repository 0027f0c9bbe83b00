// Threads that run one function together, and the barriers between its phases.
//
// The caller is thread 0. A step of a small model takes 2-3 ms and has some 200 barriers, so waiting is spinning: a barrier
// costs about 0.3 us. After a step the others spin for a moment (the next step is usually near) and then sleep on a condition
// variable. Spinning gives way (yield) when it lasts, because somebody else may hold the core the awaited thread needs.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvant {

static inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

class Pool {
 public:
  explicit Pool(int size) : size_(size) {
    for (int id = 1; id < size; ++id) workers_.emplace_back([this, id] { serve(id); });
  }

  ~Pool() {
    stop_.store(true);
    wake();
    for (auto& worker : workers_) worker.join();
  }

  int size() const { return size_; }

  // Runs work(context, id) on every thread and returns when all are through.
  void run(void (*work)(void*, int), void* context) {
    work_ = work;
    context_ = context;
    running_.store(size_ - 1, std::memory_order_relaxed);
    wake();
    work(context, 0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0; ++spins) relax(spins);
  }

  // Every thread of the pool arrives before any leaves.
  void barrier() {
    if (size_ == 1) return;
    const unsigned turn = turn_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      turn_.store(turn + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; turn_.load(std::memory_order_acquire) == turn; ++spins) relax(spins);
  }

 private:
  static constexpr int SPINS_BEFORE_YIELD = 200;  // about 10 us; 4000 took twice as long on a busy machine, equal on a quiet one
  static constexpr auto IDLE_SPIN = std::chrono::microseconds(400);

  static void relax(int spins) {
    if (spins < SPINS_BEFORE_YIELD) pause_cpu();
    else std::this_thread::yield();
  }

  void wake() {
    epoch_.fetch_add(1, std::memory_order_seq_cst);
    if (sleeping_.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      bell_.notify_all();
    }
  }

  void serve(int id) {
    unsigned seen = 0;
    for (;;) {
      await(seen);
      ++seen;
      if (stop_.load()) return;
      work_(context_, id);
      running_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  // Returns once the epoch has moved past `seen`.
  void await(unsigned seen) {
    const auto deadline = std::chrono::steady_clock::now() + IDLE_SPIN;
    for (int spins = 0;; ++spins) {
      if (epoch_.load(std::memory_order_acquire) != seen) return;
      pause_cpu();
      if (spins % 256 == 255 && std::chrono::steady_clock::now() > deadline) break;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleeping_.fetch_add(1, std::memory_order_seq_cst);
    bell_.wait(lock, [&] { return epoch_.load(std::memory_order_seq_cst) != seen; });
    sleeping_.fetch_sub(1);
  }

  const int size_;
  std::vector<std::thread> workers_;
  void (*work_)(void*, int) = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<unsigned> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<unsigned> turn_{0};
  alignas(64) std::atomic<int> running_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable bell_;
};

}  // namespace kvant
