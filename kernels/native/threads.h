// A pool of threads that runs one function at a time on all of them, with a barrier to use inside it.
//
// Waiting spins for some microseconds, which is what an operation of a step lasts, and then sleeps: the cores are shared
// with the scheduler and its frontends.
#pragma once
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gilir {

constexpr int SPINS = 2000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

inline void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < SPINS; i++) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

class Barrier {
 public:
  void reset(int threads) { threads_ = threads; arrived_.store(0); }

  // Returns once all threads have called it. `last` runs once before any goes on.
  template <class F> void wait(F&& last) {
    if (threads_ == 1) return last();
    uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      last();
      phase_.store(phase + 1, std::memory_order_release);
      phase_.notify_all();
    } else {
      wait_while(phase_, phase);
    }
  }

 private:
  int threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

class Pool {
 public:
  // One pool a process; a fork has none of the threads, and gets its own.
  static Pool& instance() {
    static std::mutex guard;
    static Pool* pool = nullptr;
    std::lock_guard<std::mutex> lock(guard);
    if (pool == nullptr || pool->process_ != getpid()) pool = new Pool;
    return *pool;
  }

  Barrier barrier;

  // Calls work(thread) for thread in 0 .. threads - 1, 0 being the caller. One at a time; others wait for their turn.
  void run(int threads, const std::function<void(int)>& work) {
    std::lock_guard<std::mutex> lock(turn_);
    barrier.reset(threads);
    if (threads == 1) return work(0);
    while (static_cast<int>(seats_.size()) < threads - 1) start();
    work_ = &work;
    pending_.store(static_cast<uint32_t>(threads - 1), std::memory_order_relaxed);
    for (int i = 0; i < threads - 1; i++) {
      seats_[static_cast<size_t>(i)]->calls.fetch_add(1, std::memory_order_release);
      seats_[static_cast<size_t>(i)]->calls.notify_one();
    }
    work(0);
    for (uint32_t left; (left = pending_.load(std::memory_order_acquire)) != 0;) wait_while(pending_, left);
  }

 private:
  struct Seat { alignas(64) std::atomic<uint32_t> calls{0}; };

  void start() {
    seats_.reserve(seats_.size() + 1);  // a seat whose thread could not be had must not be there
    auto owned = std::make_unique<Seat>();
    Seat* seat = owned.get();
    int thread = static_cast<int>(seats_.size()) + 1;
    std::thread([this, seat, thread] {
      for (uint32_t calls = 0;; calls++) {
        wait_while(seat->calls, calls);
        (*work_)(thread);
        pending_.fetch_sub(1, std::memory_order_acq_rel);
        pending_.notify_one();
      }
    }).detach();
    seats_.push_back(std::move(owned));
  }

  const pid_t process_ = getpid();
  std::mutex turn_;
  std::vector<std::unique_ptr<Seat>> seats_;
  const std::function<void(int)>* work_ = nullptr;
  alignas(64) std::atomic<uint32_t> pending_{0};
};

// The part of `count` items that belongs to a thread: [begin, end).
struct Share {
  int64_t begin, end;
  Share(int64_t count, int thread, int threads) : begin(count * thread / threads), end(count * (thread + 1) / threads) {}
};

}  // namespace gilir
