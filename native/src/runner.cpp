// Steps run one after the other on a thread of their own, so that the next one can be planned while one runs.
#include "runner.hpp"

#include <algorithm>
#include <stdexcept>

namespace slip {

Runner::Runner(Executor& executor) : executor_(executor), thread_([this] { work(); }) {}

Runner::~Runner() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Runner::submit(const Job& job) {
  {
    std::lock_guard lock(mutex_);
    jobs_.push_back(std::make_unique<Job>(job));
  }
  changed_.notify_all();
}

void Runner::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return std::all_of(jobs_.begin(), jobs_.end(), [](const auto& job) { return job->done; }); });
}

StepSeconds Runner::collect() {
  std::unique_ptr<Job> job;
  {
    std::unique_lock lock(mutex_);
    if (jobs_.empty()) throw std::logic_error("no step was submitted");
    changed_.wait(lock, [this] { return jobs_.front()->done; });
    job = std::move(jobs_.front());
    jobs_.pop_front();
  }
  if (job->error) std::rethrow_exception(job->error);
  return job->seconds;
}

void Runner::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    Job* next = nullptr;
    changed_.wait(lock, [&] {
      auto waiting = std::find_if(jobs_.begin(), jobs_.end(), [](const auto& job) { return !job->done; });
      next = waiting == jobs_.end() ? nullptr : waiting->get();
      return stop_ || next;
    });
    if (stop_) return;
    lock.unlock();
    try {
      run(*next);
    } catch (...) {
      next->error = std::current_exception();
    }
    lock.lock();
    next->done = true;
    changed_.notify_all();
  }
}

void Runner::run(Job& job) {
  executor_.copy_blocks(job.copies, job.copied);
  for (int r = 0; r < job.in.rows; ++r) {
    if (job.tokens[r] >= 0) continue;
    const int draw = -1 - job.tokens[r];
    if (draw >= (int)last_.size()) throw std::runtime_error("a row waits for a token that the last step did not draw");
    job.tokens[r] = last_[draw];
  }
  executor_.step(job.in, job.sampled ? &job.draws : nullptr, job.sampled ? &job.drawn : nullptr);
  last_.resize(job.sampled ? job.draws.rows : 0);
  for (size_t i = 0; i < last_.size(); ++i) last_[i] = job.drawn.tokens[i * job.drawn.width];
  job.seconds = executor_.seconds();
}

}  // namespace slip
