// Steps run one after the other on a thread of their own, so that the next one can be planned while one runs.
#pragma once
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

#include "executor.hpp"

namespace slip {

// A step to run; whoever submits it keeps the arrays alive until it is collected, or the runner is gone.
struct Job {
  StepInput in;
  int32_t* tokens;  // in.token; one that is negative, -1 - i, becomes what draw i of the job before came to
  bool sampled;
  SampleInput draws;
  SampleOutput drawn;
  const int32_t* copies;  // [copied, 2] cache blocks (from, to), copied before the step
  int copied;
  StepSeconds seconds{};
  std::exception_ptr error{};
  bool done = false;
};

class Runner {
 public:
  explicit Runner(Executor& executor);
  ~Runner();
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;
  void submit(const Job& job);
  // Until every job has run.
  void wait();
  // Wait for the oldest job that was not collected, and forget it. Throws what it threw, or std::logic_error if there is none.
  StepSeconds collect();

 private:
  void work();
  void run(Job& job);

  Executor& executor_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Job>> jobs_;
  std::vector<int32_t> last_;  // what the last job drew; its own arrays may be gone
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace slip
