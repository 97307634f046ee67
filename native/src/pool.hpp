// Threads that run one function together: they spin briefly between calls, then park.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace slip {

class Pool {
 public:
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  int size() const { return size_; }
  // Run fn(thread) on every thread, the caller's included, and wait for all of them. Not reentrant.
  void run(const std::function<void(int)>& fn);
  // Inside run: wait until every thread has come here.
  void barrier();

 private:
  void work(int thread);
  void wait_for(const std::atomic<uint32_t>& value, uint32_t old) const;

  int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> parked_{0};
  std::atomic<bool> stop_{false};
};

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
