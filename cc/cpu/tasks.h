// Running tasks from instruction-set files, and making them add up in a fixed order.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/touch.h"

namespace jattn::cpu {
namespace {

// While one lives the thread takes subnormal numbers for 0, in operands and results. Probabilities far from the
// maximum, as slopes make them, would otherwise cost a microcode assist in every product (a backward pass took 1.6
// times as long); and threads that differ here, as those of an application do, would give different bits.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : before_(_mm_getcsr()) {
    constexpr unsigned kFlushToZero = 0x8000, kSubnormalsAreZero = 0x40;
    _mm_setcsr(before_ | kFlushToZero | kSubnormalsAreZero);
  }
  ~FlushSubnormals() { _mm_setcsr(before_); }
#elif defined(__aarch64__)
  FlushSubnormals() {
    constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(before_ | kFlushToZero));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }
#endif
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
#if defined(__aarch64__)
  uint64_t before_;
#else
  unsigned before_;
#endif
};

// All stages of a pass run as one set of tasks, so that threads meet only once, at the end. A thread draws tickets,
// each for some tasks in a row: one, or, where tasks are short, as many as make drawing cheap and lie in the same pages
// of memory. A task may wait for earlier ones (Milestones, Convoy) and never for later ones. Those it waits for are
// running or done, and the earliest running task waits for nobody: nothing can hang, whatever the number of threads.
// `products`: multiply-adds of all tasks, about.
template <typename Body>
inline void run_tasks(const TaskRunner& runner, int64_t count, int64_t products, int64_t thread_bytes,
                      const Body& body) {
  if (count <= 0) return;
  constexpr int64_t kProductsPerTicket = 1 << 20;  // some 20 us
  constexpr int64_t kTicketsPerThread = 16;        // so that the last of them leave few idle
  const int64_t by_products = kProductsPerTicket / max_of(1, products / count);
  const int64_t by_threads = count / (kTicketsPerThread * max_of(1, runner.num_threads));
  struct Tickets {
    const Body* body;
    int64_t count, tasks;
    int64_t next;
  } tickets{&body, count, max_of(1, min_of(by_products, by_threads)), 0};
  runner.run(
      runner.context, (count + tickets.tasks - 1) / tickets.tasks, thread_bytes,
      [](void* argument, int64_t) {
        const FlushSubnormals flush;
        auto& drawn = *static_cast<Tickets*>(argument);
        const int64_t first = __atomic_fetch_add(&drawn.next, drawn.tasks, __ATOMIC_RELAXED);
        const int64_t end = min_of(first + drawn.tasks, drawn.count);
        for (int64_t i = first; i < end; ++i) (*drawn.body)(i);
      },
      &tickets);
}

// Parts of a thread's memory.
class Workspace {
 public:
  // Tiles are powers of two. Some lines between them keep equal places of two tiles from having the same last 12 bits:
  // a load would wait for a store to the other tile.
  template <typename T>
  static int64_t bytes(int64_t count) {
    constexpr int64_t kLineBytes = 64, kGapLines = 5;
    return (count * static_cast<int64_t>(sizeof(T)) + kLineBytes - 1) / kLineBytes * kLineBytes +
           kGapLines * kLineBytes;
  }
  explicit Workspace(int64_t size_bytes) : next_(static_cast<char*>(thread_memory(size_bytes))) {}

  template <typename T>
  T* take(int64_t count) {
    T* start = reinterpret_cast<T*>(next_);
    next_ += bytes<T>(count);
    const char* const end = reinterpret_cast<char*>(start + count);
    open_bytes(start, count * static_cast<int64_t>(sizeof(T)));
    close_bytes(end, next_ - end);
    return start;
  }

 private:
  char* next_;
};

// Spins, then lets other threads run, until `is_over` returns true.
template <typename Condition>
inline void wait_until(const Condition& is_over) {
  constexpr int kSpinsBeforeYield = 1000;
  for (int spins = 0; !is_over(); ++spins) {
    if (spins >= kSpinsBeforeYield) yield_thread();
  }
}

// Counts of tasks that are done.
class Milestones {
 public:
  Milestones(int64_t* counts, int64_t size) : counts_(counts) {
    for (int64_t i = 0; i < size; ++i) counts_[i] = 0;
  }
  void count(int64_t milestone, int64_t tasks = 1) { __atomic_fetch_add(counts_ + milestone, tasks, __ATOMIC_RELEASE); }
  void wait(int64_t milestone, int64_t wanted) const {
    wait_until([&] { return __atomic_load_n(counts_ + milestone, __ATOMIC_ACQUIRE) >= wanted; });
  }

