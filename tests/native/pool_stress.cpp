// Stress of pool.h, built with and without the thread sanitizer: many short steps with barriers and shared work, with as many
// threads as asked for on however few cores; pauses in which threads fall asleep; work that throws. Ends with "passed".
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "pool.h"

using kvant::Pool;

static void require(bool right, const char* what) {
  if (right) return;
  std::printf("failed: %s\n", what);
  std::exit(1);
}

constexpr int PHASES = 6, PIECES = 40;

struct Step {
  Pool* pool;
  long values[PIECES] = {};  // plain memory: only the barriers order what threads do to it
  std::atomic<int> next[PHASES];
  int throws_at = -1, thrower = 0;  // a phase, and the thread that leaves it by an exception
};

// Every phase adds to each value its neighbour's of the phase before: a lost barrier gives other numbers.
static void work(void* context, int id) {
  Step& step = *(Step*)context;
  long sums[PIECES];
  for (int phase = 0; phase < PHASES; ++phase) {
    if (phase == step.throws_at && id == step.thrower) throw std::bad_alloc();
    step.pool->barrier();
    for (int i = 0; i < PIECES; ++i) sums[i] = step.values[i] + step.values[(i + 1) % PIECES] + 1;
    step.pool->barrier();
    for (int i; (i = step.next[phase].fetch_add(1, std::memory_order_relaxed)) < PIECES;) step.values[i] = sums[i];
  }
}

static void prepare(Step& step) {
  std::memset(step.values, 0, sizeof step.values);
  for (auto& next : step.next) next.store(0);
}

static void check(Step& step) {
  for (long value : step.values) require(value == (1 << PHASES) - 1, "a value of a step");
}

static void many_steps(int threads, int steps) {
  Pool pool(threads);
  require(pool.size() == threads, "all threads came up");
  Step step = {&pool};
  for (int n = 0; n < steps; ++n) {
    prepare(step);
    pool.run(work, &step);
    check(step);
    if (n % 64 == 63) std::this_thread::sleep_for(std::chrono::microseconds(n % 128 == 63 ? 2000 : 350));  // asleep; or nearly
  }
}

static void exceptions(int threads) {
  Pool pool(threads);
  Step step = {&pool};
  for (int n = 0; n < 60; ++n) {
    step.throws_at = n % (PHASES + 1) - 1;
    step.thrower = n % threads;
    prepare(step);
    bool thrown = false;
    try {
      pool.run(work, &step);
    } catch (const std::bad_alloc&) {
      thrown = true;
    }
    require(thrown == (step.throws_at >= 0), "an exception reaches the caller");
    if (!thrown) check(step);
  }
}

int main(int, char** arguments) {
  const int steps = std::atoi(arguments[1]);
  for (int threads = 1; threads <= 8; ++threads) {
    many_steps(threads, steps);
    exceptions(threads);
    for (int n = 0; n < 10; ++n) Pool pool(threads);  // ended before it ran
  }
  std::puts("passed");
}
