// Threads that go through one forward together: work is claimed piece by piece, and steps end at a barrier.
//
// A waiting thread spins shortly and then gives its processor away, so that a busy neighbour costs its share and not
// a time slice at every barrier. Pieces are claimed dynamically, so that a thread that is descheduled holds one.
// How many threads there are OpenMP says: it may give fewer than were asked for.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <omp.h>
#include <sched.h>

#ifdef __x86_64__
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() {}
#endif

class Team {
  public:
    // All threads of the team; `work` is called with each piece of 0..count-1 by exactly one of them, who claims `grain`
    // pieces at a time.
    template <class Work> void share(int64_t count, int64_t grain, Work work) {
        for (int64_t i; (i = next_.fetch_add(grain, std::memory_order_relaxed)) < count;)
            for (const int64_t end = std::min(i + grain, count); i < end; i++) work(i);
        barrier();
    }

    void barrier() {
        const int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == omp_get_num_threads() - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++)
            if (spins < SPINS) relax();
            else sched_yield();
    }

  private:
    static const int SPINS = 2000;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
};
