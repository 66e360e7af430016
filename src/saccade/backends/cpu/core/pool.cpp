#include "pool.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "chip.hpp"
#include "system.hpp"
#include "types.hpp"

namespace saccade {
namespace {

using Clock = std::chrono::steady_clock;

// interval of the checks for an interruption: Ctrl-C is answered well within 0.2 s
constexpr auto SLICE = std::chrono::milliseconds(50);

struct Stopped {};  // leaves a task of an abandoned job

struct Job {
  const std::function<void(int64_t)>* body = nullptr;
  int64_t n = 0;
  int threads = 1;
  std::atomic<int64_t> next{0};
  int seats = 0;               // workers that may still join
  std::atomic<int> inside{0};  // helpers that run its tasks now
  std::atomic<bool> stop{false};
  // in the job, because a mutex of the process could be locked for ever in a forked child
  std::mutex guard;
  std::exception_ptr error;

  // ends the job with the exception being handled; the caller gets the first one
  void give_up() {
    stop.store(true, std::memory_order_relaxed);
    next = n;
    std::lock_guard<std::mutex> lock(guard);
    if (!error) error = std::current_exception();
  }
};

// Polls for a change for a while before its thread sleeps, because waking up takes longer than a short call. It yields
// the core to any other thread.
template <class Ready>
bool watch(Ready ready, std::chrono::microseconds time = std::chrono::microseconds(50)) {
  const auto end = Clock::now() + time;
  do {
    for (int n = 0; n < 32; ++n) {
      if (ready()) return true;
      relax();
    }
    std::this_thread::yield();
  } while (Clock::now() < end);
  return ready();
}

struct Scratch {
  char* data = nullptr;
  int64_t size = 0;
  ~Scratch() { free_aligned(data); }
};
thread_local Scratch mine;

// what this thread is doing
struct Turn {
  Job* job = nullptr;
  void (*ask)() = nullptr;       // throws if the call must stop
  int looks = 0;                 // checks in this call so far: a short call never reads the clock
  int skipped = 0, skip = 0;     // checks without a look at the clock, where they come in less than a microsecond
  Clock::time_point last, next;  // when the clock was read, and when to ask again
};
thread_local Turn turn;

// calls `ask` when it is due
void look(Turn& own) {
  constexpr int SHORT = 4;
  if (!own.ask || ++own.looks < SHORT) return;
  if (own.looks > SHORT) {
    const Clock::time_point now = Clock::now();
    const bool often = now - std::exchange(own.last, now) < (own.skip + 1) * std::chrono::microseconds(1);
    own.skipped = 0, own.skip = often ? 16 : 0;
    if (now < own.next) return;
    // signal handlers may make calls on this thread; they must not use the scratch memory of the interrupted call
    struct Aside {
      Scratch held;
      Aside() { swap(); }
      ~Aside() { swap(); }
      void swap() { std::swap(held.data, mine.data), std::swap(held.size, mine.size); }
    } aside;
    own.ask();
  }
  own.looks = SHORT, own.last = Clock::now(), own.next = own.last + SLICE;
}

void take_tasks(Job& job) {
  const PlainNumbers mode;
  Job* const outer = std::exchange(turn.job, &job);
  try {
    // Neighbouring tasks read neighbouring memory, so a thread takes several, and fewer the fewer are left.
    for (int64_t task = 0, end; task < job.n;) {
      const int64_t left = job.n - job.next.load(std::memory_order_relaxed);
      const int64_t some = std::max<int64_t>(1, left / (int64_t{4} * job.threads));
      task = job.next.fetch_add(some, std::memory_order_acq_rel);
      for (end = std::min(task + some, job.n); task < end; ++task) {
        check_stop();
        (*job.body)(task);
      }
    }
  } catch (const Stopped&) {
  } catch (...) {
    job.give_up();
  }
  turn.job = outer;
}

class Pool {
 public:
  void run(Job& job, int threads) {
    const int helpers = static_cast<int>(std::min<int64_t>(threads, job.n)) - 1;
    job.seats = helpers;
    int asleep;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (workers_ < helpers && start_worker()) ++workers_;
      jobs_.push_back(&job);
      posted_.fetch_add(1, std::memory_order_release);
      asleep = asleep_;
    }
    for (int i = 0; i < std::min(helpers, asleep); ++i) wake_.notify_one();
    take_tasks(job);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::erase(jobs_, &job);
    }
    wait(job, std::chrono::microseconds(50));
  }
  // returns when no helper runs the job's tasks; polls for `time` before it sleeps
  void wait(Job& job, std::chrono::microseconds time) {
    const auto alone = [&] { return job.inside == 0; };
    watch(alone, time);
    std::unique_lock<std::mutex> lock(mutex_);
    while (!done_.wait_for(lock, SLICE, alone)) {
      lock.unlock();
      try {
        look(turn);
      } catch (...) {
        job.give_up();
      }
      lock.lock();
    }
  }
  void leave(Job& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (--job.inside == 0) done_.notify_all();
  }
  int workers() {
    std::lock_guard<std::mutex> lock(mutex_);
    return workers_;
  }