 private:
  int64_t* counts_;
};

// Places in memory that heads use one after another, each as long as a thread works on it: the next head finds what it
// writes in the caches, and less memory is touched than all heads would take, which counts where it is fresh from the
// system. A thread gets the first place that is free, so one that gives back and takes keeps its place.
class Places {
 public:
  // `numbers`: two for each head.
  Places(int64_t* numbers, int64_t heads) : taken_(numbers), of_head_(numbers + heads) {
    for (int64_t i = 0; i < heads; ++i) taken_[i] = of_head_[i] = 0;
  }

  // There are as many places as heads, so there is always one.
  int64_t take(int64_t first = 0) {
    for (int64_t place = first;; ++place) {
      if (__atomic_exchange_n(taken_ + place, 1, __ATOMIC_ACQUIRE) == 0) return place;
    }
  }
  void give_back(int64_t place) { __atomic_store_n(taken_ + place, 0, __ATOMIC_RELEASE); }

  // The place of a head that several tasks work on, to its end: the first of them takes it. Such heads keep
  // their places, so the next one looks behind the last. What it passes over is held by threads with heads of their
  // own, who come back to it first: there are still enough.
  int64_t of_shared_head(int64_t head, bool is_first) {
    if (is_first) {
      const int64_t place = take(__atomic_load_n(&behind_shared_, __ATOMIC_RELAXED));
      __atomic_store_n(&behind_shared_, place + 1, __ATOMIC_RELAXED);
      __atomic_store_n(of_head_ + head, place + 1, __ATOMIC_RELEASE);
      return place;
    }
    int64_t number = 0;
    wait_until([&] { return (number = __atomic_load_n(of_head_ + head, __ATOMIC_ACQUIRE)) != 0; });
    return number - 1;
  }

 private:
  int64_t *taken_, *of_head_;  // 1; place + 1
  int64_t behind_shared_ = 0;
};

// How many heads are given whole to one thread: packing stays in that core's cache and scratch is reused. Remaining
// heads are shared to balance the load; heads of at most `kShort` pairs of tiles need no balancing where each thread
// has `kManyHeads` of them. Where lengths differ a thread may be a head of full length behind: a quarter of the heads
// are shared.
inline int64_t heads_of_one_thread(int64_t num_heads, int64_t num_threads, int64_t tiles_per_head,
                                   bool lengths_differ) {
  constexpr int64_t kShort = 16 * 16, kManyHeads = 4;
  const int64_t per_thread = num_heads / num_threads;
  if (lengths_differ) return (per_thread - (per_thread + kManyHeads - 1) / kManyHeads) * num_threads;
  const bool shares_none = per_thread >= kManyHeads && tiles_per_head <= kShort;
  return (shares_none ? per_thread : max_of(0, per_thread - 1)) * num_threads;
}

// Tasks that walk the same steps in the same order, every `distance`-th task forming one chain. A task adds to memory
// that it shares with its chain only after all earlier tasks of the chain are past that step, so the sums at one place
// are formed in the order of the task indices.
class Convoy {
 public:
  static constexpr int64_t kAllSteps = INT64_MAX;

  Convoy(int64_t* progress, int64_t num_tasks, int64_t distance) : progress_(progress), distance_(distance) {
    for (int64_t i = 0; i < num_tasks; ++i) progress_[i] = 0;
  }

  // The task will not touch shared memory at any of its first `steps` steps again.
  void announce(int64_t task, int64_t steps) { __atomic_store_n(progress_ + task, steps, __ATOMIC_RELEASE); }

  // Returns when every earlier task of the chain is past `steps`.
  void wait(int64_t task, int64_t steps) const {
    for (int64_t earlier = task - distance_; earlier >= 0; earlier -= distance_) {
      int64_t finished = 0;
      wait_until([&] { return (finished = __atomic_load_n(progress_ + earlier, __ATOMIC_ACQUIRE)) >= steps; });
      if (finished == kAllSteps) return;  // announced by `finish`: so are all before it
    }
  }

  // Returns when a task has ended.
  void wait_for_end(int64_t task) const {
    wait_until([&] { return __atomic_load_n(progress_ + task, __ATOMIC_ACQUIRE) == kAllSteps; });
  }

  void finish(int64_t task) {
    wait(task, kAllSteps);
    announce(task, kAllSteps);
  }

 private:
  int64_t* progress_;
  int64_t distance_;
};

}  // namespace
}  // namespace jattn::cpu
