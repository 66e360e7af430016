// Worker threads: asleep when idle, shared by all callers, remade after a fork. Calls can be interrupted.
#pragma once
#include <cstdint>
#include <functional>

namespace saccade {

// runs body(task) for every task in [0, n) on at most `threads` threads, the caller among them, and returns when all are done
void parallel(int64_t n, int threads, const std::function<void(int64_t)>& body);

// this thread's scratch memory: at least `bytes`, aligned to 64, contents undefined
char* scratch(int64_t bytes);

int live_workers();

// From now on what this thread runs is run by an OpenMP runtime: its GOMP_parallel, or null for threads of our own. A
// framework's runtime keeps its threads awake after its own calls, on the cores that ours would have to wake up on.
// pause: its omp_pause_resource_all, or null. A forked process never joins a team.
void join_team(void* gomp_parallel, void* pause);

// once, when the core is loaded
void handle_forks();

// While this lives, `ask` is called about every 50 ms of the work of this thread's calls; a call ends with what it throws.
// null: the thread's calls run to their end.
class Interruptible {
 public:
  explicit Interruptible(void (*ask)());
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;

 private:
  void (*outer_)();
};

}  // namespace saccade
