// Worker threads: asleep when idle, shared by all callers, remade after a fork.
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
void join_team(void* gomp_parallel);

}  // namespace saccade