 private:
  Job* open_job() {
    for (Job* job : jobs_)
      if (job->seats > 0 && job->next.load(std::memory_order_relaxed) < job->n) return job;
    return nullptr;
  }
  // false where the system has no room for another thread; tasks are then left to the others
  bool start_worker() {
    try {
      std::thread(&Pool::work, this).detach();
    } catch (const std::system_error&) {
      return false;
    }
    return true;
  }
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job;
      while (!(job = open_job())) rest(lock);
      --job->seats;
      ++job->inside;
      lock.unlock();
      take_tasks(*job);
      lock.lock();
      if (--job->inside == 0) done_.notify_all();
    }
  }

  void rest(std::unique_lock<std::mutex>& lock) {
    const uint64_t seen = posted_.load(std::memory_order_relaxed);
    lock.unlock();
    const bool news = watch([&] { return posted_.load(std::memory_order_acquire) != seen; });
    lock.lock();
    if (news || posted_.load(std::memory_order_relaxed) != seen) return;
    ++asleep_;
    wake_.wait(lock);
    --asleep_;
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<Job*> jobs_;
  std::atomic<uint64_t> posted_{0};  // number of jobs so far
  int workers_ = 0, asleep_ = 0;
};

using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Pause = int (*)(int);
// per thread: an OpenMP runtime gives every calling thread a team of its own
thread_local Team team = nullptr;
thread_local Pause end_team = nullptr;

bool forked = false;

// never destroyed: workers sleep until the process ends; a forked child creates a pool of its own
Pool* pool = new Pool;

// what each thread of a team runs; only the caller's turn already refers to this job
void share(void* data) {
  Job& job = *static_cast<Job*>(data);
  if (turn.job != &job) {
    ++job.inside;
    take_tasks(job);
    return pool->leave(job);
  }
  take_tasks(job);
  // `ask` cannot be called in the barrier that ends the region, so the caller waits here first
  if (turn.ask) pool->wait(job, std::chrono::milliseconds(2));
}

}  // namespace

void parallel(int64_t n, int threads, const std::function<void(int64_t)>& body) {
  if (n <= 0) return;
  if (threads <= 1 || n == 1) {
    const PlainNumbers mode;
    for (int64_t i = 0; i < n; ++i) check_stop(), body(i);
    return;
  }
  Job job;
  job.body = &body;
  job.n = n;
  job.threads = threads;
  if (!team) {
    pool->run(job, threads);
  } else {
    Job* const outer = std::exchange(turn.job, &job);
    // always the whole team, because a runtime that is asked for fewer threads ends the others
    team(share, &job, static_cast<unsigned>(threads), 0);
    turn.job = outer;
  }
  if (job.error) std::rethrow_exception(job.error);
}

void join_team(void* gomp_parallel, void* pause) {
  team = forked ? nullptr : reinterpret_cast<Team>(gomp_parallel);
  if (team) end_team = reinterpret_cast<Pause>(pause);
}

void handle_forks() {
  forked = was_forked();
  // After a fork, the child's runtime would wait for its team's threads, which exist only in the parent. So a team that
  // this core made a framework's runtime start is ended before the fork; the next parallel region starts another.
  constexpr int SOFT = 1;
  at_forks([] { end_team ? static_cast<void>(end_team(SOFT)) : static_cast<void>(0); },
           [] { pool = new Pool, team = nullptr, forked = true; });
}

void check_stop() {
  Turn& own = turn;
  if (own.job && own.job->stop.load(std::memory_order_relaxed)) throw Stopped{};
  if (own.skipped++ >= own.skip) look(own);
}

Interruptible::Interruptible(void (*ask)()) : outer_(std::exchange(turn.ask, ask)) { turn.looks = turn.skip = 0; }
Interruptible::~Interruptible() { turn.ask = outer_; }

char* scratch(int64_t bytes) {
  if (bytes > mine.size) {
    free_aligned(mine.data);
    mine.size = (bytes + 4095) / 4096 * 4096;
    mine.data = static_cast<char*>(aligned(4096, static_cast<size_t>(mine.size)));
    if (!mine.data) {
      mine.size = 0;
      throw std::bad_alloc();
    }
  }
  return mine.data;
}

int live_workers() { return pool->workers(); }

}  // namespace saccade
