// Threads that run one function together: they spin briefly between calls, then park.
#include "pool.hpp"

#include <sched.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace slip {
namespace {

constexpr auto kSpin = std::chrono::microseconds(200);  // longer than the pause between two steps
constexpr int kYieldAfter = 1 << 14;                    // pauses after which a waiting thread gives way

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

double cgroup_cores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (!(file >> quota >> period) || quota == "max" || period <= 0) return 1e9;
  return std::stod(quota) / period;
}

}  // namespace

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)std::thread::hardware_concurrency();
  double limit = cgroup_cores();
  if (limit < cores) cores = (int)std::ceil(limit);
  return cores < 1 ? 1 : cores;
}

FlushDenormals::FlushDenormals() : saved_(0) {
#if defined(__x86_64__)
  saved_ = _mm_getcsr();
  _mm_setcsr(saved_ | 0x8040);
#endif
}

FlushDenormals::~FlushDenormals() {
#if defined(__x86_64__)
  _mm_setcsr(saved_);
#endif
}

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads) {
  for (int t = 1; t < size_; ++t) threads_.emplace_back([this, t] { work(t); });
}

Pool::~Pool() {
  stop_ = true;
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto& t : threads_) t.join();
}

void Pool::run(const std::function<void(int)>& fn) {
  FlushDenormals flush;
  if (size_ == 1) return fn(0);
  job_ = &fn;
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (parked_.load(std::memory_order_seq_cst) > 0) epoch_.notify_all();
  fn(0);
  barrier();
}

void Pool::barrier() {
  if (size_ == 1) return;
  uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
    pause();
    if (spins > kYieldAfter) sched_yield();
  }
}

void Pool::wait_for(const std::atomic<uint32_t>& value, uint32_t old) const {
  auto until = std::chrono::steady_clock::now() + kSpin;
  for (int spins = 0; value.load(std::memory_order_acquire) == old; ++spins) {
    pause();
    if (spins % 64 == 63 && std::chrono::steady_clock::now() > until) {
      auto& parked = const_cast<std::atomic<int>&>(parked_);
      parked.fetch_add(1, std::memory_order_seq_cst);
      value.wait(old, std::memory_order_seq_cst);
      parked.fetch_sub(1, std::memory_order_seq_cst);
      return;
    }
  }
}

void Pool::work(int thread) {
  FlushDenormals flush;
  uint32_t seen = 0;
  for (;;) {
    wait_for(epoch_, seen);
    uint32_t now = epoch_.load(std::memory_order_acquire);
    if (now == seen) continue;
    seen = now;
    if (stop_) return;
    (*job_)(thread);
    barrier();
  }
}

}  // namespace slip
