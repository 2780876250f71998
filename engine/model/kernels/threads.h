// How the threads of a pass share its work.
#pragma once

#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace {

// Where the threads of a pass wait for each other, hundreds of times per step. OpenMP's own
// barrier spins for milliseconds: on a busy machine the spinning thread then keeps the core from
// the very thread it waits for. This one spins for some microseconds and then gives way.
class Barrier {
 public:
  void wait() {
    const int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == omp_get_num_threads() - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_task_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < kSpins) relax();
      else sched_yield();
    }
  }

  // The next of a phase's tasks, which threads take in turn.
  int next_task() { return next_task_.fetch_add(1, std::memory_order_relaxed); }

 private:
  static constexpr int kSpins = 2000;
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  alignas(64) std::atomic<int> next_task_{0};
};

// An even share of [0, count) for this thread.
struct Share {
  int begin, end;
  explicit Share(int count) {
    const int64_t n = omp_get_num_threads(), i = omp_get_thread_num();
    begin = int(count * i / n);
    end = int(count * (i + 1) / n);
  }
};

}  // namespace
