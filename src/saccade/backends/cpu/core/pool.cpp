#include "pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>
#if !defined(_WIN32)
#include <pthread.h>
#endif

namespace saccade {
namespace {

struct Job {
  const std::function<void(int64_t)>* body = nullptr;
  int64_t n = 0;
  std::atomic<int64_t> next{0};
  int seats = 0;               // workers that may still join
  std::atomic<int> inside{0};  // workers at it now
  std::exception_ptr error;
};

// Watches for a change a while before its thread sleeps: to be woken takes longer than a short call. Who else wants the
// core gets it at once.
template <class Ready>
bool watch(Ready ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  do {
    for (int n = 0; n < 32; ++n) {
      if (ready()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

std::mutex errors;

void take_tasks(Job& job) {
  try {
    for (int64_t task; (task = job.next.fetch_add(1, std::memory_order_relaxed)) < job.n;) (*job.body)(task);
  } catch (...) {
    job.next = job.n;
    std::lock_guard<std::mutex> lock(errors);
    if (!job.error) job.error = std::current_exception();
  }
}

class Pool {
 public:
  void run(int64_t n, int threads, const std::function<void(int64_t)>& body) {
    Job job;
    job.body = &body;
    job.n = n;
    const int helpers = static_cast<int>(std::min<int64_t>(threads, n)) - 1;
    job.seats = helpers;
    int asleep;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (workers_ < helpers) {
        std::thread(&Pool::work, this).detach();
        ++workers_;
      }
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
    watch([&] { return job.inside == 0; });
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return job.inside == 0; });
    if (job.error) std::rethrow_exception(job.error);
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
  std::atomic<uint64_t> posted_{0};  // jobs so far
  int workers_ = 0, asleep_ = 0;
};

using Team = void (*)(void (*)(void*), void*, unsigned, unsigned);
// of this thread alone: an OpenMP runtime gives every thread that asks a team of its own
thread_local Team team = nullptr;
bool forked = false;

// never destroyed: workers sleep until the process ends; a forked child starts with a pool of its own
Pool* pool = nullptr;
std::once_flag once;

Pool& the_pool() {
  std::call_once(once, [] {
    pool = new Pool;
#if !defined(_WIN32)
    // a child's OpenMP runtime would wait for threads that stayed with the parent
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool, team = nullptr, forked = true; });
#endif
  });
  return *pool;
}

struct Scratch {
  char* data = nullptr;
  int64_t size = 0;
  ~Scratch() { std::free(data); }
};
thread_local Scratch mine;

}  // namespace

void parallel(int64_t n, int threads, const std::function<void(int64_t)>& body) {
  if (n <= 0) return;
  if (threads <= 1 || n == 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  if (!team) return the_pool().run(n, threads, body);
  Job job;
  job.body = &body;
  job.n = n;
  // the whole team even for fewer tasks: a runtime asked for fewer threads ends the others
  team([](void* data) { take_tasks(*static_cast<Job*>(data)); }, &job, static_cast<unsigned>(threads), 0);
  if (job.error) std::rethrow_exception(job.error);
}

void join_team(void* gomp_parallel) {
  the_pool();  // whose fork handler leaves the team
  team = forked ? nullptr : reinterpret_cast<Team>(gomp_parallel);
}

char* scratch(int64_t bytes) {
  if (bytes > mine.size) {
    std::free(mine.data);
    mine.size = (bytes + 4095) / 4096 * 4096;
    mine.data = static_cast<char*>(std::aligned_alloc(4096, static_cast<size_t>(mine.size)));
    if (!mine.data) {
      mine.size = 0;
      throw std::bad_alloc();
    }
  }
  return mine.data;
}

int live_workers() { return the_pool().workers(); }

}  // namespace saccade
