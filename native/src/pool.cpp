// Threads that run one function together: they spin briefly between calls, then park.
#include "pool.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace slip {
namespace {

constexpr auto kSpin = std::chrono::microseconds(200);  // longer than the pause between two steps
constexpr int kYieldAfter = 1 << 14;                    // pauses after which a waiting thread gives way
constexpr int kThreadBits = 12;
constexpr double kCrowdWindow = 0.1, kCrowded = 0.3;  // seconds that are looked at together, and the share lost that is too much
constexpr double kFirstPause = 0.1, kLongestPause = 8.0;  // seconds until more threads are tried

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

constexpr double kUnlimited = 1e9;

// Cores that one control group grants: `cpu.max` says how in version 2, two files in version 1.
double granted(const std::string& folder) {
  std::ifstream both(folder + "/cpu.max"), first(folder + "/cpu.cfs_quota_us"), second(folder + "/cpu.cfs_period_us");
  std::string quota;
  double period = 0;
  if (!(both >> quota >> period) && !(first >> quota && second >> period)) return kUnlimited;
  const double microseconds = std::atof(quota.c_str());  // "max" and -1 are no limit
  return microseconds > 0 && period > 0 ? microseconds / period : kUnlimited;
}

}  // namespace

double cgroup_cores(const std::string& groups, const std::string& root) {
  double least = kUnlimited;
  std::ifstream file(groups);
  for (std::string line; std::getline(file, line);) {
    const size_t a = line.find(':'), b = line.find(':', a + 1);
    if (b == std::string::npos) continue;
    const std::string controllers = line.substr(a + 1, b - a - 1);
    std::vector<std::string> mounts;
    if (controllers.empty()) mounts = {root, root + "/unified"};
    else if (("," + controllers + ",").find(",cpu,") != std::string::npos) mounts = {root + "/" + controllers, root + "/cpu"};
    // A limit holds for all groups below it. In a container the path is the host's: its own group is the mount's root.
    for (std::string path = line.substr(b + 1);; path.resize(path.rfind('/'))) {
      for (const std::string& mount : mounts) least = std::min(least, granted(mount + path));
      if (path.find('/') == std::string::npos) break;
    }
  }
  return least;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : (int)std::thread::hardware_concurrency();
  const double limit = cgroup_cores("/proc/self/cgroup", "/sys/fs/cgroup");
  if (limit < cores) cores = (int)limit;  // of threads that share a core's part all wait for the one that is held up
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

void Crowd::note(double seconds, double stolen, double now) {
  run_ += seconds;
  lost_ += stolen;
  if (run_ < kCrowdWindow) return;
  const bool crowded = lost_ > kCrowded * run_;
  run_ = lost_ = 0;
  if (crowded && threads_ > 1) {
    pause_ = trying_ || pause_ == 0 ? std::min(std::max(2 * pause_, kFirstPause), kLongestPause) : pause_;
    retry_ = now + pause_;
    trying_ = false;
    --threads_;
  } else if (threads_ < most_ && now >= retry_) {
    trying_ = true;
    ++threads_;
  } else if (threads_ == most_ && !crowded) {
    pause_ = 0;
    trying_ = false;
  }
}

Pool::Pool(int threads) : most_(threads < 1 ? 1 : threads), size_(most_), crowd_(most_), wanted_(most_) {
  try {
    for (int t = 1; t < most_; ++t) threads_.emplace_back([this, t] { work(t); });
  } catch (...) {
    finish();
    throw;
  }
}

Pool::~Pool() { finish(); }

void Pool::finish() {
  stop_ = true;
  wanted_.store(most_ + 1);
  wanted_.notify_all();
  epoch_.fetch_add(1 << kThreadBits);
  epoch_.notify_all();
  for (auto& t : threads_) t.join();
}

void Pool::use(int threads) {
  threads = std::clamp(threads, 1, most_);
  if (threads == size_) return;
  size_ = threads;
  wanted_.store(threads, std::memory_order_seq_cst);
  wanted_.notify_all();
}

void Pool::run(const std::function<void(int)>& fn) {
  FlushDenormals flush;
  if (size_ == 1) return fn(0);
  job_ = &fn;
  const uint32_t runs = (epoch_.load(std::memory_order_relaxed) >> kThreadBits) + 1;
  epoch_.store(runs << kThreadBits | (uint32_t)size_, std::memory_order_seq_cst);
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
    for (int wanted; (wanted = wanted_.load(std::memory_order_acquire)) <= thread;) wanted_.wait(wanted);
    wait_for(epoch_, seen);
    uint32_t now = epoch_.load(std::memory_order_acquire);
    if (now == seen) continue;
    seen = now;
    if (stop_) return;
    if (thread >= (int)(now & ((1 << kThreadBits) - 1))) continue;
    (*job_)(thread);
    barrier();
  }
}

}  // namespace slip
