// Worker threads: asleep when idle, shared by all callers, recreated after a fork. Calls can be interrupted.
#pragma once
#include <cstdint>
#include <functional>

namespace saccade {

// runs body(task) for every task in [0, n) on at most `threads` threads, the caller included; returns when all are done
void parallel(int64_t n, int threads, const std::function<void(int64_t)>& body);

// this thread's scratch memory: at least `bytes`, aligned to 64 bytes, contents undefined
char* scratch(int64_t bytes);

int live_workers();

// From now on the calls of this thread run on an OpenMP runtime, given by its GOMP_parallel, or on our own threads if
// that is null. A framework's runtime keeps its threads awake after its own calls, on the cores that our threads would
// have to wake up on. pause: the runtime's omp_pause_resource_all, or null. A forked process never joins a team.
void join_team(void* gomp_parallel, void* pause);

// called once, when the core is loaded
void handle_forks();

// While this object lives, calls of this thread call `ask` about every 50 ms and end with the exception that it throws.
// null: the thread's calls are not interrupted.
class Interruptible {
 public:
  explicit Interruptible(void (*ask)());
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;

 private:
  void (*outer_)();
};

}  // namespace saccade
