// Threads that run one function together: they spin briefly between calls, then park.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace slip {

// How many threads to run while other processes keep cores busy. A thread that waits for its core holds up the others at
// every barrier: with fewer threads than cores that are left, nobody waits. Whether more are possible again is tried now
// and then, ever more seldom as long as they are not.
class Crowd {
 public:
  explicit Crowd(int threads) : most_(threads), threads_(threads) {}
  int threads() const { return threads_; }
  // So many seconds were run with threads(), in which a thread stood still for `stolen` of them; `now` by any steady clock.
  void note(double seconds, double stolen, double now);

 private:
  int most_, threads_;
  double run_ = 0, lost_ = 0;
  double pause_ = 0, retry_ = 0;  // seconds until more are tried, and when that is
  bool trying_ = false;
};

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  // Threads there are, and those that the next run takes.
  int most() const { return most_; }
  int size() const { return size_; }
  // From now on run this many threads. Between two runs only.
  void use(int threads);
  // The same, as many as the company of other processes makes sensible; and what a run came to, for that.
  void use_sensibly() { use(crowd_.threads()); }
  void note(double seconds, double stolen, double now) { crowd_.note(seconds, stolen, now); }
  // Run fn(thread) on every thread in use, the caller's included, and wait for all of them. Not reentrant.
  void run(const std::function<void(int)>& fn);
  // Inside run: wait until every thread has come here.
  void barrier();

 private:
  void work(int thread);
  void finish();
  void wait_for(const std::atomic<uint32_t>& value, uint32_t old) const;

  int most_, size_;
  Crowd crowd_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  // Runs so far, shifted left, and the threads that the latest takes: who comes late must not mistake one for the next.
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<int> wanted_;  // size_, for the threads that are not in use: they wait until they are
  std::atomic<bool> stop_{false};
};

// Cores that the process's control groups grant it, by a file like /proc/self/cgroup and where the groups are mounted.
double cgroup_cores(const std::string& groups, const std::string& root);
// Cores this process may use: its affinity mask, cut by the cgroup's quota.
int usable_cores();
// Denormals as zero on the calling thread, as AMX has it, for the life of the object.
class FlushDenormals {
 public:
  FlushDenormals();
  ~FlushDenormals();

 private:
  unsigned saved_;
};

}  // namespace slip
